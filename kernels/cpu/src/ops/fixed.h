// Fixed point: x as 16 bit integers with one power of two for each block of a row, numbers of a weight as pairs of them.
//
//   x[k] ≈ q[k] * 2^e,   2^14 <= max |q| < 2^15 over the block's k; what lies within 2^7 of the block's largest bfloat16 is exact
//
// Products and their sums over a group are integers that fit 32 bits, so they are exact in any order and on any set. Weights:
//
//   INT4 UINT4    a word is 8 numbers, the first in the lowest bits; 128 deep. UINT4 0 ... 15 is stored less 8
//   INT5 UINT5    for 32 deep 4 words of the low 4 bits and one of the fifth; INT5 -16 ... 15 is stored plus 16
//   INT6          the same with two words of 2 bits each; -32 ... 31 is stored plus 32
//   INT8          int8.h; 64 deep
//
// A unit is 32 deep: 16 vectors of pairs. Pair P of a nibble's word has numbers 8 w + j and 8 w + j + 4 (P = 4 w + j), that of
// bytes 4 w + j and 4 w + j + 2 (P = 2 w + j). x is stored in that order: [block][row][k], so that rows lie side by side.
#pragma once

#if defined(__AVX512F__)
typedef __m512i ivec;
INLINE ivec iload(const void* p) { return _mm512_loadu_si512(p); }
INLINE void istore(void* p, ivec v) { _mm512_storeu_si512(p, v); }
INLINE ivec iset(int32_t x) { return _mm512_set1_epi32(x); }
INLINE ivec ixor(ivec a, ivec b) { return _mm512_xor_si512(a, b); }
INLINE ivec iand(ivec a, ivec b) { return _mm512_and_si512(a, b); }
INLINE ivec and_or(ivec a, ivec mask, ivec b) { return _mm512_ternarylogic_epi32(a, mask, b, 0xea); }  // (a & mask) | b
template <int N>
INLINE ivec left16(ivec v) { return _mm512_slli_epi16(v, N); }
template <int N>
INLINE ivec right16(ivec v) { return _mm512_srli_epi16(v, N); }
template <int N>
INLINE ivec signed_right16(ivec v) { return _mm512_srai_epi16(v, N); }
template <int N>
INLINE ivec signed_right32(ivec v) { return _mm512_srai_epi32(v, N); }
INLINE ivec iadd(ivec a, ivec b) { return _mm512_add_epi32(a, b); }
INLINE vec to_floats(ivec v) { return _mm512_cvtepi32_ps(v); }
INLINE vec load_unsigned(const char* p) { return to_floats(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))); }
INLINE vec load_signed(const char* p) { return to_floats(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }
typedef __m256i shorts;  // W of 16 bits
INLINE shorts to_shorts(vec x) { return _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x)); }
INLINE shorts in_order(shorts v, __m128i order) { return _mm256_shuffle_epi8(v, _mm256_broadcastsi128_si256(order)); }
INLINE void store_shorts(int16_t* p, shorts v) { _mm256_storeu_si256((__m256i*)p, v); }
INLINE __m128i sum_pairs(shorts v) {  // 4 sums of 4
  const __m256i pairs = _mm256_madd_epi16(v, _mm256_set1_epi16(1));
  return _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
}
INLINE ivec products(ivec a, ivec b) { return _mm512_madd_epi16(a, b); }
#else
typedef __m256i ivec;
INLINE ivec iload(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
INLINE void istore(void* p, ivec v) { _mm256_storeu_si256((__m256i*)p, v); }
INLINE ivec iset(int32_t x) { return _mm256_set1_epi32(x); }
INLINE ivec ixor(ivec a, ivec b) { return _mm256_xor_si256(a, b); }
INLINE ivec iand(ivec a, ivec b) { return _mm256_and_si256(a, b); }
INLINE ivec and_or(ivec a, ivec mask, ivec b) { return _mm256_or_si256(_mm256_and_si256(a, mask), b); }
template <int N>
INLINE ivec left16(ivec v) { return _mm256_slli_epi16(v, N); }
template <int N>
INLINE ivec right16(ivec v) { return _mm256_srli_epi16(v, N); }
template <int N>
INLINE ivec signed_right16(ivec v) { return _mm256_srai_epi16(v, N); }
template <int N>
INLINE ivec signed_right32(ivec v) { return _mm256_srai_epi32(v, N); }
INLINE ivec iadd(ivec a, ivec b) { return _mm256_add_epi32(a, b); }
INLINE vec to_floats(ivec v) { return _mm256_cvtepi32_ps(v); }
INLINE vec load_unsigned(const char* p) { return to_floats(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
INLINE vec load_signed(const char* p) { return to_floats(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
typedef __m128i shorts;  // W of 16 bits
INLINE shorts to_shorts(vec x) {
  const __m256i words = _mm256_cvtps_epi32(x);
  return _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
INLINE shorts in_order(shorts v, __m128i order) { return _mm_shuffle_epi8(v, order); }
INLINE void store_shorts(int16_t* p, shorts v) { _mm_storeu_si128((__m128i*)p, v); }
INLINE __m128i sum_pairs(shorts v) { return _mm_madd_epi16(v, _mm_set1_epi16(1)); }
INLINE ivec products(ivec a, ivec b) { return _mm256_madd_epi16(a, b); }
#endif

// sum += q times two neighbours of x, in all lanes. GCC 12 loads hundreds of them ahead when it may, and then has them all in memory.
typedef int32_t __attribute__((may_alias)) Pair;
#if defined(__AVX512VNNI__)
INLINE void add_products(ivec& sum, ivec q, const int16_t* x) {
  asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(q), "m"(*(const Pair*)x));
}
#else
INLINE void add_products(ivec& sum, ivec q, const int16_t* x) {
  ivec pairs;
#if defined(__AVX512F__)
  asm("vpbroadcastd %1, %0" : "=v"(pairs) : "m"(*(const Pair*)x));
#else
  asm("vpbroadcastd %1, %0" : "=x"(pairs) : "m"(*(const Pair*)x));
#endif
  sum = add_in_order(sum, products(q, pairs));
}
#endif

template <int N>
INLINE ivec shifted16(ivec v) {  // to the left, or right if N is negative
  if constexpr (N > 0) return left16<N>(v);
  if constexpr (N < 0) return right16<-N>(v);
  return v;
}

// pair<P>: pair P of a unit, for the rows from lane v W on. ZERO is what must be added to the numbers as they are stored, START
// to those that come out. pair_in_place<P>: times 16 if P is odd, for an instruction less.
template <int OFFSET>
struct FixedNibbles {
  static constexpr int64_t DEPTH = 128, UNIT_BYTES = 4 * 64;
  static constexpr int32_t ZERO = OFFSET;
  static constexpr bool PACKED = true, NIBBLES = true, GROUPS_OF_16 = false;
#if defined(__AVX512F__)
  static constexpr int32_t START = ZERO;
  template <int P>
  INLINE ivec pair(const char* unit, int v) {
    const ivec words = iload(unit + P / 4 * 64 + v * W * 4);
    if constexpr (P % 4 == 3) return signed_right16<12>(words);
    if constexpr (P % 4 < 3) return signed_right16<12>(left16<12 - P % 4 * 4>(words));
  }
#else
  static constexpr int32_t START = ZERO - 8;  // 0 ... 15: any port can mask, two can shift
  INLINE ivec words(const char* unit, int P, int v) { return ixor(iload(unit + P / 4 * 64 + v * W * 4), iset(0x88888888)); }
  template <int P>
  INLINE ivec pair(const char* unit, int v) {
    const ivec moved = shifted16<P % 4 * -4>(words(unit, P, v));
    return P % 4 == 3 ? moved : iand(moved, iset(0x000f000f));
  }
  template <int P>
  INLINE ivec pair_in_place(const char* unit, int v) {
    return iand(shifted16<P % 4 / 2 * -8>(words(unit, P, v)), iset(P % 2 ? 0x00f000f0 : 0x000f000f));
  }
#endif
  static int32_t at(const char* unit, int64_t k) {
    return (int32_t)((*(const uint32_t*)(unit + k / 8 * 64)) << (28 - 4 * (k % 8))) >> 28;
  }
};
template <int BITS, int OFFSET>
struct FixedPlanes {
  static constexpr int64_t DEPTH = 128, UNIT_BYTES = (4 + BITS) * 64;
  static constexpr int32_t ZERO = OFFSET, START = OFFSET;
  static constexpr bool PACKED = true, NIBBLES = true, GROUPS_OF_16 = BITS == 2;
  static constexpr int PER_PLANE = 16 / BITS, MASK = BITS == 1 ? 0x00100010 : 0x00300030;
  INLINE ivec words(const char* unit, int P, int v) { return iload(unit + P / 4 * 64 + v * W * 4); }
  INLINE ivec plane(const char* unit, int P, int v) { return iload(unit + (4 + P / PER_PLANE) * 64 + v * W * 4); }
  template <int P>
  INLINE ivec pair(const char* unit, int v) {
    const ivec low = iand(shifted16<P % 4 * -4>(words(unit, P, v)), iset(0x000f000f));
    return and_or(shifted16<4 - P % PER_PLANE * BITS>(plane(unit, P, v)), iset(MASK), low);
  }
  template <int P>
  INLINE ivec pair_in_place(const char* unit, int v) {
    constexpr int AT = P % 2 * 4;
    const ivec low = iand(shifted16<P % 4 / 2 * -8>(words(unit, P, v)), iset(0x000f000f << AT));
    return and_or(shifted16<4 + AT - P % PER_PLANE * BITS>(plane(unit, P, v)), iset(MASK << AT), low);
  }
  static int32_t at(const char* unit, int64_t k) {
    const int64_t pair = k / 8 * 4 + k % 4, second = k % 8 / 4;
    const uint32_t low = *(const uint32_t*)(unit + k / 8 * 64) >> (4 * (k % 8)) & 15;
    const uint32_t high = *(const uint32_t*)(unit + (4 + pair / PER_PLANE) * 64) >> (pair % PER_PLANE * BITS + 16 * second);
    return (int32_t)(low | (high & ((1 << BITS) - 1)) << 4);
  }
};
struct FixedBytes {
  static constexpr int64_t DEPTH = DEPTH_INT8, UNIT_BYTES = 8 * 64;
  static constexpr int32_t ZERO = 0, START = 0;
  static constexpr bool PACKED = true, NIBBLES = false, GROUPS_OF_16 = false;
  template <int P>
  INLINE ivec pair(const char* unit, int v) {
    const ivec words = iload(unit + P / 2 * 64 + v * W * 4);
    return signed_right16<8>(P % 2 ? words : left16<8>(words));
  }
  static int32_t at(const char* unit, int64_t k) { return (signed char)unit[k / 4 * 64 + k % 4]; }
};
// What pairs are spread out to.
template <int64_t DEPTH_, bool GROUPS_OF_16_>
struct FixedSpread {
  static constexpr int64_t DEPTH = DEPTH_, UNIT_BYTES = 16 * 64;
  static constexpr bool PACKED = false, NIBBLES = false, GROUPS_OF_16 = GROUPS_OF_16_;
  template <int P>
  INLINE ivec pair(const char* unit, int v) { return iload(unit + P * 64 + v * W * 4); }
};
template <typename N>
using SpreadOf = FixedSpread<N::DEPTH, N::GROUPS_OF_16>;

// Whether the op of T goes this way: bfloat16 loses nothing by it where there are no tiles for it (linear_tiles.h).
template <typename T>
constexpr bool is_fixed(int numbers) {
#if defined(PAGEWIRE_AMX)
  return numbers >= UINT4;
#else
  return numbers >= UINT4 || (sizeof(T) == 2 && (numbers == INT4 || numbers == INT8));
#endif
}

template <typename T>
constexpr uint32_t fixed_numbers() {
  uint32_t bits = 0;
  for (int numbers = INT4; numbers <= INT6; ++numbers) bits |= (uint32_t)is_fixed<T>(numbers) << numbers;
  return bits;
}

template <typename F>
INLINE void with_fixed(int numbers, F&& f) {
  switch (numbers) {
    case INT4: return f(FixedNibbles<0>());
    case UINT4: return f(FixedNibbles<8>());
    case INT5: return f(FixedPlanes<1, -16>());
    case UINT5: return f(FixedPlanes<1, 0>());
    case INT6: return f(FixedPlanes<2, -32>());
    case INT8: return f(FixedBytes());
  }
}

// 2^e of a block of a row, of which `size` numbers are there, and 2^-e; a NaN where there is an infinity or a NaN.
struct FixedPower {
  float scale, inverse;

  template <typename T>
  FixedPower(const T* x, int64_t size) {
    const float largest = size > 0 ? largest_magnitude(x, size) : 0.0f;
    uint32_t bits;
    __builtin_memcpy(&bits, &largest, 4);
    const uint32_t exponent = larger(bits >> 23, 15);
    const uint32_t scale_bits = exponent == 255 ? 0x7fc00000 : (exponent - 14) << 23, inverse_bits = (268 - exponent) << 23;
    __builtin_memcpy(&scale, &scale_bits, 4);
    __builtin_memcpy(&inverse, &inverse_bits, 4);
  }
  bool is_finite() const { return scale == scale; }
};

// Rows in fixed point; see FixedRowsArgs. A block that isn't finite is zeros times a NaN.
template <typename T>
void fixed_rows(const FixedRowsArgs& a, const Region& region) {
  with_fixed(a.numbers, [&](auto n) {
    typedef decltype(n) N;
    // Of eight numbers: into pairs.
    const __m128i order = N::NIBBLES ? _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
                                     : _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    for (int64_t row; (row = next_task(region)) < a.num_rows;) {
      const T* x = (const T*)a.x + row * a.x_stride;
      int64_t g = row;
      for (int64_t k = 0; k < a.depth; k += N::DEPTH) {
        const int64_t place = k / N::DEPTH * a.num_rows + row, size = smaller(N::DEPTH, a.size - k);
        int16_t* out = a.out + place * N::DEPTH;
        const FixedPower power(x + k, size);
        const int64_t there = power.is_finite() ? size : 0;
        a.scales[place] = power.scale;
        for (int64_t i = 0; i < N::DEPTH; g += a.num_rows) {
          __m128i sums = _mm_setzero_si128();
          for (const int64_t end = i + a.flush; i < end; i += W) {
            const vec y = i < there ? vmul(load_some(x + k + i, there - i), vset(power.inverse)) : vzero();
            const shorts fixed = to_shorts(y);
            store_shorts(out + i, in_order(fixed, order));
            sums = _mm_add_epi32(sums, sum_pairs(fixed));
          }
          sums = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0x4e));
          const int32_t sum = _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 1);
          a.starts[g] = N::START * sum;
          a.sums[g] = (float)sum;
        }
      }
    }
  });
}
