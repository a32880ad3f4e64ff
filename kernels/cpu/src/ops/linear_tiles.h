// out = act(x Wᵀ + bias) + residual over a weight with groups, bfloat16 on AMX's tiles. For each flush of k, in order,
//
//   out += (the tile's chain of x and the numbers, exact in bfloat16) * scale + (the sum of x) * offset
//
// each term one fused multiply-add. A flush is a group, or FLUSH_DEPTH of a longer one, as its strip's tiles are:
//
//   piece of W    256 k of a panel, spread out once for all rows [strip][32 k][16 pairs][16 columns]
//   x             [16 rows][32 k][row][k in the order of the pairs], the last rows in a tile of 1, 2, 4, 8 or 16
//
// A row's chain is the same in all of them, and in linear_tiles_one.h.
#pragma once

constexpr int64_t FLUSH_DEPTH = 128, TILE_PIECE = 256, MOST_FLUSHES = TILE_PIECE / 16;
constexpr int64_t STRIP_PIECE_BYTES = TILE_PIECE / 32 * TILE_BYTES;

// Rows of the tile whose first row has so many from it on.
INLINE int64_t rows_of_tile(int64_t left) { return left > 8 ? 16 : left > 4 ? 8 : left > 2 ? 4 : left; }

// Rows in the tiles' order; see TileRowsArgs.
inline void tile_rows(const TileRowsArgs& a, const Region& region) {
  const bool bytes = a.numbers == INT8 || a.numbers == FP8;
  const __m512i order = bytes ? _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15))
                              : _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
  for (int64_t row; (row = next_task(region)) < a.num_rows;) {
    const bf16* x = (const bf16*)a.x + row * a.x_stride;
    const int64_t first = row / 16 * 16, rows = rows_of_tile(a.num_rows - first);
    bf16* out = a.out + first * a.depth + (row - first) * 32;
    for (int64_t k = 0; k < a.depth; k += 32, out += rows * 32) {
      const int64_t left = a.size - k;
      const __mmask32 there = left >= 32 ? 0xffffffffu : left > 0 ? (1u << left) - 1 : 0u;
      _mm512_storeu_si512(out, _mm512_shuffle_epi8(_mm512_maskz_loadu_epi16(there, x + k), order));
    }
    if (!a.sums) continue;
    float* sums = a.sums + first * ((a.depth + a.flush - 1) / a.flush) + row - first;
    for (int64_t k = 0; k < a.depth; k += a.flush, sums += rows) {
      const int64_t end = smaller(k + a.flush, a.size);
      vec sum = vzero();
      for (int64_t i = k; i < end; i += W) sum = vadd(sum, load_some(x + i, end - i));
      *sums = vsum(sum);
    }
  }
}

struct FlushTileScope {
  int64_t key = -1;
  ~FlushTileScope() {
    if (key >= 0) tile_release();
  }

  // Two tiles of rows:  0 1 2 3 C (rows, strips)   4 5 A (rows)   6 7 B (strips), `pairs` deep
  // One tile of rows:   0 1 C (strips) of one flush, 2 3 of the next, 4 5 A of these
  void configure(int rows0, int rows1, int pairs) {
    const int64_t wanted = (rows0 * 32 + rows1) * 32 + pairs;
    if (key == wanted) return;
    key = wanted;
    const int rows[8] = {rows0, rows0, rows1, rows1, rows0, rows1, pairs, pairs};
    TileConfig config;
    __builtin_memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int i = 0; i < 8; ++i) {
      config.rows[i] = rows[i];
      config.bytes_per_row[i] = i == 4 || i == 5 ? pairs * 4 : 64;
    }
    tile_configure(config);
  }
};

// What a piece of a panel is multiplied with: scales and offsets [flush][32].
struct PieceScales {
  int64_t num_flushes;
  bool has_offsets;
  alignas(64) float scales[MOST_FLUSHES * PANEL];
  alignas(64) float offsets[MOST_FLUSHES * PANEL];

  void load(const FixedScales& from, int64_t first_flush, int64_t count, float unit) {
    num_flushes = count;
    has_offsets = from.has_offsets();
    for (int64_t f = 0; f < count; ++f)
      for (int64_t n = 0; n < PANEL; n += W) {
        vstore(scales + f * PANEL + n, vmul(from.scale(first_flush + f, n), vset(unit)));
        if (has_offsets) vstore(offsets + f * PANEL + n, from.offset(first_flush + f, n));
      }
  }
};

// One tile of rows and what it is multiplied with in a piece: x [32 k][rows][32], x_sums [flush][rows], total [rows][32].
struct RowTile {
  int64_t rows;
  const char* x;
  const float* x_sums;
  float* total;

  RowTile(const GroupedArgs& g, int64_t depth, int64_t k, int64_t row, float* to)
      : rows(rows_of_tile(g.linear.m - row)),
        x((const char*)(g.tiles + row * depth + k * rows)),
        x_sums(g.x_sums + row * ((depth + g.flush - 1) / g.flush) + k / g.flush * rows),
        total(to) {}
  __attribute__((always_inline)) const char* at(int64_t k) const { return x + k / 32 * rows * 64 + k % 32 * 2; }
};

