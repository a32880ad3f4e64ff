// A KV cache in one byte for each value (kernels/kv_cells.py): storing rows, and getting 32 tokens of it into tile order.
//
// A cell is block_size rows of head_dim bytes, then a float32 scale for each row. The numbers are unpacked to what T holds
// exactly, times a power of two; scales and units are multiplied into scores and weights, so a product costs what it costs
// without them.
#pragma once

INLINE int64_t cell_values(int64_t block_size, int64_t head_dim) { return round_up(block_size * head_dim, 4); }

#if defined(__AVX512F__)
// float32 of at most 448 in size to e4m3, to the nearest, halves to even; below 2^-6 to 0.
INLINE void store_e4m3(char* p, vec x) {
  const __m512i bits = _mm512_castps_si512(x), size = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(size, 20), _mm512_set1_epi32(1));
  __m512i code = _mm512_add_epi32(size, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7ffff)));
  code = _mm512_sub_epi32(_mm512_srli_epi32(code, 20), _mm512_set1_epi32(120 << 3));  // exponents count from 7, not 127
  code = _mm512_or_si512(code, _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80)));
  const __mmask16 large = _mm512_cmpge_epi32_mask(size, _mm512_set1_epi32(121 << 23));
  _mm_storeu_si128((__m128i*)p, _mm512_maskz_cvtepi32_epi8(large, code));
}
INLINE vec load_int8(const char* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }
// Sign, exponent and fraction go where float16 has them: 2^-8 times the number.
INLINE vec load_e4m3(const char* p) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
  return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((short)0xbf80)));
}
#else
INLINE void store_e4m3(char* p, vec x) {
  const __m256i bits = _mm256_castps_si256(x), size = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(size, 20), _mm256_set1_epi32(1));
  __m256i code = _mm256_add_epi32(size, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7ffff)));
  code = _mm256_sub_epi32(_mm256_srli_epi32(code, 20), _mm256_set1_epi32(120 << 3));
  code = _mm256_or_si256(code, _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80)));
  code = _mm256_and_si256(code, _mm256_cmpgt_epi32(size, _mm256_set1_epi32((121 << 23) - 1)));
  const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packus_epi16(halves, halves));
}
INLINE vec load_int8(const char* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
INLINE vec load_e4m3(const char* p) {
  const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p));
  return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16((short)0xbf80)));
}
#endif

// The formats. `Words`: numbers in words, as weights are (grouped.h), times 1 / Words::UNIT. `load`: W of them, times 1 / UNIT.
struct Int8Cells {
  typedef char Stored;
  typedef Int8 Words;
  static constexpr float LIMIT = 127.0f, UNIT = 1.0f;
  static constexpr bool ROTATED = true;  // its keys
  INLINE vec load(const char* p) { return load_int8(p); }
  INLINE void store(char* p, vec x) { store_int8(p, x); }
};
struct Fp8Cells {
  typedef char Stored;
  typedef Fp8 Words;
  static constexpr float LIMIT = 448.0f, UNIT = 256.0f;
  static constexpr bool ROTATED = false;
  INLINE vec load(const char* p) { return load_e4m3(p); }
  INLINE void store(char* p, vec x) { store_e4m3(p, x); }
};
// Values as they are computed.
template <typename T>
struct PlainCells {
  typedef T Stored;
  static constexpr bool ROTATED = false;
};

template <typename C>
constexpr bool SCALED = true;
template <typename T>
constexpr bool SCALED<PlainCells<T>> = false;

// x = scale * number, with scale = max |x| / LIMIT. What isn't finite is in the scale.
template <typename C, typename T>
INLINE void store_row(const T* x, int64_t size, char* numbers, float* scale) {
  const float largest = largest_magnitude(x, size);
  const vec inverse = vset(largest == 0.0f ? 0.0f : C::LIMIT / largest), limit = vset(C::LIMIT), low = vset(-C::LIMIT);
  *scale = largest / C::LIMIT;
  for (int64_t i = 0; i < size; i += W) {
    char some[W];
    C::store(some, vmax(vmin(vmul(load_some(x + i, size - i), inverse), limit), low));
    __builtin_memcpy(numbers + i, some, size - i < W ? size - i : W);
  }
}

