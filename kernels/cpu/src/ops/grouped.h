// Weights of 4 or 8 bit numbers with a scale, and maybe an offset, for each row and group of columns, in tile order:
//
//   W[n, k] = number[n, k] * scale[n, k / group] + offset[n, k / group]
//
//   INT4    -8 ... 7, eight to a word, the first in the lowest bits: a block is 128 deep
//   INT8    four to a word (int8.h): a block is 64 deep
//   FP8     float8 E4M3 without infinities, four to a word; a NaN is not expected
//
// A group is 32 or 64 deep or whole blocks, and scales lie [panel][group][32 rows].
#pragma once

// load<J>: number J of each word, times 1 / UNIT, exact in float32 and in bfloat16; of words that `open` has prepared. SUBNORMAL:
// the smallest numbers are right only where a SubnormalScope is open.
struct Int4 {
  static constexpr bool SUBNORMAL = false;
  typedef const char* Opened;
  static Opened open(const char* p) { return p; }
  static constexpr int PER_WORD = 8;
  static constexpr int64_t DEPTH = 128;
#if defined(__AVX512F__)
  static constexpr float UNIT = 1.0f;
  template <int J>
  INLINE vec load(const char* p) {  // a permutation looks at the lowest 4 bits of a lane
    const vec table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
    return _mm512_permutexvar_ps(_mm512_srli_epi32(_mm512_loadu_si512(p), 4 * J), table);
  }
#else
  static constexpr float UNIT = 0x1p-28f;
  template <int J>
  INLINE vec load(const char* p) {  // at the top of the word, with its sign
    __m256i words = _mm256_loadu_si256((const __m256i*)p);
    if (J < 7) words = _mm256_slli_epi32(words, 28 - 4 * J);
    if (J > 0) words = _mm256_and_si256(words, _mm256_set1_epi32(0xf0000000));
    return _mm256_cvtepi32_ps(words);
  }
#endif
  static float at(uint32_t word, int64_t j) { return (float)((int32_t)(word << (28 - 4 * j)) >> 28); }
};

struct Int8 {
  static constexpr bool SUBNORMAL = false;
  typedef const char* Opened;
  static Opened open(const char* p) { return p; }
  static constexpr int PER_WORD = 4;
  static constexpr int64_t DEPTH = DEPTH_INT8;
  static constexpr float UNIT = BYTE_UNIT;
  template <int J>
  INLINE vec load(const char* p) { return load_byte<J>(p); }
  static float at(uint32_t word, int64_t j) { return (float)((int32_t)(word << (24 - 8 * j)) >> 24); }
};

struct Fp8 {
  static constexpr int PER_WORD = 4;
  static constexpr int64_t DEPTH = DEPTH_INT8;
  static constexpr float UNIT = 256.0f;
#if defined(__AVX512F__)
  // Sign, exponent and fraction go where float16 has them, whose exponent counts from another zero. Its conversion is right for
  // the smallest numbers too, also where those of float32 are taken for zero.
  static constexpr bool SUBNORMAL = false;
  typedef const char* Opened;
  static Opened open(const char* p) { return p; }
  template <int J>
  INLINE vec load(const char* p) {
    __m512i words = _mm512_loadu_si512(p);
    if (J < 3) words = _mm512_slli_epi32(words, 24 - 8 * J);
    words = _mm512_and_si512(_mm512_srai_epi32(words, 17), _mm512_set1_epi32(0xbf80));
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words));
  }
#else
  // ... where float32 has them: the number times 2^-120, a subnormal one if it is one itself. Zen 3 converts half as many float16.
  static constexpr bool SUBNORMAL = true;
  struct Opened {  // in halves of words: the first and third number, the second and fourth
    __m256i even, odd;
  };
  INLINE Opened open(const char* p) {
    const __m256i words = _mm256_loadu_si256((const __m256i*)p);
    return {halves(_mm256_slli_epi16(words, 8)), halves(words)};
  }
  INLINE __m256i halves(__m256i upper) { return _mm256_and_si256(_mm256_srai_epi16(upper, 4), _mm256_set1_epi16((short)0x87f0)); }
  template <int J>
  INLINE vec load(const Opened& words) {
    const __m256i both = J % 2 ? words.odd : words.even;
    const __m256i bits = J / 2 ? _mm256_and_si256(both, _mm256_set1_epi32(0xffff0000)) : _mm256_slli_epi32(both, 16);
    return vmul(_mm256_castsi256_ps(bits), vset(0x1p112f));
  }
