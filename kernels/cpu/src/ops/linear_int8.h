// out = act((x Qᵀ) * scales + bias) + residual over packed int8 weights, in two kinds:
//
//   weight only   x float32 or bfloat16. The int8 numbers are exact in x's type, so this is the plain product (tiles.h) of
//                 the unpacked weight: unpacked in a thread's own scratch, or in registers, by the same chain of fused
//                 multiply-adds, where few rows read it.
//   integers      x int8 with a scale for each row. Products and sums are exact in 32 bits, whatever their order.
#pragma once

constexpr int64_t UNPACKED_BLOCKS = 4;  // blocks of 64 k unpacked at a time: 16 or 32 KB of a panel

#if defined(__AVX512BF16__)
template <typename T>
constexpr bool UNPACKS_IN_REGISTERS = sizeof(T) == 4;  // bfloat16's own product adds pairs: the same in all row counts
#else
template <typename T>
constexpr bool UNPACKS_IN_REGISTERS = true;
#endif

template <typename T>
struct Int8Plan {
  int64_t num_panels, num_blocks, panels_per_task, row_block, num_row_blocks, num_tasks;

  Int8Plan(const LinearArgs& a, int64_t num_threads, bool once, int64_t block_depth = DEPTH_INT8) {
    const int64_t columns = a.activation ? 2 * round_up(a.n_out, 16) : a.n_out;
    num_panels = round_up(columns, PANEL) / PANEL;
    num_blocks = round_up(a.k, block_depth) / block_depth;
    const int64_t least = (a.m + ROW_BLOCK - 1) / ROW_BLOCK;
    row_block = smaller(a.m, round_up((a.m + least - 1) / least, ROW_STEP));
    num_row_blocks = (a.m + row_block - 1) / row_block;
    const int64_t chunk = once ? STREAMED_CHUNK / (num_blocks * BLOCK_BYTES)
                               : smaller(MAX_CHUNK, CHUNK_BYTES / (num_blocks * BLOCK_BYTES));
    const int64_t fair = num_panels * num_row_blocks / (num_threads * 4);
    panels_per_task = larger(1, smaller(chunk, fair));
    num_tasks = (num_panels + panels_per_task - 1) / panels_per_task * num_row_blocks;
  }
};

// The rows and panels of one task.
struct Int8Part {
  int64_t first_panel, last_panel, first_row, last_row;

  template <typename T>
  Int8Part(const LinearArgs& a, const Int8Plan<T>& plan, int64_t task) {
    first_panel = task / plan.num_row_blocks * plan.panels_per_task;
    last_panel = smaller(first_panel + plan.panels_per_task, plan.num_panels);
    first_row = task % plan.num_row_blocks * plan.row_block;
    last_row = smaller(first_row + plan.row_block, a.m);
  }
};

// Sums of a panel's products into what the weights stand for, in place, and on to bias, activation and residual.
template <typename T>
INLINE void finish_int8(const LinearArgs& a, int64_t row, int64_t rows, int64_t panel, float* c) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t n = 0; n < PANEL; n += W) {
      float* sum = c + i * PANEL + n;
      const vec y = a.x_scales ? vmul(from_integers(sum), vset(a.x_scales[row + i])) : vmul(vload(sum), vset(BYTE_UNIT));
      vstore(sum, vmul(y, vload(a.scales + panel * PANEL + n)));
    }
  finish<T>(a, row, rows, panel, c);
}

// Each word of the weight is unpacked into registers. a: float32 rows.
template <int ROWS>
void multiply_int8(const float* a, int64_t stride, const char* b, int64_t num_blocks, float* c) {
  vec acc[2][ROWS][VECTORS];
#pragma GCC unroll 2
  for (int strip = 0; strip < 2; ++strip)
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; ++v) acc[strip][i][v] = vzero();
  for (int64_t block = 0; block < num_blocks; ++block, b += BLOCK_BYTES, a += DEPTH_INT8)
#pragma GCC unroll 2
    for (int strip = 0; strip < 2; ++strip)
#pragma GCC unroll 2
      for (int word = 0; word < 16; ++word)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; ++v) {
          const char* words = b + strip * TILE_BYTES + word * 64 + v * W * 4;
          const vec q[4] = {load_byte<0>(words), load_byte<1>(words), load_byte<2>(words), load_byte<3>(words)};
#pragma GCC unroll 4
          for (int j = 0; j < 4; ++j)
#pragma GCC unroll 16
            for (int i = 0; i < ROWS; ++i)
              acc[strip][i][v] = vfma(vset(a[i * stride + word * 4 + j]), q[j], acc[strip][i][v]);
        }
#pragma GCC unroll 2
  for (int strip = 0; strip < 2; ++strip)
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; ++v) vstore(c + i * PANEL + strip * 16 + v * W, acc[strip][i][v]);
}

constexpr int64_t FEW_ROWS = 6, ROWS_AT_ONCE = 3;  // on Zen 3, unpacking once for all is faster from 7 rows on

template <typename T>
void few_rows_int8(const LinearArgs& a, const Int8Plan<T>& plan, int64_t task, const float* x, float* sums) {
  const Int8Part part(a, plan, task);
  const int64_t stride = plan.num_blocks * DEPTH_INT8, at_once = a.m == 4 ? 2 : ROWS_AT_ONCE;
  for (int64_t panel = part.first_panel; panel < part.last_panel; ++panel) {
    const char* weight = a.weight + panel * plan.num_blocks * BLOCK_BYTES;
    for (int64_t row = 0; row < a.m; row += at_once) {
      const int64_t rows = smaller(at_once, a.m - row);
      switch (rows) {
        case 1: multiply_int8<1>(x + row * stride, stride, weight, plan.num_blocks, sums); break;
        case 2: multiply_int8<2>(x + row * stride, stride, weight, plan.num_blocks, sums); break;
        default: multiply_int8<3>(x + row * stride, stride, weight, plan.num_blocks, sums);
      }
      finish_int8<T>(a, row, rows, panel, sums);
    }
  }
}