// Lanes at a distance of D: their sum in the first of each pair, their difference in the second.
#if defined(__AVX512F__)
template <int D>
INLINE vec butterfly(vec x) {
  const vec other = D == 1   ? _mm512_permute_ps(x, 0xb1)
                    : D == 2 ? _mm512_permute_ps(x, 0x4e)
                    : D == 4 ? _mm512_shuffle_f32x4(x, x, 0xb1)
                             : _mm512_shuffle_f32x4(x, x, 0x4e);
  constexpr __mmask16 second = D == 1 ? 0xaaaa : D == 2 ? 0xcccc : D == 4 ? 0xf0f0 : 0xff00;
  return _mm512_mask_sub_ps(vadd(x, other), second, other, x);
}
#else
template <int D>
INLINE vec butterfly(vec x) {
  const vec other = D == 1 ? _mm256_permute_ps(x, 0xb1) : D == 2 ? _mm256_permute_ps(x, 0x4e) : _mm256_permute2f128_ps(x, x, 1);
  return _mm256_blend_ps(vadd(x, other), vsub(other, x), D == 1 ? 0xaa : D == 2 ? 0xcc : 0xf0);
}
#endif

// Hadamard's matrix times x, in pieces of the largest power of two in `size` (kernels/kv_cells.py). Whole vectors are read.
INLINE int64_t rotated_piece(int64_t size) { return size & -size; }
INLINE void rotate_row(float* x, int64_t size) {
  const int64_t piece = rotated_piece(size);
  for (int64_t i = 0; i < size; i += W) {
    vec v = vload(x + i);
    if (piece > 1) v = butterfly<1>(v);
    if (piece > 2) v = butterfly<2>(v);
    if (piece > 4) v = butterfly<4>(v);
    if (W > 8 && piece > 8) v = butterfly<8>(v);
    vstore(x + i, v);
  }
  for (int64_t distance = W; distance < piece; distance *= 2)
    for (int64_t i = 0; i < size; i += 2 * distance)
      for (int64_t j = i; j < i + distance; j += W) {
        const vec first = vload(x + j), second = vload(x + j + distance);
        vstore(x + j, vadd(first, second));
        vstore(x + j + distance, vsub(first, second));
      }
}
// x as float32, rotated.
template <typename T>
INLINE void rotate_row(const T* x, int64_t size, float* rotated) {
  for (int64_t i = 0; i < size; i += W) vstore(rotated + i, load_some(x + i, size - i));
  rotate_row(rotated, size);
}
constexpr int64_t MAX_HEAD_DIM = 1024;

// As in shuffle.h, of cells of T itself.
template <typename C, typename T>
INLINE void pack_cell_keys(const T* const* tokens, int64_t head_dim, char* panel) { pack_keys(tokens, head_dim, panel); }
template <typename C, typename T>
INLINE void pack_cell_values(const T* const* tokens, int64_t head_dim, char* panels, int64_t panel_bytes, int64_t first_block) {
  pack_values(tokens, head_dim, panels, panel_bytes, first_block);
}

// Of numbers unpacked for products of T: what they are to be multiplied with.
template <typename C, typename T>
constexpr float KEY_UNIT = C::Words::UNIT;
template <typename C, typename T>
constexpr float VALUE_UNIT = C::UNIT;

template <typename C, typename T>
INLINE void spread_cells(const char* words, char* strip, int64_t k) { spread_word<typename C::Words>(words, strip, k, T()); }

