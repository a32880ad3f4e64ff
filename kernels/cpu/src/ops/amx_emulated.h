// AMX's tile instructions in plain code, as Intel's manual defines them, for testing their use on other machines.
#pragma once

struct EmulatedTiles {
  TileConfig config;
  bool configured;
  char data[8][16][64];
};
static thread_local EmulatedTiles tiles;

static void fault_unless(bool good) {
  if (!good) __builtin_trap();
}

static void tile_configure(const TileConfig& config) {
  fault_unless(config.palette == 1 && config.start_row == 0);
  for (int t = 0; t < 8; ++t)
    fault_unless(config.rows[t] >= 1 && config.rows[t] <= 16 && config.bytes_per_row[t] >= 1 && config.bytes_per_row[t] <= 64);
  tiles.config = config;
  tiles.configured = true;
  __builtin_memset(tiles.data, 0, sizeof tiles.data);
}
static void tile_release() { tiles.configured = false; }

static void TILE_ZERO(int t) {
  fault_unless(tiles.configured);
  __builtin_memset(tiles.data[t], 0, sizeof tiles.data[t]);
}
static void TILE_LOAD(int t, const void* base, int64_t stride) {
  fault_unless(tiles.configured);
  __builtin_memset(tiles.data[t], 0, sizeof tiles.data[t]);
  for (int r = 0; r < tiles.config.rows[t]; ++r)
    __builtin_memcpy(tiles.data[t][r], (const char*)base + r * stride, tiles.config.bytes_per_row[t]);
}
static void TILE_STORE(int t, void* base, int64_t stride) {
  fault_unless(tiles.configured);
  for (int r = 0; r < tiles.config.rows[t]; ++r)
    __builtin_memcpy((char*)base + r * stride, tiles.data[t][r], tiles.config.bytes_per_row[t]);
}
static void fault_unless_multipliable(int c, int a, int b) {
  fault_unless(tiles.configured && tiles.config.rows[c] == tiles.config.rows[a]);
  fault_unless(tiles.config.bytes_per_row[a] == 4 * tiles.config.rows[b]);
}
static void TILE_MULTIPLY_BF16(int c, int a, int b) {
  fault_unless_multipliable(c, a, b);
  for (int m = 0; m < tiles.config.rows[c]; ++m) {
    vec even = vzero(), odd = vzero();
    for (int k = 0; k < tiles.config.rows[b]; ++k) {
      const bf16* x = (const bf16*)tiles.data[a][m] + 2 * k;
      even = vfma(vset(to_float(x[0])), load_even(tiles.data[b][k]), even);
      odd = vfma(vset(to_float(x[1])), load_odd(tiles.data[b][k]), odd);
    }
    float* sum = (float*)tiles.data[c][m];
    vstore(sum, vadd(vload(sum), vadd(even, odd)));
  }
}
static void TILE_MULTIPLY_INT8(int c, int a, int b) {
  fault_unless_multipliable(c, a, b);
  for (int m = 0; m < tiles.config.rows[c]; ++m) {
    int32_t* sum = (int32_t*)tiles.data[c][m];
    for (int k = 0; k < tiles.config.rows[b]; ++k) {
      const int8_t* x = (const int8_t*)tiles.data[a][m] + 4 * k;
      const int8_t* y = (const int8_t*)tiles.data[b][k];
      for (int n = 0; n < 16; ++n)
        for (int j = 0; j < 4; ++j) sum[n] += x[j] * y[4 * n + j];
    }
  }
}
