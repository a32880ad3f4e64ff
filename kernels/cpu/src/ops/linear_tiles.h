// out = act(x Wᵀ + bias) + residual over a weight with groups, bfloat16 on AMX's tiles. For each flush of k, in order,
//
//   out += (the tile's chain of x and the numbers, exact in bfloat16) * scale + (the sum of x) * offset
//
// each term one fused multiply-add. A flush is a group, or FLUSH_DEPTH of a longer one, as its strip's tiles are:
//
//   piece of W    256 k of a panel, spread out once for all rows [strip][32 k][16 pairs][16 columns]
//   x             [16 rows][32 k][row][k in the order of the pairs], the last rows in a tile of 1, 2, 4, 8 or 16
//
// A row's chain is the same in all of them.
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

  // tiles 0 1   C of one flush and the next      tiles 4 5   A      tiles 6 7   B, `pairs` deep
  void configure(int rows, int pairs) {
    if (key == rows * 32 + pairs) return;
    key = rows * 32 + pairs;
    TileConfig config;
    __builtin_memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int i = 0; i < 8; ++i) {
      config.rows[i] = i < 6 ? rows : pairs;
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

// C of one flush: tile ODD of x and b, `blocks` deep, to `out`. DEEP: bytes of x's and b's blocks.
#define FLUSH_PRODUCT(C, A, B)                                     \
  TILE_ZERO(C);                                                    \
  for (int64_t block = 0; block < blocks; ++block) {               \
    TILE_LOAD(A, x + block * x_bytes, 64);                         \
    TILE_LOAD(B, b + block * TILE_BYTES, 64);                      \
    TILE_MULTIPLY(C, A, B);                                        \
  }                                                                \
  TILE_STORE(C, out, 64);

INLINE void flush_product(bool odd, const char* x, int64_t x_bytes, const char* b, int64_t blocks, float* out) {
  if (odd) {
    FLUSH_PRODUCT(1, 5, 7)
  } else {
    FLUSH_PRODUCT(0, 4, 6)
  }
}

// One strip of a piece: total [ROWS][32] += . `flush`: k of each, of which the last may have less than the others.
template <int ROWS, bool OFFSETS>
void multiply_piece(const char* x, const float* x_sums, const char* b, const PieceScales& s, int64_t flush, int64_t depth,
                    int64_t strip, float* total) {
  constexpr int64_t X_BYTES = ROWS * 64;
  vec sums[ROWS];
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i) sums[i] = vload(total + i * PANEL);
  alignas(64) float results[2][ROWS * 16];
  for (int64_t f = 0; f <= s.num_flushes; ++f) {
    if (f < s.num_flushes) {
      const int64_t k = f * flush;  // of a flush of 16 half a block: its pairs are half of each tile's
      flush_product(f & 1, x + k / 32 * X_BYTES + k % 32 * 2, X_BYTES, b + k * (TILE_BYTES / 32),
                    larger(1, smaller(flush, depth - k) / 32), results[f & 1]);
    }
    if (f == 0) continue;
    const float* result = results[(f - 1) & 1];
    const vec scale = vload(s.scales + (f - 1) * PANEL + strip * 16);
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) sums[i] = vfma(vload(result + i * 16), scale, sums[i]);
    if (OFFSETS) {
      const vec offset = vload(s.offsets + (f - 1) * PANEL + strip * 16);
#pragma GCC unroll 16
      for (int i = 0; i < ROWS; ++i) sums[i] = vfma(vset(x_sums[(f - 1) * ROWS + i]), offset, sums[i]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i) vstore(total + i * PANEL, sums[i]);
}

template <int ROWS>
INLINE void multiply_strips(const char* x, const float* x_sums, const char* tiles, const PieceScales& s, int64_t flush,
                            int64_t depth, float* total) {
  for (int64_t strip = 0; strip < 2; ++strip) {
    const char* b = tiles + strip * STRIP_PIECE_BYTES;
    if (s.has_offsets) {
      multiply_piece<ROWS, true>(x, x_sums, b, s, flush, depth, strip, total + strip * 16);
    } else {
      multiply_piece<ROWS, false>(x, x_sums, b, s, flush, depth, strip, total + strip * 16);
    }
  }
}

// All rows of a task over one piece, from k on. total [rows][32].
INLINE void multiply_rows_of_piece(const GroupedArgs& g, const Int8Part& part, int64_t depth, int64_t k, const char* tiles,
                                   const PieceScales& s, float* total, FlushTileScope& scope) {
  const int64_t num_flushes = (depth + g.flush - 1) / g.flush, here = smaller(TILE_PIECE, depth - k);
  for (int64_t row = part.first_row; row < part.last_row; row += 16) {
    const int64_t rows = rows_of_tile(g.linear.m - row);
    const char* x = (const char*)(g.tiles + row * depth + k * rows);
    const float* x_sums = g.x_sums + row * num_flushes + k / g.flush * rows;
    float* to = total + (row - part.first_row) * PANEL;
    scope.configure(rows, g.flush < 32 ? g.flush / 2 : 16);
    switch (rows) {
      case 1: multiply_strips<1>(x, x_sums, tiles, s, g.flush, here, to); break;
      case 2: multiply_strips<2>(x, x_sums, tiles, s, g.flush, here, to); break;
      case 4: multiply_strips<4>(x, x_sums, tiles, s, g.flush, here, to); break;
      case 8: multiply_strips<8>(x, x_sums, tiles, s, g.flush, here, to); break;
      default: multiply_strips<16>(x, x_sums, tiles, s, g.flush, here, to);
    }
  }
}

struct TilesScratch {
  alignas(64) char tiles[2 * STRIP_PIECE_BYTES];
  PieceScales scales;
  alignas(64) float total[(ROW_BLOCK + 16) * PANEL];
};

template <typename N>
void tiles_task(const GroupedArgs& g, const N& numbers, const Int8Plan<bf16>& plan, int64_t task, TilesScratch& scratch,
                FlushTileScope& scope) {
  constexpr int64_t UNITS = N::DEPTH / 32, BLOCK = 2 * UNITS * N::UNIT_BYTES;
  const LinearArgs& a = g.linear;
  const Int8Part part(a, plan, task);
  const int64_t depth = plan.num_blocks * N::DEPTH, rows = part.last_row - part.first_row;
  for (int64_t panel = part.first_panel; panel < part.last_panel; ++panel) {
    const FixedScales scales{g.scale_form, g.group < depth ? larger(1, g.group / g.flush) : depth,
                             (const char*)g.scales + panel * g.scale_panel_bytes,
                             g.offsets ? g.offsets + panel * g.num_groups * PANEL : nullptr};
    for (int64_t i = 0; i < round_up(rows, 16) * PANEL; i += W) vstore(scratch.total + i, vzero());
    const char* b = a.weight + panel * plan.num_blocks * BLOCK;
    for (int64_t k = 0; k < depth; k += TILE_PIECE) {
      const int64_t end = smaller(k + TILE_PIECE, depth);
      for (int64_t block = k; block < end; block += N::DEPTH)
        for (int64_t strip = 0; strip < 2; ++strip)
          for (int64_t unit = 0; unit < UNITS; ++unit, b += N::UNIT_BYTES)
            spread_tile(numbers, b, scratch.tiles + strip * STRIP_PIECE_BYTES + ((block - k) / 32 + unit) * TILE_BYTES,
                        std::make_integer_sequence<int, 16>());
      scratch.scales.load(scales, k / g.flush, (end - k + g.flush - 1) / g.flush, N::UNIT);
      multiply_rows_of_piece(g, part, depth, k, scratch.tiles, scratch.scales, scratch.total, scope);
    }
    finish<bf16>(a, part.first_row, rows, panel, scratch.total);
  }
}

inline void linear_tiles(const GroupedArgs& g, const Region& region) {
  with_tile_numbers(g.numbers, [&](const auto& numbers) {
    typedef std::decay_t<decltype(numbers)> N;
    const Int8Plan<bf16> plan(g.linear, region.num_threads, g.linear.m <= 16, N::DEPTH);
    FlushTileScope scope;
    for (int64_t task; (task = next_task(region)) < plan.num_tasks;)
      tiles_task(g, numbers, plan, task, *(TilesScratch*)region.scratch, scope);
  });
}

inline int64_t linear_tiles_scratch(const GroupedArgs&) { return sizeof(TilesScratch); }
