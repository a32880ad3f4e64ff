// linear.h on AVX2: rows of x in float32 (tiles.h), and pieces of K so short that a strip's piece stays in L1 for all rows.
//
//   a task    some panels times at most AVX2_ROW_BLOCK rows
//   for each piece of K: the rows' piece is widened (L2), then for each strip: its piece (L1) times all rows, 6 at a time;
//                        for many rows that is widened first, too
//
// The panel's next piece is prefetched to L2 meanwhile, so weights that come from memory are read ahead in order. Up to 3 rows
// read the whole of each panel front to back instead. Sums wait for their next piece in scratch: the same chains of additions.
#pragma once

constexpr int64_t AVX2_ROW_BLOCK = 132;          // rows of a task: of 512 KB of L2, 140 are x, 140 sums
constexpr int64_t AVX2_PIECE_DEPTH = 256;        // of K: a strip is 8 or 16 of 32 KB of L1, 6 rows of x are 6
constexpr int64_t WIDENED_ROWS = 32;             // of a task, from which on it pays to widen the weight for all of them
constexpr int64_t KEPT_BYTES = 256 << 10;        // of x, widened once for all tasks of a thread

// BLOCK: k of a block of the weight.
template <typename T, int64_t BLOCK = DEPTH<T>>
struct LinearPlan {
  int64_t num_panels, num_blocks, panels_per_task, blocks_per_piece, row_block, num_row_blocks, num_tasks;
  int64_t most_panels;  // of a task, with any number of threads

  LinearPlan(const LinearArgs& a, int64_t num_threads) {
    const int64_t columns = a.activation ? 2 * round_up(a.n_out, 16) : a.n_out;
    num_panels = round_up(columns, PANEL) / PANEL;
    num_blocks = round_up(a.k, BLOCK) / BLOCK;
    const int64_t least = (a.m + AVX2_ROW_BLOCK - 1) / AVX2_ROW_BLOCK;
    row_block = smaller(a.m, round_up((a.m + least - 1) / least, VECTOR_ROWS));
    num_row_blocks = (a.m + row_block - 1) / row_block;
    const bool streamed = a.m <= STREAMED_ROWS;
    blocks_per_piece = streamed ? num_blocks : equal_parts(num_blocks, AVX2_PIECE_DEPTH / BLOCK);
    most_panels = smaller(num_panels, streamed ? larger(1, STREAMED_CHUNK / (num_blocks * BLOCK_BYTES)) : MAX_CHUNK);
    const int64_t fair = num_panels * num_row_blocks / (num_threads * 4);  // tasks enough that no thread waits for long
    panels_per_task = larger(1, smaller(most_panels, fair));
    num_tasks = (num_panels + panels_per_task - 1) / panels_per_task * num_row_blocks;
  }

  // Of widened rows; no multiple of 1 KB, so that a few rows don't crowd into a few sets of L1.
  int64_t wide_stride() const { return blocks_per_piece * BLOCK + 16; }
  int64_t num_pieces() const { return (num_blocks + blocks_per_piece - 1) / blocks_per_piece; }
  int64_t piece_bytes() const { return row_block * wide_stride() * (int64_t)sizeof(float); }
  bool keeps_rows() const { return num_row_blocks == 1 && num_pieces() * piece_bytes() <= KEPT_BYTES; }
  int64_t wide_bytes() const { return (keeps_rows() ? num_pieces() : 1) * piece_bytes(); }
  int64_t sums_bytes() const { return row_block * most_panels * PANEL * (int64_t)sizeof(float); }
};

// This thread's rows of x in float32, one piece of K after the other; all of one product are kept while it lasts, if they fit.
struct LinearScope {
  const LinearArgs* kept_of = nullptr;
  int64_t num_kept = 0;  // pieces

