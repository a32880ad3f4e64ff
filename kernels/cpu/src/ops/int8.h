// int8 weights in tile order: a word is four of them, next to one another in a row of W (pack.h).
#pragma once

constexpr int64_t DEPTH_INT8 = 64;  // of a block

// Byte J of each word times 2^24, as float32 (exact): at the top of the word it has its sign without a shift back.
constexpr float BYTE_UNIT = 0x1p-24f;

// Packed numbers take longer to unpack than processors look ahead in memory: on Zen 3 8 KB ahead streams them 1.3 to 1.5 times
// as fast. Measured there only.
#if defined(__AVX512F__)
constexpr bool PREFETCHES = false;
INLINE void prefetch_ahead(const char*) {}
#else
constexpr bool PREFETCHES = true;
INLINE void prefetch_ahead(const char* p) { _mm_prefetch(p + (8 << 10), _MM_HINT_T0); }
#endif

// sum + x as it stands here: GCC 12 else adds a loop's integers up in a tree, all of whose leaves wait in memory.
#if defined(__AVX512F__)
INLINE __m512i add_in_order(__m512i sum, __m512i x) {
  asm("vpaddd %1, %0, %0" : "+v"(sum) : "v"(x));
  return sum;
}
#else
INLINE __m256i add_in_order(__m256i sum, __m256i x) {
  asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(x));
  return sum;
}
#endif

#if defined(__AVX512F__)
template <int J>
INLINE vec load_byte(const char* p) {
  __m512i words = _mm512_loadu_si512(p);
  if (J < 3) words = _mm512_slli_epi32(words, 24 - 8 * J);
  if (J > 0) words = _mm512_and_si512(words, _mm512_set1_epi32(0xff000000));
  return _mm512_cvtepi32_ps(words);
}
INLINE void store_pair(char* p, vec low, vec high) {  // as two bfloat16, for numbers that are such
  _mm512_storeu_si512(p, _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(low), 16), _mm512_castps_si512(high)));
}
INLINE vec from_integers(const float* p) { return _mm512_cvtepi32_ps(_mm512_loadu_si512(p)); }
INLINE vec vabs(vec x) { return _mm512_abs_ps(x); }
INLINE vec vmax_magnitude(vec a, vec b) {  // of two that aren't negative; NaN is the greatest
  return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}
INLINE void store_int8(char* p, vec x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x))); }
#else
template <int J>
INLINE vec load_byte(const char* p) {
  __m256i words = _mm256_loadu_si256((const __m256i*)p);
  if (J < 3) words = _mm256_slli_epi32(words, 24 - 8 * J);
  if (J > 0) words = _mm256_and_si256(words, _mm256_set1_epi32(0xff000000));
  return _mm256_cvtepi32_ps(words);
}
INLINE void store_pair(char* p, vec low, vec high) {
  const __m256i words = _mm256_or_si256(_mm256_srli_epi32(_mm256_castps_si256(low), 16), _mm256_castps_si256(high));
  _mm256_storeu_si256((__m256i*)p, words);
}
INLINE vec from_integers(const float* p) { return _mm256_cvtepi32_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE vec vabs(vec x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
INLINE vec vmax_magnitude(vec a, vec b) {
  return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
}
INLINE void store_int8(char* p, vec x) {
  const __m256i words = _mm256_cvtps_epi32(x);
  const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(halves, halves));
}
#endif

// One word row (16 words) of a strip into the tile order of T. `word` counts within the block's 16.
INLINE void unpack_word(const char* from, int64_t word, char* strip, float) {
  char* to = strip + word / 4 * BLOCK_BYTES + word % 4 * 4 * 64;  // four rows of one float each
  for (int v = 0; v < VECTORS; ++v, from += W * 4, to += W * 4) {
    vstore((float*)to, load_byte<0>(from));
    vstore((float*)(to + 64), load_byte<1>(from));
    vstore((float*)(to + 128), load_byte<2>(from));
    vstore((float*)(to + 192), load_byte<3>(from));
  }
}
INLINE void unpack_word(const char* from, int64_t word, char* strip, bf16) {
  char* to = strip + word / 8 * BLOCK_BYTES + word % 8 * 2 * 64;  // two rows of a pair each
  for (int v = 0; v < VECTORS; ++v, from += W * 4, to += W * 4) {
    store_pair(to, load_byte<0>(from), load_byte<1>(from));
    store_pair(to + 64, load_byte<2>(from), load_byte<3>(from));
  }
}

// Blocks of 64 k of a panel of int8, as blocks of DEPTH<T> k of T, times 2^24: exact in either type.
template <typename T>
void unpack_blocks(const char* from, int64_t num_blocks, char* to) {
  for (int64_t block = 0; block < num_blocks; ++block, from += BLOCK_BYTES, to += DEPTH_INT8 / DEPTH<T> * BLOCK_BYTES)
    for (int64_t strip = 0; strip < 2; ++strip)
      for (int64_t word = 0; word < 16; ++word)
        unpack_word(from + strip * TILE_BYTES + word * 64, word, to + strip * TILE_BYTES, T());
}

// Of a row; a NaN is the greatest.
template <typename T>
INLINE float largest_magnitude(const T* x, int64_t size) {
  vec top = vzero();
  for (int64_t i = 0; i < size; i += W) top = vmax_magnitude(top, vabs(load_some(x + i, size - i)));
  float lanes[W];
  vstore(lanes, top);
  uint32_t bits = 0;
  for (int i = 0; i < W; ++i) {
    uint32_t lane;
    __builtin_memcpy(&lane, lanes + i, 4);
    bits = lane > bits ? lane : bits;
  }
  float largest;
  __builtin_memcpy(&largest, &bits, 4);
  return largest;
}

// x = scale * q with q the nearest int8 in -127 ... 127 and scale = max |x| / 127, row by row. q is padded with zeros to whole
// blocks. A row with an infinity or a NaN gets it for its scale, so that it spoils the results as it would have.
template <typename T>
void quantize_rows(const QuantizeArgs& a, const Region& region) {
  for (int64_t row; (row = next_task(region)) < a.num_rows;) {
    const T* x = (const T*)a.x + row * a.x_stride;
    const float largest = largest_magnitude(x, a.size);
    a.scales[row] = largest / 127.0f;
    const vec inverse = vset(largest == 0.0f ? 0.0f : 127.0f / largest), limit = vset(127.0f), low = vset(-127.0f);
    char* q = a.out + row * a.out_stride;
    int32_t sum = 0;
    for (int64_t i = 0; i < a.out_stride; i += W) {
      const vec scaled = i < a.size ? vmul(load_some(x + i, a.size - i), inverse) : vzero();
      store_int8(q + i, vmax(vmin(scaled, limit), low));
    }
    for (int64_t i = 0; i < a.out_stride; ++i) sum += (signed char)q[i];
    a.sums[row] = sum;
  }
}
