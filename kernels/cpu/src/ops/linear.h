// out = act(x Wᵀ + bias) + residual, over a packed weight (pack.h).
//
// A task is a chunk of panels times a block of rows; the chunk's part of the weight stays in L2 while the rows pass over it.
// When K is so long that a few panels don't fit, it is cut into pieces whose partial sums stay in float32 in scratch: the same
// additions in the same order, so nothing depends on the cut. With few rows there is one pass over the weight, from memory.
//
// AMX takes more bytes a cycle than L2 gives: there K is also cut so that the piece of 32 rows of x stays in L1 for all panels.
#pragma once

constexpr int64_t ROW_BLOCK = 288;            // rows of a task, at most
constexpr int64_t ROW_STEP = 96;              // ... whole blocks of rows on vectors (12) and on tiles (32)
constexpr int64_t CHUNK_BYTES = 320 << 10;    // of the weight, in L2
constexpr int64_t MAX_CHUNK = 8;              // panels
constexpr int64_t PIECE_BLOCKS = 48;          // depth of a piece of K when it is cut, at most
constexpr int64_t STREAMED_CHUNK = 128 << 10;  // bytes of the weight dealt out at a time when it is read once

// Of products on tiles, whose processors have 2 MB of L2.
constexpr int64_t TILES_CHUNK_BYTES = 672 << 10, TILES_MAX_CHUNK = 16, TILES_PIECE_BLOCKS = 28;
constexpr int64_t TILES_L1_BLOCKS = 10;  // 20 KB of x, and as much of the weight passing

template <typename T>
constexpr int64_t CHUNK_OF = ON_TILES<T> ? TILES_MAX_CHUNK : MAX_CHUNK;

// The least number of equal parts of at most `most`: how long one is.
INLINE int64_t equal_parts(int64_t total, int64_t most) {
  const int64_t count = (total + most - 1) / most;
  return (total + count - 1) / count;
}

INLINE vec bias_at(const LinearArgs& a, int64_t column) { return a.bias ? vload(a.bias + column) : vzero(); }

// One row of a panel: `count` output columns from `column` on.
template <typename T, typename Out>
INLINE void finish_row(const LinearArgs& a, int64_t row, int64_t panel, const float* c) {
  const int64_t width = a.activation ? PANEL / 2 : PANEL, column = panel * width;
  Out* out = (Out*)a.out + row * a.out_stride + column;
  const T* residual = (const T*)a.residual + row * a.residual_stride + column;
  const int64_t count = smaller(width, a.n_out - column);
  for (int64_t i = 0; i < count; i += W) {
    vec y = vadd(vload(c + i), bias_at(a, panel * PANEL + i));
    if (a.activation) y = gated(y, vadd(vload(c + 16 + i), bias_at(a, panel * PANEL + 16 + i)), a.activation);
    if (count - i >= W) {
      vstore(out + i, a.residual ? vadd(y, vload(residual + i)) : y);
    } else {
      vstore(out + i, a.residual ? vadd(y, vload(residual + i, count - i)) : y, count - i);
    }
  }
}

template <typename T>
INLINE void finish(const LinearArgs& a, int64_t row, int64_t rows, int64_t panel, const float* c) {
  for (int64_t i = 0; i < rows; ++i) {
    if (a.float32_out) {
      finish_row<T, float>(a, row + i, panel, c + i * PANEL);
    } else {
      finish_row<T, T>(a, row + i, panel, c + i * PANEL);
    }
  }
}

#if defined(__AVX512F__)

template <typename T>
struct LinearPlan {
  int64_t num_panels, num_blocks, panels_per_task, blocks_per_piece, blocks_in_l1, row_block, num_row_blocks, num_tasks;