// The rows in float32, for as many whole blocks as the weight has.
template <typename T>
void widen_rows(const LinearArgs& a, int64_t depth, float* to) {
  for (int64_t row = 0; row < a.m; ++row)
    for (int64_t i = 0; i < depth; i += W) vstore(to + row * depth + i, vload((const T*)a.x + row * a.x_stride + i));
}

// The chunk's panels are unpacked piece by piece; the partial sums of all its rows stay in scratch, as in linear.h.
template <typename T>
void unpacked_int8(const LinearArgs& a, const Int8Plan<T>& plan, int64_t task, float* sums, char* tiles, TileScope& scope) {
  constexpr int64_t PER_BLOCK = DEPTH_INT8 / DEPTH<T>, PIECE_BYTES = UNPACKED_BLOCKS * PER_BLOCK * BLOCK_BYTES;
  const Int8Part part(a, plan, task);
  for (int64_t block = 0; block < plan.num_blocks; block += UNPACKED_BLOCKS) {
    const int64_t blocks = smaller(UNPACKED_BLOCKS, plan.num_blocks - block);
    for (int64_t panel = part.first_panel; panel < part.last_panel; ++panel)
      unpack_blocks<T>(a.weight + (panel * plan.num_blocks + block) * BLOCK_BYTES, blocks,
                       tiles + (panel - part.first_panel) * PIECE_BYTES);
    for (int64_t row = part.first_row; row < part.last_row;) {
      const int64_t rows = next_rows<T>(part.last_row - row);
      for (int64_t panel = part.first_panel; panel < part.last_panel; ++panel) {
        float* c = sums + ((panel - part.first_panel) * plan.row_block + row - part.first_row) * PANEL;
        const T* x = (const T*)a.x + row * a.x_stride + block * DEPTH_INT8;
        const char* weight = tiles + (panel - part.first_panel) * PIECE_BYTES;
        multiply(rows, Product<T>{x, a.x_stride, weight, blocks * PER_BLOCK, c, PANEL}, block > 0, scope);
        if (block + blocks == plan.num_blocks) finish_int8<T>(a, row, rows, panel, c);
      }
      row += rows;
    }
  }
}

#if defined(PAGEWIRE_AMX)
// Blocks of int8 as blocks of bfloat16: each is unpacked just before the tiles read it, so the weight passes once.
struct UnpackedBlocks {
  const char* first;
  char* tiles;  // of two blocks, by turns

  __attribute__((always_inline)) const char* at(int64_t block) const {
    const int64_t half = block % 2;
    const char* from = first + block / 2 * BLOCK_BYTES + half * 512;
    char* to = tiles + half * BLOCK_BYTES;
    for (int64_t strip = 0; strip < 2; ++strip)
      for (int64_t word = 0; word < 8; ++word) {
        const char* words = from + strip * TILE_BYTES + word * 64;
        _mm_prefetch(words + PREFETCH, _MM_HINT_T0);
        unpack_word(words, word, to + strip * TILE_BYTES, bf16());
      }
    TILE_BARRIER();
    return to;
  }
};

INLINE void streamed_int8(const LinearArgs& a, const Int8Plan<bf16>& plan, int64_t task, float* sums, char* tiles, TileScope& scope) {
  const Int8Part part(a, plan, task);
  for (int64_t panel = part.first_panel; panel < part.last_panel; ++panel) {
    const UnpackedBlocks blocks{a.weight + panel * plan.num_blocks * BLOCK_BYTES, tiles};
    const Product<bf16> product{(const bf16*)a.x, a.x_stride, nullptr, plan.num_blocks * 2, sums, PANEL};
    multiply_tiles(a.m, product, blocks, false, scope);
    finish_int8<bf16>(a, 0, a.m, panel, sums);
  }
}
#endif

constexpr int64_t INT8_SUM_BYTES = ROW_BLOCK * MAX_CHUNK * PANEL * sizeof(float);

template <typename T>
void linear_int8(const LinearArgs& a, const Region& region) {
  float* sums = (float*)region.scratch;
  char* rest = region.scratch + INT8_SUM_BYTES;
  TileScope scope;
#if defined(PAGEWIRE_AMX)
  if constexpr (sizeof(T) == 2)
    if (a.m <= MAX_ROWS<T>) {
      const Int8Plan<T> plan(a, region.num_threads, true);
      each_task(region, plan.num_tasks, [&](int64_t task) { streamed_int8(a, plan, task, sums, rest, scope); });
      return;
    }
#endif
  const bool few = UNPACKS_IN_REGISTERS<T> && a.m <= FEW_ROWS;
  const Int8Plan<T> plan(a, region.num_threads, few);
  if (few) widen_rows<T>(a, plan.num_blocks * DEPTH_INT8, (float*)rest);
  each_task(region, plan.num_tasks, [&](int64_t task) {
    if (few) {
      few_rows_int8(a, plan, task, (const float*)rest, sums);
    } else {
      unpacked_int8(a, plan, task, sums, rest, scope);
    }
  });
}

template <typename T>
int64_t linear_int8_scratch(const LinearArgs& a) {
  const int64_t tiles = MAX_CHUNK * UNPACKED_BLOCKS * DEPTH_INT8 * PANEL * sizeof(T);
  return INT8_SUM_BYTES + larger(tiles, FEW_ROWS * round_up(a.k, DEPTH_INT8) * (int64_t)sizeof(float));
}