#if defined(__AVX512F__)
// Without subnormals e4m3 is bfloat16 once its exponent counts from 127; from 16-bit lanes with sign, exponent and fraction where
// bfloat16 has them.
INLINE __m512i e4m3_to_bf16(__m512i lanes) {
  const __m512i bits = _mm512_and_si512(lanes, _mm512_set1_epi16((short)0x87f0));
  const __mmask32 nonzero = _mm512_test_epi16_mask(bits, _mm512_set1_epi16(0x07f0));
  return _mm512_mask_add_epi16(bits, nonzero, bits, _mm512_set1_epi16(120 << 7));
}
template <>
constexpr float KEY_UNIT<Fp8Cells, bf16> = 1.0f;
template <>
constexpr float VALUE_UNIT<Fp8Cells, bf16> = 1.0f;
template <>
inline __attribute__((always_inline)) void spread_cells<Fp8Cells, bf16>(const char* words, char* strip, int64_t k) {
  const __m512i four = _mm512_loadu_si512(words);
  // Each number to the upper byte of a lane: the first two of each word, the other two.
  const __m512i first = _mm512_set4_epi32(0x0d800c80, 0x09800880, 0x05800480, 0x01800080);
  const __m512i second = _mm512_or_si512(first, _mm512_set1_epi32(0x02000200));
  char* to = strip + k / 32 * BLOCK_BYTES + k % 32 / 2 * 64;
  _mm512_storeu_si512(to, e4m3_to_bf16(_mm512_srai_epi16(_mm512_shuffle_epi8(four, first), 4)));
  _mm512_storeu_si512(to + 64, e4m3_to_bf16(_mm512_srai_epi16(_mm512_shuffle_epi8(four, second), 4)));
}
INLINE __m512i load_e4m3_as_bf16(const char* row, int64_t count) {
  const __mmask32 mask = count >= 32 ? 0xffffffff : (1u << count) - 1;
  return e4m3_to_bf16(_mm512_slli_epi16(_mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(mask, row)), 4));
}
#endif

// Keys: the bytes are transposed by words of four, each of which is then spread.
template <typename C, typename T>
INLINE void pack_cell_keys(const char* const* tokens, int64_t head_dim, char* panel) {
  constexpr int64_t DEEP = C::Words::DEPTH;
  for (int64_t d = 0; d < head_dim; d += DEEP, panel += DEEP / DEPTH<T> * BLOCK_BYTES) {
    const int64_t num_bytes = smaller(DEEP, head_dim - d), num_words = round_up(num_bytes, DEPTH<T>) / 4;
    for (int64_t strip = 0; strip < 2; ++strip) {
      alignas(64) char words[TILE_BYTES];
      transpose_words(tokens + strip * 16, d, num_bytes, words);
      for (int64_t word = 0; word < num_words; ++word)
        spread_cells<C, T>(words + word * 64, panel + strip * TILE_BYTES, word * 4);
    }
  }
}

// W numbers from d on; zeros where there are none.
template <typename C>
INLINE vec load_numbers(const char* row, int64_t d, int64_t head_dim) {
  if (head_dim - d >= W) return C::load(row + d);
  char some[W] = {};
  if (d < head_dim) __builtin_memcpy(some, row + d, head_dim - d);
  return C::load(some);
}

INLINE void store_values(char* tile, int64_t row, int64_t lane, vec even, vec odd, bf16) {  // of tokens 2 row and 2 row + 1
  store_pair(tile + row * 64 + lane * 4, even, odd);
}
INLINE void store_values(char* tile, int64_t row, int64_t lane, vec even, vec odd, float) {
  char* to = tile + row / 8 * BLOCK_BYTES + row % 8 * 128 + lane * 4;
  vstore((float*)to, even);
  vstore((float*)(to + 64), odd);
}

template <typename C, typename T>
INLINE void pack_cell_values(const char* const* tokens, int64_t head_dim, char* panels, int64_t panel_bytes, int64_t first_block) {
#if defined(__AVX512F__)
  if constexpr (VALUE_UNIT<C, T> != C::UNIT) {
    for (int64_t d = 0; d < head_dim; d += PANEL, panels += panel_bytes)
      for (int64_t r = 0; r < 16; ++r) {
        const int64_t left = head_dim - d;
        interleave(load_e4m3_as_bf16(tokens[2 * r] + d, left), load_e4m3_as_bf16(tokens[2 * r + 1] + d, left),
                   panels + first_block * BLOCK_BYTES + r * 64);
      }
    return;
  }
#endif
  for (int64_t d = 0; d < head_dim; d += 16) {
    char* tile = panels + d / PANEL * panel_bytes + first_block * BLOCK_BYTES + d % PANEL / 16 * TILE_BYTES;
    for (int64_t r = 0; r < 16; ++r)
      for (int64_t lane = 0; lane < 16; lane += W) {
        const vec even = load_numbers<C>(tokens[2 * r], d + lane, head_dim);
        const vec odd = load_numbers<C>(tokens[2 * r + 1], d + lane, head_dim);
        store_values(tile, r, lane, even, odd, T());
      }
  }
}