  LinearPlan(const LinearArgs& a, int64_t num_threads) {
    const int64_t columns = a.activation ? 2 * round_up(a.n_out, 16) : a.n_out;
    num_panels = round_up(columns, PANEL) / PANEL;
    num_blocks = round_up(a.k, DEPTH<T>) / DEPTH<T>;
    blocks_per_piece = num_blocks;
    const int64_t least = (a.m + ROW_BLOCK - 1) / ROW_BLOCK;
    row_block = smaller(a.m, round_up((a.m + least - 1) / least, ROW_STEP));
    num_row_blocks = (a.m + row_block - 1) / row_block;
    if (a.m <= MAX_ROWS<T>) {
      panels_per_task = larger(1, STREAMED_CHUNK / (num_blocks * BLOCK_BYTES));
      blocks_in_l1 = num_blocks;
    } else {
      constexpr int64_t CHUNK = ON_TILES<T> ? TILES_CHUNK_BYTES : CHUNK_BYTES;
      blocks_per_piece = equal_parts(num_blocks, ON_TILES<T> ? TILES_PIECE_BLOCKS : PIECE_BLOCKS);
      blocks_in_l1 = ON_TILES<T> ? equal_parts(blocks_per_piece, TILES_L1_BLOCKS) : blocks_per_piece;
      panels_per_task = smaller(CHUNK_OF<T>, larger(1, CHUNK / (blocks_per_piece * BLOCK_BYTES)));
    }
    const int64_t fair = num_panels * num_row_blocks / (num_threads * 4);  // tasks enough that no thread waits for long
    panels_per_task = larger(1, smaller(panels_per_task, fair));
    num_tasks = (num_panels + panels_per_task - 1) / panels_per_task * num_row_blocks;
  }
};

// X: what the rows of x are made of. `finish`(row, rows, panel, sums) takes the sums of all k of some rows of a panel.
template <typename X, typename Finish>
INLINE void multiply_task(const LinearArgs& a, const LinearPlan<X>& plan, int64_t task, float* sums, TileScope& scope,
                          Finish finish) {
  const int64_t first_panel = task / plan.num_row_blocks * plan.panels_per_task;
  const int64_t last_panel = smaller(first_panel + plan.panels_per_task, plan.num_panels);
  const int64_t first_row = task % plan.num_row_blocks * plan.row_block;
  const int64_t last_row = smaller(first_row + plan.row_block, a.m);
  const int64_t panel_bytes = plan.num_blocks * BLOCK_BYTES;
  const bool at_once = plan.blocks_in_l1 == plan.num_blocks, whole = plan.blocks_per_piece == plan.num_blocks;
  for (int64_t piece = 0; piece < plan.num_blocks; piece += plan.blocks_per_piece) {
    const int64_t end = smaller(piece + plan.blocks_per_piece, plan.num_blocks);
    for (int64_t row = first_row; row < last_row;) {
      const int64_t rows = next_rows<X>(last_row - row);
      for (int64_t block = piece; block < end; block += plan.blocks_in_l1) {
        const int64_t blocks = smaller(plan.blocks_in_l1, end - block);
        const X* x = (const X*)a.x + row * a.x_stride + block * DEPTH<X>;
        for (int64_t panel = first_panel; panel < last_panel; ++panel) {
          // Sums that wait for their next piece: none, those of these rows, or of all rows.
          const int64_t kept = panel - first_panel;
          float* c = sums + (at_once ? 0 : whole ? kept * MAX_ROWS<X> : kept * plan.row_block + row - first_row) * PANEL;
          const char* weight = a.weight + panel * panel_bytes + block * BLOCK_BYTES;
          multiply(rows, Product<X>{x, a.x_stride, weight, blocks, c, PANEL, weight + panel_bytes}, block > 0, scope);
          if (block + blocks == plan.num_blocks) finish(row, rows, panel, c);
        }
      }
      row += rows;
    }
  }
}

template <typename T>
void linear_task(const LinearArgs& a, const LinearPlan<T>& plan, int64_t task, float* sums, TileScope& scope) {
  multiply_task(a, plan, task, sums, scope,
                [&a](int64_t row, int64_t rows, int64_t panel, const float* c) { finish<T>(a, row, rows, panel, c); });
}

template <typename T>
int64_t linear_scratch(const LinearArgs& a) {
  return larger(smaller(a.m, ROW_BLOCK), MAX_ROWS<T>) * CHUNK_OF<T> * PANEL * sizeof(float);
}

typedef TileScope LinearScope;

#else
#include "linear_avx2.h"
#endif

template <typename T>
void linear(const LinearArgs& a, const Region& region) {
  const LinearPlan<T> plan(a, region.num_threads);
  LinearScope scope;
  each_task(region, plan.num_tasks, [&](int64_t task) { linear_task(a, plan, task, (float*)region.scratch, scope); });
}