constexpr int64_t RESULT_BYTES = PANEL * 4;  // of a row

// C of one flush, `blocks` deep, to `out` [rows][32]. Of a flush of 16 the pairs are half of each tile's.
#define FLUSH_OF_ONE_TILE(C0, C1, A)                 \
  TILE_ZERO(C0);                                     \
  TILE_ZERO(C1);                                     \
  for (int64_t block = 0; block < blocks; ++block) { \
    TILE_LOAD(A, x + block * rows * 64, 64);         \
    TILE_LOAD(6, b + block * TILE_BYTES, 64);        \
    TILE_MULTIPLY_BF16(C0, A, 6);                    \
    TILE_LOAD(7, b1 + block * TILE_BYTES, 64);       \
    TILE_MULTIPLY_BF16(C1, A, 7);                    \
  }                                                  \
  TILE_STORE(C0, out, RESULT_BYTES);                 \
  TILE_STORE(C1, out + 16, RESULT_BYTES);

INLINE void flush_one(bool odd, const char* x, int64_t rows, const char* b, int64_t blocks, float* out) {
  const char* b1 = b + STRIP_PIECE_BYTES;
  if (odd) {
    FLUSH_OF_ONE_TILE(2, 3, 5)
  } else {
    FLUSH_OF_ONE_TILE(0, 1, 4)
  }
}

INLINE void flush_two(const char* x0, const char* x1, int64_t rows1, const char* b, int64_t blocks, float* out) {
  const char* b1 = b + STRIP_PIECE_BYTES;
  float* out1 = out + 16 * PANEL;
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  for (int64_t block = 0; block < blocks; ++block) {
    TILE_LOAD(4, x0 + block * TILE_BYTES, 64);
    TILE_LOAD(6, b + block * TILE_BYTES, 64);
    TILE_LOAD(7, b1 + block * TILE_BYTES, 64);
    TILE_MULTIPLY_BF16(0, 4, 6);
    TILE_MULTIPLY_BF16(1, 4, 7);
    TILE_LOAD(5, x1 + block * rows1 * 64, 64);
    TILE_MULTIPLY_BF16(2, 5, 6);
    TILE_MULTIPLY_BF16(3, 5, 7);
  }
  TILE_STORE(0, out, RESULT_BYTES);
  TILE_STORE(1, out + 16, RESULT_BYTES);
  TILE_STORE(2, out1, RESULT_BYTES);
  TILE_STORE(3, out1 + 16, RESULT_BYTES);
}

// A tile's total += the results of COUNT flushes, from the f-th on.
template <int COUNT, bool OFFSETS>
INLINE void add_flushes(const RowTile& tile, const PieceScales& s, int64_t f, const float* results, int64_t result_size) {
  for (int64_t n = 0; n < PANEL; n += W) {
    vec scale[COUNT], offset[COUNT];
#pragma GCC unroll 2
    for (int j = 0; j < COUNT; ++j) {
      scale[j] = vload(s.scales + (f + j) * PANEL + n);
      if (OFFSETS) offset[j] = vload(s.offsets + (f + j) * PANEL + n);
    }
#pragma GCC unroll 4
    for (int64_t i = 0; i < tile.rows; ++i) {
      float* to = tile.total + i * PANEL + n;
      vec sum = vload(to);
#pragma GCC unroll 2
      for (int j = 0; j < COUNT; ++j) {
        sum = vfma(vload(results + j * result_size + i * PANEL + n), scale[j], sum);
        if (OFFSETS) sum = vfma(vset(tile.x_sums[(f + j) * tile.rows + i]), offset[j], sum);
      }
      vstore(to, sum);
    }
  }
}

constexpr int64_t FLUSH_RESULT = 32 * PANEL;  // floats of two tiles' results

// A piece of a panel times one or two tiles of rows. Two flushes at a time, whose results are added while the next are made.
template <bool OFFSETS>
void multiply_piece(const RowTile* tiles, int num_tiles, const char* b, const PieceScales& s, int64_t flush, int64_t depth,
                    float* results) {
  for (int64_t f = 0; f < s.num_flushes + 2; f += 2) {
    float* made = results + f / 2 % 2 * 2 * FLUSH_RESULT;
    for (int64_t j = 0; j < 2 && f + j < s.num_flushes; ++j) {
      const int64_t k = (f + j) * flush, blocks = larger(1, smaller(flush, depth - k) / 32);
      const char* weight = b + k * (TILE_BYTES / 32);
      float* out = made + j * FLUSH_RESULT;
      if (num_tiles == 2) {
        flush_two(tiles[0].at(k), tiles[1].at(k), tiles[1].rows, weight, blocks, out);
      } else {
        flush_one(j, tiles[0].at(k), tiles[0].rows, weight, blocks, out);
      }
    }
    if (f == 0) continue;
    const float* before = results + (f / 2 + 1) % 2 * 2 * FLUSH_RESULT;
    for (int t = 0; t < num_tiles; ++t) {
      if (f - 1 < s.num_flushes) {
        add_flushes<2, OFFSETS>(tiles[t], s, f - 2, before + t * 16 * PANEL, FLUSH_RESULT);
      } else {
        add_flushes<1, OFFSETS>(tiles[t], s, f - 2, before + t * 16 * PANEL, FLUSH_RESULT);
      }
    }
  }
}

