// The product on AMX tiles for bfloat16 and int8: 2 x 2 tiles of C, one block of k at a time. float32 stays on vectors.
//
// int8's sums are 32-bit integers, exact in any order; C's floats have their bits.
//
//   tiles 0 1   C, rows 0..15          tile 4   A, rows 0..15     tiles 6 7   B, columns 0..15 and 16..31
//   tiles 2 3   C, rows 16..31         tile 5   A, rows 16..31
#pragma once

template <typename T>
constexpr int64_t MAX_ROWS = VECTOR_ROWS;
template <>
constexpr int64_t MAX_ROWS<bf16> = 32;
template <>
constexpr int64_t MAX_ROWS<int8_t> = 32;

struct __attribute__((packed, aligned(64))) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes_per_row[16];
  uint8_t rows[16];
};

#if defined(PAGEWIRE_AMX_EMULATED)
#define TILE_BARRIER()
#include "amx_emulated.h"
#else
// GCC doesn't know that a tile load reads memory: TILE_BARRIER between the stores that made it and the load.
#define TILE_BARRIER() asm volatile("" : : : "memory")
#define TILE_ZERO(c) _tile_zero(c)
#define TILE_LOAD(t, base, stride) _tile_loadd(t, base, stride)
#define TILE_STORE(t, base, stride) _tile_stored(t, base, stride)
#define TILE_MULTIPLY_BF16(c, a, b) _tile_dpbf16ps(c, a, b)
#define TILE_MULTIPLY_INT8(c, a, b) _tile_dpbssd(c, a, b)
INLINE void tile_configure(const TileConfig& config) {
  // GCC 12 takes the configuration for 8 bytes long and may drop the other stores before it (shared/CPU.md).
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}
INLINE void tile_release() { _tile_release(); }
#endif

// C += A B of tiles by number, which must be constants.
#define TILE_MULTIPLY(T, c, a, b)        \
  do {                                   \
    if constexpr (sizeof(T) == 1) {      \
      TILE_MULTIPLY_INT8(c, a, b);       \
    } else {                             \
      TILE_MULTIPLY_BF16(c, a, b);       \
    }                                    \
  } while (0)

// This thread's tile configuration during an op. Other libraries use tiles too, so nothing is kept from op to op.
struct TileScope {
  int64_t key = -1;

  ~TileScope() {
    if (key >= 0) tile_release();
  }

  void configure(int rows0, int rows1) {
    if (key == rows0 * 32 + rows1) return;
    key = rows0 * 32 + rows1;
    const int rows[8] = {rows0, rows0, rows1, rows1, rows0, rows1, 16, 16};
    TileConfig config;
    __builtin_memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int i = 0; i < 8; ++i) {
      config.rows[i] = rows[i] ? rows[i] : 1;
      config.bytes_per_row[i] = 64;
    }
    tile_configure(config);
  }
};

constexpr int64_t PREFETCH_BLOCKS = 2, PREFETCH = PREFETCH_BLOCKS * BLOCK_BYTES;  // ahead; measured best (shared/CPU.md)

// B's blocks as they lie in memory.
struct PackedBlocks {
  const char *first, *next;
  int64_t num_blocks;
  __attribute__((always_inline)) const char* at(int64_t block) const {
    const char* b = first + block * BLOCK_BYTES;
    if (!next) return b;
    const int64_t beyond = block + PREFETCH_BLOCKS - num_blocks;
    const char* ahead = beyond < 0 ? b + PREFETCH : next + beyond * BLOCK_BYTES;
#pragma GCC unroll 32
    for (int i = 0; i < 32; ++i) _mm_prefetch(ahead + i * 64, _MM_HINT_T0);
    return b;
  }
};

// `blocks`: B's, instead of p.b.
template <typename T, typename Blocks>
INLINE void multiply_tiles(int64_t rows, const Product<T>& p, const Blocks& blocks, bool resume, TileScope& scope) {
  const int64_t rows0 = smaller(rows, 16), rows1 = rows - rows0;
  const int64_t a_bytes = p.a_stride * sizeof(T), c_bytes = p.c_stride * 4;
  float* c1 = p.c + 16 * p.c_stride;
  scope.configure(rows0, rows1);
  TILE_BARRIER();
  if (resume) {
    TILE_LOAD(0, p.c, c_bytes);
    TILE_LOAD(1, p.c + 16, c_bytes);
  } else {
    TILE_ZERO(0);
    TILE_ZERO(1);
  }
  const T* a = p.a;
  if (rows1 == 0) {
    for (int64_t block = 0; block < p.num_blocks; ++block, a += DEPTH<T>) {
      const char* b = blocks.at(block);
      TILE_LOAD(4, a, a_bytes);
      TILE_LOAD(6, b, 64);
      TILE_MULTIPLY(T, 0, 4, 6);
      TILE_LOAD(7, b + TILE_BYTES, 64);
      TILE_MULTIPLY(T, 1, 4, 7);
    }
  } else {
    if (resume) {
      TILE_LOAD(2, c1, c_bytes);
      TILE_LOAD(3, c1 + 16, c_bytes);
    } else {
      TILE_ZERO(2);
      TILE_ZERO(3);
    }
    const T* a1 = a + 16 * p.a_stride;
    for (int64_t block = 0; block < p.num_blocks; ++block, a += DEPTH<T>, a1 += DEPTH<T>) {
      const char* b = blocks.at(block);
      TILE_LOAD(4, a, a_bytes);
      TILE_LOAD(6, b, 64);
      TILE_LOAD(7, b + TILE_BYTES, 64);
      TILE_MULTIPLY(T, 0, 4, 6);
      TILE_MULTIPLY(T, 1, 4, 7);
      TILE_LOAD(5, a1, a_bytes);
      TILE_MULTIPLY(T, 2, 5, 6);
      TILE_MULTIPLY(T, 3, 5, 7);
    }
    TILE_STORE(2, c1, c_bytes);
    TILE_STORE(3, c1 + 16, c_bytes);
  }
  TILE_STORE(0, p.c, c_bytes);
  TILE_STORE(1, p.c + 16, c_bytes);
}

INLINE void multiply(int64_t rows, const Product<float>& p, bool resume, TileScope&) { multiply_vectors(rows, p, resume); }
INLINE void multiply(int64_t rows, const Product<bf16>& p, bool resume, TileScope& scope) {
  multiply_tiles(rows, p, PackedBlocks{p.b, p.next, p.num_blocks}, resume, scope);
}
INLINE void multiply(int64_t rows, const Product<int8_t>& p, bool resume, TileScope& scope) {
  multiply_tiles(rows, p, PackedBlocks{p.b, p.next, p.num_blocks}, resume, scope);
}