#endif
  static float at(uint32_t word, int64_t j) {
    const int32_t bits = (int32_t)(word << (24 - 8 * j)) >> 17 & 0xbf80;
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits))) * UNIT;
  }
};

struct NoScope {
  NoScope() {}  // no warning that it goes unused
};

#if !defined(__AVX512F__)
// Subnormal operands count in here as they are; results that would be subnormal are zero as everywhere. What is computed in here
// must be in a function that isn't inlined: the compiler doesn't know that its operations depend on this.
struct SubnormalScope {
  const unsigned mode;
  SubnormalScope() : mode(_mm_getcsr()) { _mm_setcsr(mode & ~0x0040u); }
  ~SubnormalScope() { _mm_setcsr(mode); }
  SubnormalScope(const SubnormalScope&) = delete;
  SubnormalScope& operator=(const SubnormalScope&) = delete;
};

// What an operand stands for everywhere else.
INLINE vec without_subnormal(vec x) {
  const __m256i bits = _mm256_castps_si256(x), exponent = _mm256_and_si256(bits, _mm256_set1_epi32(0x7f800000));
  return _mm256_castsi256_ps(_mm256_andnot_si256(_mm256_cmpeq_epi32(exponent, _mm256_setzero_si256()), bits));
}
template <typename N>
using NumbersScope = std::conditional_t<N::SUBNORMAL, SubnormalScope, NoScope>;
#else
INLINE vec without_subnormal(vec x) { return x; }
template <typename N>
using NumbersScope = NoScope;
#endif

// The numbers J and after of W words of a strip, into the tile order of T; the first of all is number k of its row.
template <typename N, int J = 0>
INLINE void spread_words(const typename N::Opened& words, char* strip, int64_t k, float) {
  if constexpr (J < N::PER_WORD) {
    vstore((float*)(strip + (k + J) / 16 * BLOCK_BYTES + (k + J) % 16 * 64), N::template load<J>(words));
    spread_words<N, J + 1>(words, strip, k, 0.0f);
  }
}
template <typename N, int J = 0>
INLINE void spread_words(const typename N::Opened& words, char* strip, int64_t k, bf16) {
  if constexpr (J < N::PER_WORD) {
    char* to = strip + (k + J) / 32 * BLOCK_BYTES + (k + J) % 32 / 2 * 64;
    store_pair(to, N::template load<J>(words), N::template load<J + 1>(words));
    spread_words<N, J + 2>(words, strip, k, bf16());
  }
}

// One word row of a strip, 16 words.
template <typename N, typename T>
INLINE void spread_word(const char* from, char* strip, int64_t k, T type) {
  for (int v = 0; v < VECTORS; ++v) spread_words<N>(N::open(from + v * W * 4), strip + v * W * 4, k, type);
}

// Blocks of a panel, as blocks of DEPTH<T> k of T, times 1 / UNIT: exact in either type.
template <typename T, typename N>
void spread_blocks(const char* from, int64_t num_blocks, char* to) {
  for (int64_t block = 0; block < num_blocks; ++block, from += BLOCK_BYTES, to += N::DEPTH / DEPTH<T> * BLOCK_BYTES)
    for (int64_t strip = 0; strip < 2; ++strip)
      for (int64_t word = 0; word < 16; ++word)
        spread_word<N>(from + strip * TILE_BYTES + word * 64, to + strip * TILE_BYTES, word * N::PER_WORD, T());
}

template <typename T>
void group_sums(const GroupSumsArgs& a, const Region& region) {
  for (int64_t row; (row = next_task(region)) < a.num_rows;) {
    const T* x = (const T*)a.x + row * a.x_stride;
    for (int64_t g = 0; g < a.num_groups; ++g) {
      const int64_t end = smaller((g + 1) * a.group, a.size);
      vec sum = vzero();
      for (int64_t i = g * a.group; i < end; i += W) sum = vadd(sum, load_some(x + i, end - i));
      a.sums[row * a.num_groups + g] = vsum(sum);
    }
  }
}
