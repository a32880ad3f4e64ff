// Keys and values into tile order (pack.h), 32 tokens at a time, from one pointer per token.
#pragma once

#if defined(__AVX512F__)

// 16 rows of 16 words -> transposed.
INLINE void transpose_words(const char* const* rows, int64_t offset, int64_t num_bytes, char* tile) {
  const __mmask16 mask = first_lanes((int)smaller(16, (num_bytes + 3) / 4));
  __m512i r[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = _mm512_maskz_loadu_epi32(mask, rows[i] + offset);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    _mm512_storeu_si512(tile + i * 64, _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88));
    _mm512_storeu_si512(tile + (8 + i) * 64, _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd));
    _mm512_storeu_si512(tile + (4 + i) * 64, _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88));
    _mm512_storeu_si512(tile + (12 + i) * 64, _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd));
  }
}

// Two tokens' 32 values -> one row of each of a panel's two tiles, the tokens' values in pairs.
INLINE void interleave(__m512i even, __m512i odd, char* row) {
  const __m512i pairs = _mm512_setr_epi32(0x200000, 0x210001, 0x220002, 0x230003, 0x240004, 0x250005, 0x260006, 0x270007,
                                          0x280008, 0x290009, 0x2a000a, 0x2b000b, 0x2c000c, 0x2d000d, 0x2e000e, 0x2f000f);
  const __m512i next = _mm512_add_epi16(pairs, _mm512_set1_epi16(16));
  _mm512_storeu_si512(row, _mm512_permutex2var_epi16(even, pairs, odd));
  _mm512_storeu_si512(row + TILE_BYTES, _mm512_permutex2var_epi16(even, next, odd));
}
INLINE void interleave_pair(const bf16* even, const bf16* odd, int64_t count, char* row) {
  const __mmask32 mask = count >= 32 ? 0xffffffff : (1u << count) - 1;
  interleave(_mm512_maskz_loadu_epi16(mask, even), _mm512_maskz_loadu_epi16(mask, odd), row);
}

#else

// 8 rows of 4 words -> transposed: 4 rows of the tile, 8 columns of each.
INLINE void transpose_8x4(const char* const* rows, int64_t offset, char* tile) {
  __m256i r[4], t[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m256i low = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)(rows[i] + offset)));
    r[i] = _mm256_inserti128_si256(low, _mm_loadu_si128((const __m128i*)(rows[i + 4] + offset)), 1);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    t[i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 + i] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    _mm256_storeu_si256((__m256i*)(tile + 2 * i * 64), _mm256_unpacklo_epi64(t[2 * i], t[2 * i + 1]));
    _mm256_storeu_si256((__m256i*)(tile + (2 * i + 1) * 64), _mm256_unpackhi_epi64(t[2 * i], t[2 * i + 1]));
  }
}

// 16 rows of 16 words -> transposed.
INLINE void transpose_words(const char* const* rows, int64_t offset, int64_t num_bytes, char* tile) {
  char padded[16][64];
  const char* copies[16];
  if (num_bytes < 64) {
    for (int i = 0; i < 16; ++i) {
      __builtin_memset(padded[i], 0, 64);
      __builtin_memcpy(padded[i], rows[i] + offset, num_bytes);
      copies[i] = padded[i];
    }
    rows = copies, offset = 0;
  }
  for (int half = 0; half < 2; ++half) {
    const char* some[8];
    for (int i = 0; i < 8; ++i) some[i] = rows[half * 8 + i] + offset;
#pragma GCC unroll 4
    for (int word = 0; word < 16; word += 4) transpose_8x4(some, word * 4, tile + word * 64 + half * 32);
  }
}

// Two tokens' 32 values -> one row of each of a panel's two tiles, the tokens' values in pairs.
INLINE void interleave_pair(const bf16* even, const bf16* odd, int64_t count, char* row) {
  bf16 padded[2][PANEL];
  if (count < PANEL) {
    __builtin_memset(padded, 0, sizeof padded);
    __builtin_memcpy(padded[0], even, count * sizeof(bf16));
    __builtin_memcpy(padded[1], odd, count * sizeof(bf16));
    even = padded[0], odd = padded[1];
  }
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const __m256i a = _mm256_loadu_si256((const __m256i*)(even + half * 16));
    const __m256i b = _mm256_loadu_si256((const __m256i*)(odd + half * 16));
    const __m256i low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);  // of each half of 8
    _mm256_storeu_si256((__m256i*)(row + half * TILE_BYTES), _mm256_permute2x128_si256(low, high, 0x20));
    _mm256_storeu_si256((__m256i*)(row + half * TILE_BYTES + 32), _mm256_permute2x128_si256(low, high, 0x31));
  }
}

#endif

constexpr int64_t GROUP = 32;  // tokens packed at a time

// Keys of GROUP tokens as a panel: the tokens are its columns, head_dim its depth.
template <typename T>
INLINE void pack_keys(const T* const* tokens, int64_t head_dim, char* panel) {
  for (int64_t d = 0; d < head_dim; d += DEPTH<T>, panel += BLOCK_BYTES) {
    const int64_t offset = d * sizeof(T), num_bytes = smaller(64, (head_dim - d) * sizeof(T));
    transpose_words((const char* const*)tokens, offset, num_bytes, panel);
    transpose_words((const char* const*)tokens + 16, offset, num_bytes, panel + TILE_BYTES);
  }
}

// Values of GROUP tokens: the panels' columns are head_dim, 32 of them each, and their depth the split's tokens, of which
// these are block `first_block` on (one block of 32 bfloat16, two of 16 float32).
INLINE void pack_values(const bf16* const* tokens, int64_t head_dim, char* panels, int64_t panel_bytes, int64_t first_block) {
  for (int64_t d = 0; d < head_dim; d += PANEL, panels += panel_bytes) {
    char* block = panels + first_block * BLOCK_BYTES;
    for (int64_t r = 0; r < 16; ++r)
      interleave_pair(tokens[2 * r] + d, tokens[2 * r + 1] + d, head_dim - d, block + r * 64);
  }
}
INLINE void pack_values(const float* const* tokens, int64_t head_dim, char* panels, int64_t panel_bytes, int64_t first_block) {
  for (int64_t d = 0; d < head_dim; d += 16) {
    char* tile = panels + d / PANEL * panel_bytes + first_block * BLOCK_BYTES + d % PANEL / 16 * TILE_BYTES;
    const int count = (int)smaller(16, head_dim - d);
    for (int64_t r = 0; r < GROUP; ++r) {
      float* to = (float*)(tile + r / 16 * BLOCK_BYTES + r % 16 * 64);
      for (int i = 0; i < 16; i += W) vstore(to + i, count - i >= W ? vload(tokens[r] + d + i) : vload(tokens[r] + d + i, count - i));
    }
  }
}
