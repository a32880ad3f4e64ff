// C = A B for at most MAX_ROWS rows of A and one panel (32 columns) of B in tile order: the inner loop of linear and attention.
//
// Every element of C is one chain of fused multiply-adds over ascending k, in float32, whatever the number of rows. So a row
// never depends on the rows beside it. Included once per instruction set, inside an unnamed namespace.
//
// AVX2 has 16 registers and no broadcast of a bfloat16, so there A's rows are float32 whatever B is (`Rows`): the same numbers,
// widened once, not for every panel. 4 to 6 rows take a strip of 16 columns at a time, whose sums fill 12 registers.
#pragma once

constexpr int64_t PANEL = 32;          // columns
constexpr int64_t TILE_BYTES = 1024;   // 16 words deep, 16 columns
constexpr int64_t BLOCK_BYTES = 2048;  // the panel's two tiles of one depth

// Elements of k in one block.
template <typename T>
constexpr int64_t DEPTH = 64 / sizeof(T);

#if defined(__AVX512F__)
template <typename T>
using Rows = T;
#else
template <typename T>
using Rows = float;
#endif

// A [rows, num_blocks * DEPTH], of T or float32; B of T: `num_blocks` blocks of BLOCK_BYTES; C float32 [rows, 32], added to if
// `resume`. `next`: what is read after B, to be prefetched; null: nothing, B is in a cache.
template <typename T, typename A = T>
struct Product {
  const A* a;
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
constexpr int VECTOR_ROWS = 6;  // 12 of 16, a strip at a time
#endif
constexpr int STREAMED_ROWS = W == 16 ? VECTOR_ROWS : 3;  // ... both strips at once, so that B is read front to back
constexpr int VECTORS = 16 / W;  // of a strip

// Columns of a word of B: of its only k, or of its first or second one.
INLINE vec load_columns(const char* b, int, float) { return vload((const float*)b); }
INLINE vec load_columns(const char* b, int odd, bf16) { return odd ? load_odd(b) : load_even(b); }

template <typename T, typename A>
INLINE void multiply_word(const A* a, int64_t stride, const char* b, vec (*acc)[VECTORS], int rows) {
#if defined(__AVX512BF16__)
  if constexpr (sizeof(A) == 2) {
    const __m512bh columns = (__m512bh)_mm512_loadu_si512(b);
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i) {
      int32_t pair;
      __builtin_memcpy(&pair, a + i * stride, 4);
      acc[i][0] = _mm512_dpbf16_ps(acc[i][0], (__m512bh)_mm512_set1_epi32(pair), columns);
    }
    return;
  }
#endif
#pragma GCC unroll 2
  for (int k = 0; k < 4 / (int)sizeof(T); ++k) {
    vec columns[VECTORS];
    for (int v = 0; v < VECTORS; ++v) columns[v] = load_columns(b + v * W * 4, k, T());
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i) {
      const vec x = vset(to_float(a[i * stride + k]));
      for (int v = 0; v < VECTORS; ++v) acc[i][v] = vfma(x, columns[v], acc[i][v]);
    }
  }
}

template <int ROWS>
INLINE void load_sums(const float* c, int64_t stride, bool resume, vec (*acc)[VECTORS]) {
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v) acc[i][v] = resume ? vload(c + i * stride + v * W) : vzero();
}
template <int ROWS>
INLINE void store_sums(float* c, int64_t stride, vec (*acc)[VECTORS]) {
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v) vstore(c + i * stride + v * W, acc[i][v]);
}

// B is read front to back, one line after the other: on Zen 4 that streams 32 GB/s from memory on one core, both strips of a
// word side by side only 10. What it reads ahead by itself ends with a page: prefetches make 8 to 12 rows 1.08 times as fast, and
// fewer rows, which wait for memory anyway, slower.
#if ON_ZEN_4
constexpr int LEAST_READ_AHEAD = 8;
#else
constexpr int LEAST_READ_AHEAD = 100;  // never: not measured
#endif
constexpr int64_t READ_AHEAD = 4 << 10;

template <typename T, int ROWS, typename A>
void multiply_rows(const Product<T, A>& p, bool resume) {
  vec acc[2][ROWS][VECTORS];
#pragma GCC unroll 2
  for (int strip = 0; strip < 2; ++strip) load_sums<ROWS>(p.c + strip * 16, p.c_stride, resume, acc[strip]);
  const char* b = p.b;
  const A* a = p.a;
  for (int64_t block = 0; block < p.num_blocks; ++block, b += BLOCK_BYTES, a += DEPTH<T>)
#pragma GCC unroll 2
    for (int strip = 0; strip < 2; ++strip)
#pragma GCC unroll 4
      for (int word = 0; word < 16; ++word) {
        if (ROWS >= LEAST_READ_AHEAD) _mm_prefetch(b + strip * TILE_BYTES + word * 64 + READ_AHEAD, _MM_HINT_T1);
        multiply_word<T>(a + word * (4 / (int)sizeof(T)), p.a_stride, b + strip * TILE_BYTES + word * 64, acc[strip], ROWS);
      }
#pragma GCC unroll 2
  for (int strip = 0; strip < 2; ++strip) store_sums<ROWS>(p.c + strip * 16, p.c_stride, acc[strip]);
}

