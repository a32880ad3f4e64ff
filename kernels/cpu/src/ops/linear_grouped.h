// out = act(x Wᵀ + bias) + residual over a packed weight with groups (grouped.h). For each of a row's groups, in order,
//
//   out += (the chain of fused multiply-adds of x and the numbers) * scale + (the sum of x) * offset
//
// each term one fused multiply-add. Few rows take the numbers from registers; more from the thread's own scratch, where a piece
// of a panel is spread out, exactly: in x's type, on AVX2 in float32 (linear_grouped_avx2.h). The chains are the same.
#pragma once

#if defined(__AVX512F__)
constexpr int64_t SPREAD_DEPTH = 256;                   // of a piece
constexpr int64_t MOST_FEW_ROWS = 8, MOST_AT_ONCE = 8;  // 16 of 32 registers accumulate
template <int ROWS>
constexpr int STRIPS = 1;  // at once
#else
constexpr int64_t MOST_FEW_ROWS = 8, MOST_AT_ONCE = 8;
constexpr int MOST_OF_A_STRIP = 3;  // rows: their sums, 6 of 16 registers, leave room to unpack; more are interleaved
template <int ROWS>
constexpr int STRIPS = ROWS < 3 ? 2 : 1;  // else too few chains keep the multipliers waiting
#endif

// Scales and offsets of a panel, from the first group on; sums of the rows' x.
struct PanelGroups {
  int64_t group, num_groups;
  bool halves;  // scales are float16
  const char* scales;
  const float *offsets, *x_sums;

  PanelGroups(const GroupedArgs& a, int64_t panel, int64_t row)
      : group(a.group),
        num_groups(a.num_groups),
        halves(a.scale_form == FLOAT16_SCALES),
        scales((const char*)a.scales + panel * a.num_groups * PANEL * (halves ? 2 : 4)),
        offsets(a.offsets ? a.offsets + panel * a.num_groups * PANEL : nullptr),
        x_sums(a.offsets ? a.x_sums + row * a.num_groups : nullptr) {}

  __attribute__((always_inline)) vec scale(int64_t at) const { return halves ? load_halves(scales + at * 2) : vload((const float*)scales + at); }
};

template <typename N>
INLINE vec operand(vec x) { return N::SUBNORMAL ? without_subnormal(x) : x; }

// total + sum * scale + x's sum * offset, for the columns from n on of row i.
template <typename N>
INLINE vec add_group(const PanelGroups& p, vec total, vec sum, int64_t g, int64_t i, int64_t n) {
  total = vfma(sum, vmul(operand<N>(p.scale(g * PANEL + n)), vset(N::UNIT)), total);
  return p.offsets ? vfma(vset(p.x_sums[i * p.num_groups + g]), operand<N>(vload(p.offsets + g * PANEL + n)), total) : total;
}

template <typename N, int ROWS, int J = 0>
INLINE void multiply_numbers(const float* x, int64_t stride, const typename N::Opened& words, vec (*acc)[VECTORS], int v) {
  if constexpr (J < N::PER_WORD) {
    const vec q = N::template load<J>(words);
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) acc[i][v] = vfma(vset(x[i * stride + J]), q, acc[i][v]);
    multiply_numbers<N, ROWS, J + 1>(x, stride, words, acc, v);
  }
}

// Groups of WORDS words of a block, or of whole blocks if that is 16. x: float32 rows. c [ROWS, 32].
template <typename N, int WORDS, int ROWS>
__attribute__((noinline)) void multiply_grouped(const float* x, int64_t stride, const char* b, int64_t num_blocks,
                                                const PanelGroups& groups, float* c) {
  const int64_t group_blocks = WORDS < 16 ? 1 : groups.group / N::DEPTH;
  for (int64_t i = 0; i < ROWS * PANEL; i += W) vstore(c + i, vzero());
  vec acc[2][ROWS][VECTORS];
  int64_t group = 0, left = 0;
  for (int64_t block = 0; block < num_blocks; ++block, b += BLOCK_BYTES, x += N::DEPTH) {
    const bool first = left == 0;
    if (first) left = smaller(group_blocks, num_blocks - block);
    const bool last = --left == 0;
#pragma GCC unroll 2
    for (int strips = 0; strips < 2; strips += STRIPS<ROWS>)
      for (int part = 0; part < 16 / WORDS; ++part) {
        if (WORDS < 16 || first)
#pragma GCC unroll 2
          for (int strip = strips; strip < strips + STRIPS<ROWS>; ++strip)
#pragma GCC unroll 16
            for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 2
              for (int v = 0; v < VECTORS; ++v) acc[strip][i][v] = vzero();
#pragma GCC unroll 2
        for (int word = part * WORDS; word < (part + 1) * WORDS; ++word)
#pragma GCC unroll 2
          for (int strip = strips; strip < strips + STRIPS<ROWS>; ++strip) {
            const char* words = b + strip * TILE_BYTES + word * 64;
            prefetch_ahead(words);
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; ++v)
              multiply_numbers<N, ROWS>(x + word * N::PER_WORD, stride, N::open(words + v * W * 4), acc[strip], v);
          }
        if (WORDS < 16 || last)
#pragma GCC unroll 2
          for (int strip = strips; strip < strips + STRIPS<ROWS>; ++strip)
#pragma GCC unroll 16
            for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 2
              for (int v = 0; v < VECTORS; ++v) {
                const int n = strip * 16 + v * W;
                float* total = c + i * PANEL + n;
                vstore(total, add_group<N>(groups, vload(total), acc[strip][i][v], group + part, i, n));
              }
      }
    if (last) group += 16 / WORDS;
  }
}

