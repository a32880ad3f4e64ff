// linear_grouped.h on AVX2, 4 to 8 rows: one vector of columns after the other, whose sums are a register for each row, so the
// numbers need not be spread out first. Rows lie side by side for each k: one pointer finds them all, where an address for each
// would be read back from the stack. 1.2 to 1.5 times as fast as spreading on Zen 3 (FP8, int4, int8). The chains are the same.
#pragma once

// x [depth][rows].
template <typename T>
void interleave_rows(const LinearArgs& a, int64_t depth, float* to) {
  for (int64_t row = 0; row < a.m; ++row)
    for (int64_t k = 0; k < depth; ++k) to[k * a.m + row] = to_float(((const T*)a.x)[row * a.x_stride + k]);
}

template <typename N, int ROWS, int J = 0>
INLINE void multiply_interleaved(const float* x, const typename N::Opened& words, vec* acc) {
  if constexpr (J < N::PER_WORD) {
    const vec q = N::template load<J>(words);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) acc[i] = vfma(vset(x[J * ROWS + i]), q, acc[i]);
    multiply_interleaved<N, ROWS, J + 1>(x, words, acc);
  }
}

// multiply_grouped of such rows. Sums of a group that goes on in the next block wait.
template <typename N, int WORDS, int ROWS>
__attribute__((noinline)) void multiply_by_vectors(const float* x, const char* b, int64_t num_blocks, const PanelGroups& groups,
                                                   float* c) {
  const int64_t group_blocks = WORDS < 16 ? 1 : groups.group / N::DEPTH;
  alignas(32) float waiting[ROWS][PANEL];
  for (int64_t i = 0; i < ROWS * PANEL; i += W) vstore(c + i, vzero());
  int64_t group = 0, left = 0;
  for (int64_t block = 0; block < num_blocks; ++block, b += BLOCK_BYTES, x += N::DEPTH * ROWS) {
    const bool first = left == 0;
    if (first) left = smaller(group_blocks, num_blocks - block);
    const bool last = --left == 0;
    for (int64_t n = 0; n < PANEL; n += W)
      for (int part = 0; part < 16 / WORDS; ++part) {
        vec acc[ROWS];
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i) acc[i] = WORDS < 16 || first ? vzero() : vload(waiting[i] + n);
        const char* words = b + n / 16 * TILE_BYTES + part * WORDS * 64 + n % 16 * 4;
        const float* from = x + part * WORDS * N::PER_WORD * ROWS;
        for (int word = 0; word < WORDS; ++word, words += 64, from += N::PER_WORD * ROWS) {
          if (n % 16 == 0) prefetch_ahead(words);
          multiply_interleaved<N, ROWS>(from, N::open(words), acc);
        }
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i)
          if (WORDS < 16 || last) {
            float* total = c + i * PANEL + n;
            vstore(total, add_group<N>(groups, vload(total), acc[i], group + part, i, n));
          } else {
            vstore(waiting[i] + n, acc[i]);
          }
      }
    if (last) group += 16 / WORDS;
  }
}

// Few rows of x in float32, as multiply_words takes so many.
template <typename T>
void prepare_few_rows(const LinearArgs& a, int64_t depth, float* to) {
  if (a.m > MOST_OF_A_STRIP) return interleave_rows<T>(a, depth, to);
  widen_rows<T>(a, depth, to);
}

template <typename N, int WORDS, int ROWS>
INLINE void multiply_words(const float* x, int64_t stride, const char* b, int64_t blocks, const PanelGroups& groups, float* c) {
  if constexpr (ROWS > MOST_OF_A_STRIP) {
    multiply_by_vectors<N, WORDS, ROWS>(x, b, blocks, groups, c);
  } else {
    multiply_grouped<N, WORDS, ROWS>(x, stride, b, blocks, groups, c);
  }
}
