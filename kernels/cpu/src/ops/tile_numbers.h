// Numbers of a weight with groups as bfloat16, exactly, in the tile order that AMX reads: a pair at a time (fixed.h has the order).
//
// INT4 indexes a table of all numbers there are, 7 bits of FP8 two of them; INT8 becomes float32 and is cut, times 2^24.
#pragma once

// a's bits where `mask` has ones, else b's.
template <int MASK>
INLINE ivec choose16(ivec a, ivec b) { return _mm512_ternarylogic_epi32(_mm512_set1_epi16(MASK), a, b, 0xca); }

// Entry i of a table of `SIZE`: f(i), whose lower 16 bits as float32 are zeros.
template <int SIZE, typename F>
INLINE void fill_table(ivec* table, F f) {
  alignas(64) uint16_t entries[SIZE];
  for (int i = 0; i < SIZE; ++i) {
    const float number = f(i);
    uint32_t bits;
    __builtin_memcpy(&bits, &number, 4);
    entries[i] = bits >> 16;
  }
  for (int i = 0; i < SIZE / 32; ++i) table[i] = iload(entries + i * 32);
}

struct TileNibbles {
  static constexpr int64_t DEPTH = 128, UNIT_BYTES = 4 * 64;
  static constexpr float UNIT = 1.0f;
  ivec table[1];
  TileNibbles() { fill_table<32>(table, [](int i) { return (float)((i ^ 8) % 16 - 8); }); }
  template <int P>
  __attribute__((always_inline)) ivec pair(const char* unit) const {  // the permutation looks at 5 bits, and its table has everything twice
    return _mm512_permutexvar_epi16(right16<P % 4 * 4>(iload(unit + P / 4 * 64)), table[0]);
  }
};

struct TileInt8 {
  static constexpr int64_t DEPTH = DEPTH_INT8, UNIT_BYTES = 8 * 64;
  static constexpr float UNIT = BYTE_UNIT;
  template <int P>
  __attribute__((always_inline)) ivec pair(const char* unit) const {
    const char* words = unit + P / 2 * 64;
    const ivec low = _mm512_castps_si512(load_byte<P % 2>(words)), high = _mm512_castps_si512(load_byte<P % 2 + 2>(words));
    return _mm512_or_si512(_mm512_srli_epi32(low, 16), high);
  }
};

struct TileFp8 {
  static constexpr int64_t DEPTH = DEPTH_INT8, UNIT_BYTES = 8 * 64;
  static constexpr float UNIT = 1.0f;
  ivec table[4];
  TileFp8() {
    fill_table<128>(table, [](int i) {
      const float fraction = i / 8 ? 8 + i % 8 : i % 8;
      return fraction * (float)(1 << (i / 8 ? i / 8 : 1)) * 0x1p-10f;
    });
  }
  template <int P>
  __attribute__((always_inline)) ivec pair(const char* unit) const {
    const ivec words = iload(unit + P / 2 * 64), index = P % 2 ? right16<8>(words) : words;
    const ivec low = _mm512_permutex2var_epi16(table[0], index, table[1]);
    const ivec high = _mm512_permutex2var_epi16(table[2], index, table[3]);
    const ivec magnitude = _mm512_mask_mov_epi16(low, _mm512_test_epi16_mask(index, _mm512_set1_epi16(0x40)), high);
    return choose16<-0x8000>(P % 2 ? words : left16<8>(words), magnitude);
  }
};

// The halves of a pair as float32.
INLINE vec low_floats(ivec pair) { return _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16)); }
INLINE vec high_floats(ivec pair) { return _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32(0xffff0000))); }

template <typename F>
INLINE void with_tile_numbers(int numbers, F&& f) {
  switch (numbers) {
    case INT4: return f(TileNibbles());
    case INT8: return f(TileInt8());
    case FP8: return f(TileFp8());
  }
}

template <typename N, int... P>
INLINE void spread_tile(const N& numbers, const char* unit, char* tile, std::integer_sequence<int, P...>) {
  (istore(tile + P * 64, numbers.template pair<P>(unit)), ...);
}
