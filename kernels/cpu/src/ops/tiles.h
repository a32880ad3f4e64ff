// C = A B for at most MAX_ROWS rows of A and one panel (32 columns) of B in tile order: the inner loop of linear and attention.
//
// Every element of C is one chain of fused multiply-adds over ascending k, in float32, whatever the number of rows. So a row
// never depends on the rows beside it. Included once per instruction set, inside an unnamed namespace.
#pragma once

constexpr int64_t PANEL = 32;          // columns
constexpr int64_t TILE_BYTES = 1024;   // 16 words deep, 16 columns
constexpr int64_t BLOCK_BYTES = 2048;  // the panel's two tiles of one depth

// Elements of k in one block.
template <typename T>
constexpr int64_t DEPTH = 64 / sizeof(T);

// A [rows, num_blocks * DEPTH]; B: `num_blocks` blocks of BLOCK_BYTES; C float32 [rows, 32], added to if `resume`.
// `next`: what is read after B, to be prefetched; null: nothing, B is in a cache.
template <typename T>
struct Product {
  const T* a;
  int64_t a_stride;
  const char* b;
  int64_t num_blocks;
  float* c;
  int64_t c_stride;
  const char* next = nullptr;
};

#if defined(__AVX512F__)
constexpr int VECTOR_ROWS = 12;  // 24 of 32 registers accumulate
#else
constexpr int VECTOR_ROWS = 3;  // 12 of 16
#endif
constexpr int VECTORS = 16 / W;  // of a strip

INLINE void multiply_word(const float* a, int64_t stride, const char* b, vec (*acc)[VECTORS], int rows) {
  vec columns[VECTORS];
  for (int v = 0; v < VECTORS; ++v) columns[v] = vload((const float*)b + v * W);
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i) {
    const vec x = vset(a[i * stride]);
    for (int v = 0; v < VECTORS; ++v) acc[i][v] = vfma(x, columns[v], acc[i][v]);
  }
}

#if defined(__AVX512BF16__)
INLINE void multiply_word(const bf16* a, int64_t stride, const char* b, vec (*acc)[VECTORS], int rows) {
  const __m512bh columns = (__m512bh)_mm512_loadu_si512(b);
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i) {
    int32_t pair;
    __builtin_memcpy(&pair, a + i * stride, 4);
    acc[i][0] = _mm512_dpbf16_ps(acc[i][0], (__m512bh)_mm512_set1_epi32(pair), columns);
  }
}
#else
INLINE void multiply_word(const bf16* a, int64_t stride, const char* b, vec (*acc)[VECTORS], int rows) {
  for (int odd = 0; odd < 2; ++odd) {
    vec columns[VECTORS];
    for (int v = 0; v < VECTORS; ++v) columns[v] = odd ? load_odd(b + v * W * 4) : load_even(b + v * W * 4);
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i) {
      const vec x = vset(to_float(a[i * stride + odd]));
      for (int v = 0; v < VECTORS; ++v) acc[i][v] = vfma(x, columns[v], acc[i][v]);
    }
  }
}
#endif

// B is read front to back, one line after the other: on Zen 4 that streams 32 GB/s from memory on one core, both strips of a
// word side by side only 10, and software prefetch makes either slower.
template <typename T, int ROWS>
void multiply_rows(const Product<T>& p, bool resume) {
  vec acc[2][ROWS][VECTORS];
#pragma GCC unroll 2
  for (int strip = 0; strip < 2; ++strip)
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; ++v)
        acc[strip][i][v] = resume ? vload(p.c + i * p.c_stride + strip * 16 + v * W) : vzero();
  const char* b = p.b;
  const T* a = p.a;
  for (int64_t block = 0; block < p.num_blocks; ++block, b += BLOCK_BYTES, a += DEPTH<T>)
#pragma GCC unroll 2
    for (int strip = 0; strip < 2; ++strip)
#pragma GCC unroll 4
      for (int word = 0; word < 16; ++word)
        multiply_word(a + word * (4 / (int)sizeof(T)), p.a_stride, b + strip * TILE_BYTES + word * 64, acc[strip], ROWS);
#pragma GCC unroll 2
  for (int strip = 0; strip < 2; ++strip)
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; ++v) vstore(p.c + i * p.c_stride + strip * 16 + v * W, acc[strip][i][v]);
}

template <typename T>
void multiply_vectors(int64_t rows, const Product<T>& p, bool resume) {
  switch (rows) {
    case 1: return multiply_rows<T, 1>(p, resume);
    case 2: return multiply_rows<T, 2>(p, resume);
    case 3: return multiply_rows<T, 3>(p, resume);
#if defined(__AVX512F__)
    case 4: return multiply_rows<T, 4>(p, resume);
    case 5: return multiply_rows<T, 5>(p, resume);
    case 6: return multiply_rows<T, 6>(p, resume);
    case 7: return multiply_rows<T, 7>(p, resume);
    case 8: return multiply_rows<T, 8>(p, resume);
    case 9: return multiply_rows<T, 9>(p, resume);
    case 10: return multiply_rows<T, 10>(p, resume);
    case 11: return multiply_rows<T, 11>(p, resume);
    case 12: return multiply_rows<T, 12>(p, resume);
#endif
  }
}

#if defined(PAGEWIRE_AMX)
#include "amx.h"
#else
struct TileScope {
  TileScope() {}  // nothing to set up, and no warning that it goes unused
};
template <typename T>
constexpr int64_t MAX_ROWS = VECTOR_ROWS;
template <typename T>
INLINE void multiply(int64_t rows, const Product<T>& p, bool resume, TileScope&) {
  multiply_vectors(rows, p, resume);
}
#endif

// Products of this type are made by AMX tiles.
template <typename T>
constexpr bool ON_TILES = MAX_ROWS<T> > VECTOR_ROWS;

// How many rows are computed for so many: whole pairs of tiles, which then needn't be configured anew, if it is more than one.
template <typename T>
INLINE int64_t computed_rows(int64_t rows) {
  return ON_TILES<T> && rows > MAX_ROWS<T> ? round_up(rows, MAX_ROWS<T>) : rows;
}

// The next block of rows among `left`: all equally long on vectors, whole tiles on AMX.
template <typename T>
INLINE int64_t next_rows(int64_t left) {
  if (left <= MAX_ROWS<T>) return left;
  if (ON_TILES<T>) return MAX_ROWS<T>;
  const int64_t num_blocks = (left + MAX_ROWS<T> - 1) / MAX_ROWS<T>;
  return (left + num_blocks - 1) / num_blocks;
}

// Any number of rows.
template <typename T>
void multiply_all(int64_t rows, Product<T> p, bool resume, TileScope& scope) {
  for (int64_t row = 0; row < rows;) {
    const int64_t count = next_rows<T>(rows - row);
    multiply(count, p, resume, scope);
    p.a += count * p.a_stride;
    p.c += count * p.c_stride;
    row += count;
  }
}