#if defined(__AVX512F__)
template <typename T>
INLINE void prepare_few_rows(const LinearArgs& a, int64_t depth, float* to) { widen_rows<T>(a, depth, to); }

template <typename N, int WORDS, int ROWS>
INLINE void multiply_words(const float* x, int64_t stride, const char* b, int64_t blocks, const PanelGroups& groups, float* c) {
  multiply_grouped<N, WORDS, ROWS>(x, stride, b, blocks, groups, c);
}
#else
#include "linear_interleaved_avx2.h"
#endif

template <typename N, int ROWS>
INLINE void multiply_grouped(const float* x, int64_t stride, const char* b, int64_t blocks, const PanelGroups& groups, float* c) {
  const int64_t words = groups.group / N::PER_WORD;
  if (words >= 16) return multiply_words<N, 16, ROWS>(x, stride, b, blocks, groups, c);
  if (words == 8) return multiply_words<N, 8, ROWS>(x, stride, b, blocks, groups, c);
  if constexpr (N::PER_WORD == 8) multiply_words<N, 4, ROWS>(x, stride, b, blocks, groups, c);
}

template <typename N, int MOST>
INLINE void multiply_rows_grouped(int64_t rows, const float* x, int64_t stride, const char* b, int64_t blocks,
                                  const PanelGroups& groups, float* c) {
  if constexpr (MOST > 0) {
    if (rows == MOST) return multiply_grouped<N, MOST>(x, stride, b, blocks, groups, c);
    multiply_rows_grouped<N, MOST - 1>(rows, x, stride, b, blocks, groups, c);
  }
}

template <typename T, typename N>
void few_rows_grouped(const GroupedArgs& g, const Int8Plan<T>& plan, int64_t task, const float* x, float* sums) {
  const LinearArgs& a = g.linear;
  const Int8Part part(a, plan, task);
  const int64_t stride = plan.num_blocks * N::DEPTH, passes = (a.m + MOST_AT_ONCE - 1) / MOST_AT_ONCE;
  const int64_t at_once = (a.m + passes - 1) / passes;
  for (int64_t panel = part.first_panel; panel < part.last_panel; ++panel) {
    const char* weight = a.weight + panel * plan.num_blocks * BLOCK_BYTES;
    for (int64_t row = 0; row < a.m; row += at_once) {
      const int64_t rows = smaller(at_once, a.m - row);
      const PanelGroups groups(g, panel, row);
      {
        const NumbersScope<N> scope;
        multiply_rows_grouped<N, MOST_AT_ONCE>(rows, x + row * stride, stride, weight, plan.num_blocks, groups, sums);
      }
      finish<T>(a, row, rows, panel, sums);
    }
  }
}

#if defined(__AVX512F__)