  template <typename T, int64_t BLOCK>
  const float* widen(const LinearArgs& a, const LinearPlan<T, BLOCK>& plan, int64_t first_row, int64_t last_row, int64_t block,
                     float* to) {
    const int64_t stride = plan.wide_stride();
    const int64_t begin = block * BLOCK, depth = smaller(plan.blocks_per_piece, plan.num_blocks - block) * BLOCK;
    if (plan.keeps_rows()) {
      const int64_t piece = block / plan.blocks_per_piece;
      to += piece * plan.row_block * stride;
      if (kept_of != &a) kept_of = &a, num_kept = 0;
      if (piece < num_kept) return to;
      num_kept = piece + 1;
    }
    for (int64_t row = first_row; row < last_row; ++row) {
      const T* from = (const T*)a.x + row * a.x_stride + begin;
      float* wide = to + (row - first_row) * stride;
      for (int64_t i = 0; i < depth; i += W) vstore(wide + i, vload(from + i));
    }
    return to;
  }
};

// acc += a * b. In assembly, because GCC here and there writes over a or b instead, which it has copied before: 5 % on Zen 3, and a
// third of the time while another hyperthread takes its share of the instructions that a core begins.
INLINE void add_product(vec& acc, vec a, vec b) { asm("vfmadd231ps %2, %1, %0" : "+x"(acc) : "x"(a), "x"(b)); }

// acc += ROWS rows of x times a strip in float32, [depth][16]; depth is a multiple of 8.
template <int ROWS>
INLINE void add_products(const float* x, int64_t stride, const float* strip, int64_t depth, vec (*acc)[VECTORS]) {
  const float* rows[ROWS];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i) {
    rows[i] = x + i * stride;
    asm("" : "+r"(rows[i]));  // a register each, where GCC would add strides up for every k
  }
  for (const float* end = strip + depth * 16; strip < end; strip += 8 * 16) {
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
      const vec columns[VECTORS] = {vload(strip + k * 16), vload(strip + k * 16 + W)};
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; ++i) {
        const vec number = vset(rows[i][k]);
        for (int v = 0; v < VECTORS; ++v) add_product(acc[i][v], number, columns[v]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) rows[i] += 8;
  }
}

// multiply_strip over a strip in float32.
template <int ROWS>
void multiply_wide(const float* x, int64_t stride, const float* strip, int64_t depth, float* c, bool resume) {
  vec acc[ROWS][VECTORS];
  load_sums<ROWS>(c, PANEL, resume, acc);
  add_products<ROWS>(x, stride, strip, depth, acc);
  store_sums<ROWS>(c, PANEL, acc);
}
template <int MOST = VECTOR_ROWS>
INLINE void multiply_wide(int64_t rows, const float* x, int64_t stride, const float* strip, int64_t depth, float* c, bool resume) {
  if (rows == MOST) return multiply_wide<MOST>(x, stride, strip, depth, c, resume);
  if constexpr (MOST > 1) multiply_wide<MOST - 1>(rows, x, stride, strip, depth, c, resume);
}

// One strip of `num_blocks` blocks of a weight in float32: [k][16], side by side, so that it takes no more of L1 than its size.
template <typename T>
__attribute__((noinline)) void widen_strip(const char* from, int64_t num_blocks, float* to) {
  for (int64_t block = 0; block < num_blocks; ++block, from += BLOCK_BYTES)
    for (int word = 0; word < 16; ++word)
      for (int k = 0; k < 4 / (int)sizeof(T); ++k, to += 16)
        for (int v = 0; v < VECTORS; ++v) vstore(to + v * W, load_columns(from + word * 64 + v * W * 4, k, T()));
}