#if !defined(__AVX512F__)
// One strip of a B that is in L1 or L2, or comes there by the prefetches of the product before. `next` is as long as B; half of it
// goes to L2 meanwhile.
template <typename T, int ROWS, bool PREFETCHES, typename A>
INLINE void multiply_strip(const Product<T, A>& p, int strip, bool resume) {
  const char *b = p.b + strip * TILE_BYTES, *next = p.next ? p.next + strip * p.num_blocks * TILE_BYTES : p.b;
  vec acc[ROWS][VECTORS];
  load_sums<ROWS>(p.c + strip * 16, p.c_stride, resume, acc);
  const A* a = p.a;
  for (int64_t block = 0; block < p.num_blocks; ++block, b += BLOCK_BYTES, a += DEPTH<T>, next += TILE_BYTES)
#pragma GCC unroll 4
    for (int word = 0; word < 16; ++word) {
      if (PREFETCHES) _mm_prefetch(next + word * 64, _MM_HINT_T1);
      multiply_word<T>(a + word * (4 / (int)sizeof(T)), p.a_stride, b + word * 64, acc, ROWS);
    }
  store_sums<ROWS>(p.c + strip * 16, p.c_stride, acc);
}

// float32 is faster without prefetches of nothing; GCC's loop of bfloat16 is slower without any.
template <typename T, int ROWS, typename A>
void multiply_strip(const Product<T, A>& p, int strip, bool resume) {
  if (p.next || sizeof(T) == 2) {
    multiply_strip<T, ROWS, true>(p, strip, resume);
  } else {
    multiply_strip<T, ROWS, false>(p, strip, resume);
  }
}

// Few rows of such a B: both strips of a word side by side, for chains enough.
template <typename T, int ROWS, typename A>
void multiply_beside(const Product<T, A>& p, bool resume) {
  vec acc[2][ROWS][VECTORS];
#pragma GCC unroll 2
  for (int strip = 0; strip < 2; ++strip) load_sums<ROWS>(p.c + strip * 16, p.c_stride, resume, acc[strip]);
  const char *b = p.b, *next = p.next ? p.next : p.b;
  const A* a = p.a;
  for (int64_t block = 0; block < p.num_blocks; ++block, b += BLOCK_BYTES, a += DEPTH<T>, next += BLOCK_BYTES)
#pragma GCC unroll 2
    for (int word = 0; word < 16; ++word) {
      _mm_prefetch(next + word * 128, _MM_HINT_T1);
      _mm_prefetch(next + word * 128 + 64, _MM_HINT_T1);
#pragma GCC unroll 2
      for (int strip = 0; strip < 2; ++strip)
        multiply_word<T>(a + word * (4 / (int)sizeof(T)), p.a_stride, b + strip * TILE_BYTES + word * 64, acc[strip], ROWS);
    }
#pragma GCC unroll 2
  for (int strip = 0; strip < 2; ++strip) store_sums<ROWS>(p.c + strip * 16, p.c_stride, acc[strip]);
}
#endif

template <typename T, typename A>
void multiply_vectors(int64_t rows, const Product<T, A>& p, bool resume) {
  switch (rows) {
#if defined(__AVX512F__)
    case 1: return multiply_rows<T, 1>(p, resume);
    case 2: return multiply_rows<T, 2>(p, resume);
    case 3: return multiply_rows<T, 3>(p, resume);
    case 4: return multiply_rows<T, 4>(p, resume);
    case 5: return multiply_rows<T, 5>(p, resume);
    case 6: return multiply_rows<T, 6>(p, resume);
    case 7: return multiply_rows<T, 7>(p, resume);
    case 8: return multiply_rows<T, 8>(p, resume);
    case 9: return multiply_rows<T, 9>(p, resume);
    case 10: return multiply_rows<T, 10>(p, resume);
    case 11: return multiply_rows<T, 11>(p, resume);
    case 12: return multiply_rows<T, 12>(p, resume);
#else
    case 1: return multiply_beside<T, 1>(p, resume);
    case 2: return multiply_beside<T, 2>(p, resume);
    case 3: return multiply_beside<T, 3>(p, resume);
    case 4: return multiply_strip<T, 4>(p, 0, resume), multiply_strip<T, 4>(p, 1, resume);
    case 5: return multiply_strip<T, 5>(p, 0, resume), multiply_strip<T, 5>(p, 1, resume);
    case 6: return multiply_strip<T, 6>(p, 0, resume), multiply_strip<T, 6>(p, 1, resume);
#endif
  }
}

#if !defined(__AVX512F__)
// multiply_vectors strip by strip; few rows are all in the first one.
template <typename T, typename A>
void multiply_strip(int64_t rows, const Product<T, A>& p, int strip, bool resume) {
  switch (rows) {
    case 4: return multiply_strip<T, 4>(p, strip, resume);
    case 5: return multiply_strip<T, 5>(p, strip, resume);
    case 6: return multiply_strip<T, 6>(p, strip, resume);
  }
  if (strip == 0) multiply_vectors(rows, p, resume);
}
#endif

// At most STREAMED_ROWS rows of a B that comes from memory.
template <typename T, typename A>
void multiply_streamed(int64_t rows, const Product<T, A>& p, bool resume) {
#if defined(__AVX512F__)
  multiply_vectors(rows, p, resume);
#else
  switch (rows) {
    case 1: return multiply_rows<T, 1>(p, resume);
    case 2: return multiply_rows<T, 2>(p, resume);
    case 3: return multiply_rows<T, 3>(p, resume);
  }
#endif
}

#if defined(PAGEWIRE_AMX)
#include "amx.h"
#else
struct TileScope {
  TileScope() {}  // nothing to set up, and no warning that it goes unused
};
template <typename T>
constexpr int64_t MAX_ROWS = VECTOR_ROWS;
template <typename T, typename A>
INLINE void multiply(int64_t rows, const Product<T, A>& p, bool resume, TileScope&) {
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
template <typename T, typename A>
void multiply_all(int64_t rows, Product<T, A> p, bool resume, TileScope& scope) {
  for (int64_t row = 0; row < rows;) {
    const int64_t count = next_rows<T>(rows - row);
    multiply(count, p, resume, scope);
    p.a += count * p.a_stride;
    p.c += count * p.c_stride;
    row += count;
  }
}