// A group's sums, which may have begun in an earlier piece, are in `parts`, the totals of the groups before in `sums`.
template <typename T, typename N>
void spread_grouped(const GroupedArgs& g, const Int8Plan<T>& plan, int64_t task, float* sums, float* parts, char* tiles,
                    TileScope& scope) {
  constexpr int64_t PIECE = SPREAD_DEPTH / N::DEPTH, PIECE_BYTES = SPREAD_DEPTH / DEPTH<T> * BLOCK_BYTES;
  const LinearArgs& a = g.linear;
  const Int8Part part(a, plan, task);
  const int64_t depth = plan.num_blocks * N::DEPTH;
  for (int64_t block = 0; block < plan.num_blocks; block += PIECE) {
    const int64_t blocks = smaller(PIECE, plan.num_blocks - block), begin = block * N::DEPTH, end = begin + blocks * N::DEPTH;
    for (int64_t panel = part.first_panel; panel < part.last_panel; ++panel)
      spread_blocks<T, N>(a.weight + (panel * plan.num_blocks + block) * BLOCK_BYTES, blocks,
                          tiles + (panel - part.first_panel) * PIECE_BYTES);
    for (int64_t row = part.first_row; row < part.last_row;) {
      const int64_t rows = next_rows<T>(part.last_row - row);
      for (int64_t panel = part.first_panel; panel < part.last_panel; ++panel) {
        const int64_t place = ((panel - part.first_panel) * plan.row_block + row - part.first_row) * PANEL;
        float *total = sums + place, *sum = parts + place;
        const char* weight = tiles + (panel - part.first_panel) * PIECE_BYTES;
        const PanelGroups groups(g, panel, row);
        for (int64_t k = begin; k < end;) {
          const int64_t group = k / g.group, stop = smaller((group + 1) * g.group, end);
          const T* x = (const T*)a.x + row * a.x_stride + k;
          const char* piece = weight + (k - begin) / DEPTH<T> * BLOCK_BYTES;
          multiply(rows, Product<T>{x, a.x_stride, piece, (stop - k) / DEPTH<T>, sum, PANEL}, k % g.group != 0, scope);
          if (stop % g.group == 0 || stop == depth)
            for (int64_t i = 0; i < rows; ++i)
              for (int64_t n = 0; n < PANEL; n += W) {
                float* to = total + i * PANEL + n;
                vstore(to, add_group<N>(groups, group ? vload(to) : vzero(), vload(sum + i * PANEL + n), group, i, n));
              }
          k = stop;
        }
        if (end == depth) finish<T>(a, row, rows, panel, total);
      }
      row += rows;
    }
  }
}

template <typename T, typename N>
void many_rows_grouped(const GroupedArgs& g, const Region& region) {
  const Int8Plan<T> plan(g.linear, region.num_threads, false, N::DEPTH);
  float* sums = (float*)region.scratch;
  float* parts = sums + INT8_SUM_BYTES / sizeof(float);
  TileScope scope;
  char* tiles = region.scratch + 2 * INT8_SUM_BYTES;
  each_task(region, plan.num_tasks, [&](int64_t task) { spread_grouped<T, N>(g, plan, task, sums, parts, tiles, scope); });
}

template <typename T>
int64_t many_rows_scratch(const GroupedArgs&) {
  return 2 * INT8_SUM_BYTES + MAX_CHUNK * SPREAD_DEPTH * PANEL * (int64_t)sizeof(T);
}

#else
#include "linear_grouped_avx2.h"
#endif

template <typename T, typename N>
void linear_numbers(const GroupedArgs& g, const Region& region) {
  const LinearArgs& a = g.linear;
  if (!UNPACKS_IN_REGISTERS<T> || a.m > MOST_FEW_ROWS) return many_rows_grouped<T, N>(g, region);
  const Int8Plan<T> plan(a, region.num_threads, true, N::DEPTH);
  float* sums = (float*)region.scratch;
  float* x = sums + MOST_AT_ONCE * PANEL;
  const int64_t depth = plan.num_blocks * N::DEPTH;
  prepare_few_rows<T>(a, depth, x);
  if (N::SUBNORMAL)
    for (int64_t i = 0; i < a.m * depth; i += W) vstore(x + i, without_subnormal(vload(x + i)));
  each_task(region, plan.num_tasks, [&](int64_t task) { few_rows_grouped<T, N>(g, plan, task, x, sums); });
}

template <typename T>
void linear_grouped(const GroupedArgs& g, const Region& region) {
  switch (g.numbers) {
    case INT4: return linear_numbers<T, Int4>(g, region);
    case INT8: return linear_numbers<T, Int8>(g, region);
    case FP8: return linear_numbers<T, Fp8>(g, region);
  }  // the others go by linear_fixed on every set
}

template <typename T>
int64_t linear_grouped_scratch(const GroupedArgs& g) {
  const int64_t few = MOST_AT_ONCE * PANEL + MOST_FEW_ROWS * round_up(g.linear.k, Int4::DEPTH);
  return larger(many_rows_scratch<T>(g), few * (int64_t)sizeof(float));
}