// Some rows of x, widened, times one piece of a panel: sums [rows][32]. `next`: the piece after it.
template <typename T>
INLINE void multiply_piece(const LinearArgs& a, const LinearPlan<T>& plan, int64_t first_row, int64_t last_row, const float* x,
                           int64_t panel, int64_t block, const char* next, float* sums, float* strip_numbers) {
  const char* weight = a.weight + (panel * plan.num_blocks + block) * BLOCK_BYTES;
  const int64_t blocks = smaller(plan.blocks_per_piece, plan.num_blocks - block), stride = plan.wide_stride();
  const bool last = block + blocks == plan.num_blocks;
  if (a.m <= STREAMED_ROWS) {
    multiply_streamed(a.m, Product<T, float>{x, stride, weight, blocks, sums, PANEL}, false);
    if (last) finish<T>(a, 0, a.m, panel, sums);
    return;
  }
  const int64_t num_rows = last_row - first_row, next_bytes = blocks * TILE_BYTES;  // a row's share of them is prefetched with it
  const bool widened = num_rows >= WIDENED_ROWS;
  for (int strip = 0; strip < 2; ++strip) {
    if (widened) widen_strip<T>(weight + strip * TILE_BYTES, blocks, strip_numbers);
    for (int64_t row = first_row; row < last_row;) {
      const int64_t rows = next_rows<T>(last_row - row), at = row - first_row;
      float* c = sums + at * PANEL;
      if (widened) {
        for (int64_t byte = next_bytes * at / num_rows / 64 * 64; byte < next_bytes * (at + rows) / num_rows; byte += 64)
          _mm_prefetch(next + strip * next_bytes + byte, _MM_HINT_T1);
        multiply_wide(rows, x + at * stride, stride, strip_numbers, blocks * DEPTH<T>, c + strip * 16, block > 0);
      } else {
        multiply_strip(rows, Product<T, float>{x + at * stride, stride, weight, blocks, c, PANEL, at ? nullptr : next}, strip,
                       block > 0);
      }
      if (last && strip) finish<T>(a, row, rows, panel, c);
      row += rows;
    }
  }
}

// multiply(first row, last row, x, panel, block, next, place) for each piece of a task: x has the rows' piece, widened in `wide`,
// `next` is the piece after it, sums wait `place` numbers behind the task's first.
template <typename T, int64_t BLOCK, typename Multiply>
INLINE void for_pieces(const LinearArgs& a, const LinearPlan<T, BLOCK>& plan, int64_t task, float* wide, LinearScope& scope,
                       Multiply multiply) {
  const int64_t first_panel = task / plan.num_row_blocks * plan.panels_per_task;
  const int64_t last_panel = smaller(first_panel + plan.panels_per_task, plan.num_panels);
  const int64_t first_row = task % plan.num_row_blocks * plan.row_block;
  const int64_t last_row = smaller(first_row + plan.row_block, a.m);
  const int64_t step = plan.blocks_per_piece, panel_bytes = plan.num_blocks * BLOCK_BYTES;
  if (plan.keeps_rows()) {
    for (int64_t panel = first_panel; panel < last_panel; ++panel)
      for (int64_t block = 0; block < plan.num_blocks; block += step) {
        const float* x = scope.widen(a, plan, first_row, last_row, block, wide);
        const char* next = a.weight + panel * panel_bytes + smaller(block + step, plan.num_blocks) * BLOCK_BYTES;
        multiply(first_row, last_row, x, panel, block, next, 0);
      }
    return;
  }
  for (int64_t block = 0; block < plan.num_blocks; block += step) {
    const float* x = scope.widen(a, plan, first_row, last_row, block, wide);
    for (int64_t panel = first_panel; panel < last_panel; ++panel) {
      const char* next = panel + 1 < last_panel ? a.weight + (panel + 1) * panel_bytes + block * BLOCK_BYTES
                                                : a.weight + first_panel * panel_bytes + (block + step) * BLOCK_BYTES;
      multiply(first_row, last_row, x, panel, block, next, (panel - first_panel) * plan.row_block * PANEL);
    }
  }
}

// `scratch`: a strip, sums, widened rows.
template <typename T>
void linear_task(const LinearArgs& a, const LinearPlan<T>& plan, int64_t task, float* scratch, LinearScope& scope) {
  float* sums = scratch + AVX2_PIECE_DEPTH * 16;
  for_pieces(a, plan, task, sums + plan.sums_bytes() / sizeof(float), scope,
             [&](int64_t first_row, int64_t last_row, const float* x, int64_t panel, int64_t block, const char* next, int64_t place) {
               multiply_piece(a, plan, first_row, last_row, x, panel, block, next, sums + place, scratch);
             });
}

template <typename T>
int64_t linear_scratch(const LinearArgs& a) {
  const LinearPlan<T> plan(a, 1);
  return AVX2_PIECE_DEPTH * 16 * (int64_t)sizeof(float) + plan.sums_bytes() + plan.wide_bytes();
}