// All rows of a task over one piece, from k on. total [rows][32].
INLINE void multiply_rows_of_piece(const GroupedArgs& g, const Int8Part& part, int64_t depth, int64_t k, const char* tiles,
                                   const PieceScales& s, float* results, float* total, FlushTileScope& scope) {
  const int64_t here = smaller(TILE_PIECE, depth - k);
  for (int64_t row = part.first_row; row < part.last_row; row += 32) {
    float* to = total + (row - part.first_row) * PANEL;
    const int num_tiles = part.last_row - row > 16 ? 2 : 1;
    const RowTile rows[2] = {{g, depth, k, row, to}, {g, depth, k, row + (num_tiles - 1) * 16, to + 16 * PANEL}};
    scope.configure(rows[0].rows, rows[1].rows, g.flush < 32 ? g.flush / 2 : 16);
    if (s.has_offsets) {
      multiply_piece<true>(rows, num_tiles, tiles, s, g.flush, here, results);
    } else {
      multiply_piece<false>(rows, num_tiles, tiles, s, g.flush, here, results);
    }
  }
}

struct TilesScratch {
  alignas(64) char tiles[2 * STRIP_PIECE_BYTES];
  PieceScales scales;
  alignas(64) float results[4 * FLUSH_RESULT];
  alignas(64) float total[(ROW_BLOCK + 16) * PANEL];
};

INLINE FixedScales panel_scales(const GroupedArgs& g, int64_t panel, int64_t depth) {
  return FixedScales{g.scale_form, g.group < depth ? larger(1, g.group / g.flush) : depth,
                     (const char*)g.scales + panel * g.scale_panel_bytes,
                     g.offsets ? g.offsets + panel * g.num_groups * PANEL : nullptr};
}

template <typename N>
void tiles_task(const GroupedArgs& g, const N& numbers, const Int8Plan<bf16>& plan, int64_t task, TilesScratch& scratch,
                FlushTileScope& scope) {
  constexpr int64_t UNITS = N::DEPTH / 32, BLOCK = 2 * UNITS * N::UNIT_BYTES;
  const LinearArgs& a = g.linear;
  const Int8Part part(a, plan, task);
  const int64_t depth = plan.num_blocks * N::DEPTH, rows = part.last_row - part.first_row;
  for (int64_t panel = part.first_panel; panel < part.last_panel; ++panel) {
    const FixedScales scales = panel_scales(g, panel, depth);
    for (int64_t i = 0; i < round_up(rows, 16) * PANEL; i += W) vstore(scratch.total + i, vzero());
    const char* b = a.weight + panel * plan.num_blocks * BLOCK;
    for (int64_t k = 0; k < depth; k += TILE_PIECE) {
      const int64_t end = smaller(k + TILE_PIECE, depth);
      for (int64_t block = k; block < end; block += N::DEPTH)
        for (int64_t strip = 0; strip < 2; ++strip)
          for (int64_t unit = 0; unit < UNITS; ++unit, b += N::UNIT_BYTES)
            spread_tile(numbers, b, scratch.tiles + strip * STRIP_PIECE_BYTES + ((block - k) / 32 + unit) * TILE_BYTES,
                        std::make_integer_sequence<int, 16>());
      asm volatile("" : : : "memory");  // the tiles' loads don't say that they read it
      scratch.scales.load(scales, k / g.flush, (end - k + g.flush - 1) / g.flush, N::UNIT);
      multiply_rows_of_piece(g, part, depth, k, scratch.tiles, scratch.scales, scratch.results, scratch.total, scope);
    }
    finish<bf16>(a, part.first_row, rows, panel, scratch.total);
  }
}

#include "linear_tiles_one.h"

inline void linear_tiles(const GroupedArgs& g, const Region& region) {
  with_tile_numbers(g.numbers, [&](const auto& numbers) {
    typedef std::decay_t<decltype(numbers)> N;
    const Int8Plan<bf16> plan(g.linear, region.num_threads, g.linear.m <= 32, N::DEPTH);
    if (g.linear.m == 1) {
      float *total = (float*)region.scratch, *x = total + PANEL;
      widen_pairs(g.tiles, plan.num_blocks * N::DEPTH, x);
      each_task(region, plan.num_tasks, [&](int64_t task) { one_row_task(g, numbers, plan, task, x, total); });
      return;
    }
    FlushTileScope scope;
    TilesScratch& scratch = *(TilesScratch*)region.scratch;
    each_task(region, plan.num_tasks, [&](int64_t task) { tiles_task(g, numbers, plan, task, scratch, scope); });
  });
}

inline int64_t linear_tiles_scratch(const GroupedArgs& g) {
  return larger(sizeof(TilesScratch), (PANEL + round_up(g.linear.k, FLUSH_DEPTH)) * (int64_t)sizeof(float));
}
