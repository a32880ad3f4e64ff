// linear_grouped.h on AVX2, more than a few rows: as linear_avx2.h, but that a strip's piece of K is spread out in float32 before
// the rows pass over it, 16 KB that stay in L1.
#pragma once

static_assert(MOST_FEW_ROWS >= STREAMED_ROWS, "rows that are streamed have their K in one piece");

// `num_blocks` blocks of one strip: [k][16].
template <typename N, int J = 0>
INLINE void spread_numbers(const typename N::Opened& words, float* to) {
  if constexpr (J < N::PER_WORD) {
    vstore(to + J * 16, N::template load<J>(words));
    spread_numbers<N, J + 1>(words, to);
  }
}
template <typename N>
__attribute__((noinline)) void spread_strip(const char* from, int64_t num_blocks, float* to) {
  for (int64_t block = 0; block < num_blocks; ++block, from += BLOCK_BYTES)
    for (int64_t word = 0; word < 16; ++word, to += N::PER_WORD * 16) {
      prefetch_ahead(from + word * 64);
      for (int v = 0; v < VECTORS; ++v) spread_numbers<N>(N::open(from + word * 64 + v * W * 4), to + v * W);
    }
}

// Some rows times a group's k in a strip, or as many of them as the piece has.
struct StripPart {
  const float* x;
  int64_t x_stride;
  const float* b;  // [depth][16]
  int64_t depth;
  bool resumes, ends;  // the group
  float *part, *total;  // [rows][32], of the strip's columns: while it goes on, and of those that have ended
  int64_t group, n;    // n: the strip's first column in the panel
};

template <typename N, int ROWS>
void multiply_strip_part(const StripPart& p, const PanelGroups& groups) {
  vec acc[ROWS][VECTORS];
  load_sums<ROWS>(p.part, PANEL, p.resumes, acc);
  add_products<ROWS>(p.x, p.x_stride, p.b, p.depth, acc);
  if (!p.ends) return store_sums<ROWS>(p.part, PANEL, acc);
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v) {
      float* to = p.total + i * PANEL + v * W;
      vstore(to, add_group<N>(groups, p.group ? vload(to) : vzero(), acc[i][v], p.group, i, p.n + v * W));
    }
}

template <typename N, int MOST = VECTOR_ROWS>
INLINE void multiply_strip_part(int64_t rows, const StripPart& p, const PanelGroups& groups) {
  if constexpr (MOST > 0) {
    if (rows == MOST) return multiply_strip_part<N, MOST>(p, groups);
    multiply_strip_part<N, MOST - 1>(rows, p, groups);
  }
}

// `scratch`: totals, parts, a strip, widened rows.
template <typename T, typename N>
void spread_grouped(const GroupedArgs& g, const LinearPlan<T, N::DEPTH>& plan, int64_t task, float* scratch, LinearScope& scope) {
  const LinearArgs& a = g.linear;
  const int64_t num_sums = plan.sums_bytes() / sizeof(float), stride = plan.wide_stride(), depth = plan.num_blocks * N::DEPTH;
  float* strip_numbers = scratch + 2 * num_sums;
  for_pieces(a, plan, task, strip_numbers + AVX2_PIECE_DEPTH * 16, scope,
             [&](int64_t first_row, int64_t last_row, const float* x, int64_t panel, int64_t block, const char*, int64_t place) {
    const int64_t blocks = smaller(plan.blocks_per_piece, plan.num_blocks - block);
    const int64_t begin = block * N::DEPTH, end = begin + blocks * N::DEPTH;
    for (int strip = 0; strip < 2; ++strip) {
      {
        const NumbersScope<N> numbers;
        spread_strip<N>(a.weight + (panel * plan.num_blocks + block) * BLOCK_BYTES + strip * TILE_BYTES, blocks, strip_numbers);
      }
      for (int64_t row = first_row; row < last_row;) {
        const int64_t rows = next_rows<T>(last_row - row), at = row - first_row;
        float* total = scratch + place + at * PANEL;
        const PanelGroups groups(g, panel, row);
        for (int64_t k = begin; k < end;) {
          const int64_t group = k / g.group, stop = smaller((group + 1) * g.group, end), n = strip * 16;
          const StripPart part{x + at * stride + k - begin, stride, strip_numbers + (k - begin) * 16, stop - k, k % g.group != 0,
                               stop % g.group == 0 || stop == depth, total + num_sums + n, total + n, group, n};
          multiply_strip_part<N>(rows, part, groups);
          k = stop;
        }
        if (end == depth && strip) finish<T>(a, row, rows, panel, total);
        row += rows;
      }
    }
  });
}

template <typename T, typename N>
void many_rows_grouped(const GroupedArgs& g, const Region& region) {
  const LinearPlan<T, N::DEPTH> plan(g.linear, region.num_threads);
  LinearScope scope;
  float* scratch = (float*)region.scratch;
  each_task(region, plan.num_tasks, [&](int64_t task) { spread_grouped<T, N>(g, plan, task, scratch, scope); });
}

template <typename T, typename N>
int64_t many_rows_scratch_of(const GroupedArgs& g) {
  const LinearPlan<T, N::DEPTH> plan(g.linear, 1);
  return 2 * plan.sums_bytes() + AVX2_PIECE_DEPTH * 16 * (int64_t)sizeof(float) + plan.wide_bytes();
}
template <typename T>
int64_t many_rows_scratch(const GroupedArgs& g) { return larger(many_rows_scratch_of<T, Int4>(g), many_rows_scratch_of<T, Int8>(g)); }
