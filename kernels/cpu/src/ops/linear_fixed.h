// out = act(x Wᵀ + bias) + residual with x in fixed point (fixed.h). For each block of x, and in it for each group, in order,
//
//   part += (the integer sum of x and the numbers) * scale + (the integer sum of x) * offset;   out += part * x's 2^e
//
// each term one fused multiply-add. Up to PACKED_ROWS rows take the pairs from the packed words; more from the thread's scratch,
// where a block of a panel is spread out once. The sums are the same integers. A block's scales and offsets are made once for
// all rows. Where there are none (ONE), a sum is a part, and on AVX-512 two blocks are spread out at a time.
#pragma once

#if defined(__AVX512F__)
constexpr int64_t FIXED_AT_ONCE = 12;  // 12 sums and 12 parts in 32 registers
#if ON_ZEN_4
constexpr int64_t PACKED_ROWS = 64;  // unpacking is cheap beside 12 products, reading what is spread out isn't
#else
constexpr int64_t PACKED_ROWS = FIXED_AT_ONCE;
#endif
#else
constexpr int64_t FIXED_AT_ONCE = 4;  // 8 sums, two numbers, four x in 16 registers; parts wait in L1
constexpr int64_t PACKED_ROWS = FIXED_AT_ONCE;
constexpr int IN_PLACE_ROWS = 2;
#endif

// Scales and offsets of a panel's groups in float32: as they are stored, or made of float16 or of the two-level ones of llama.cpp's
// K types, whose products are exact in float32 (kernels/grouped.py). `form` ONE: the row's scale comes at the end.
struct FixedScales {
  int form;
  int64_t group_stride;  // weight groups: more than one flush may share one
  const char* scales;
  const float* offsets;

  __attribute__((always_inline)) vec scale(int64_t g, int64_t n) const {
    switch (form) {
      case FLOAT32_SCALES: return vload((const float*)scales + g / group_stride * PANEL + n);
      case FLOAT16_SCALES: return load_halves(scales + (g / group_stride * PANEL + n) * 2);
      case K_MIN_SCALES: {
        const char* p = scales + g / 8 * K_MIN_BYTES;
        return vmul(load_halves(p + n * 2), load_unsigned(p + 128 + g % 8 * PANEL + n));
      }
      case K_SCALES: {
        const char* p = scales + g / 16 * K_BYTES;
        return vmul(load_halves(p + n * 2), load_signed(p + 64 + g % 16 * PANEL + n));
      }
    }
    return vset(1.0f);
  }
  bool has_offsets() const { return offsets || form == K_MIN_SCALES; }
  __attribute__((always_inline)) vec offset(int64_t g, int64_t n) const {
    if (offsets) return vload(offsets + g / group_stride * PANEL + n);
    const char* p = scales + g / 8 * K_MIN_BYTES;
    return vsub(vzero(), vmul(load_halves(p + 64 + n * 2), load_unsigned(p + 384 + g % 8 * PANEL + n)));
  }
};

// Those of a block's groups, of which there are 8 at most: [group][32].
struct BlockScales {
  float scales[8 * PANEL], offsets[8 * PANEL];
  bool has_offsets;

  __attribute__((always_inline)) void read(const FixedScales& s, int64_t first_group, int64_t num_groups) {
    has_offsets = s.has_offsets();
    for (int64_t n = 0; n < PANEL; n += W)
      for (int64_t g = 0; g < num_groups; ++g) {
        vstore(scales + g * PANEL + n, s.scale(first_group + g, n));
        if (has_offsets) vstore(offsets + g * PANEL + n, s.offset(first_group + g, n));
      }
  }
};

// Rows from `row` on of the fixed x, in one block: x [ROWS][DEPTH].
struct FixedRows {
  const int16_t* x;
  const float* scales;
  const int32_t* starts;  // [group of the block][num_rows]
  const float* sums;
  int64_t num_rows;

  FixedRows(const GroupedArgs& g, int64_t depth, int64_t block, int64_t row)
      : x(g.fixed + (block * g.linear.m + row) * depth),
        scales(g.fixed_scales + block * g.linear.m + row),
        starts(g.fixed_starts + block * (depth / g.flush) * g.linear.m + row),
        sums(g.fixed_sums + block * (depth / g.flush) * g.linear.m + row),
        num_rows(g.linear.m) {}
};

#if defined(__AVX512F__)
template <typename N, int ROWS>
constexpr bool IN_PLACE = false;
template <int ROWS>
constexpr int CHAINS = ROWS < 4 ? 4 / ROWS : 1;  // of a row's sums: each addition waits 4 or 5 cycles for the last
#else
template <int ROWS>
constexpr int CHAINS = 1;
template <typename N, int ROWS>
constexpr bool IN_PLACE = N::NIBBLES && ROWS <= IN_PLACE_ROWS;  // odd pairs times 16, in sums of their own
#endif

// Sums of pairs for some rows; `odd`: those that are 16 times as much.
template <typename N, int ROWS>
struct PairSums {
  // Numbers are below 64, x's at most 2^15 in size, and half of a block's numbers are in odd pairs.
  static_assert(!IN_PLACE<N, ROWS> || 63LL * 16 * (1 << 15) * (N::DEPTH / 2) <= INT32_MAX);
  ivec even[ROWS][VECTORS], odd[IN_PLACE<N, ROWS> ? ROWS : 1][VECTORS];
  ivec more[CHAINS<ROWS>][ROWS][VECTORS];  // the first one's is `even`

  __attribute__((always_inline)) void start(const int32_t* starts) {
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; ++v) {
        even[i][v] = iset(starts[i]);
        if constexpr (IN_PLACE<N, ROWS>) odd[i][v] = iset(0);
#pragma GCC unroll 4
        for (int chain = 1; chain < CHAINS<ROWS>; ++chain) more[chain][i][v] = iset(0);
      }
  }

  template <int P>
  __attribute__((always_inline)) void add(const int16_t* x, const char* unit) {
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v) {
      if constexpr (IN_PLACE<N, ROWS>) {
        const ivec q = N::template pair_in_place<P>(unit, v);
        for (int i = 0; i < ROWS; ++i) {
          ivec& sum = P % 2 ? odd[i][v] : even[i][v];
          add_products(sum, q, x + i * N::DEPTH + P * 2);
        }
      } else {
        const ivec q = N::template pair<P>(unit, v);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; ++i) {
          ivec& sum = P % CHAINS<ROWS> ? more[P % CHAINS<ROWS>][i][v] : even[i][v];
          add_products(sum, q, x + i * N::DEPTH + P * 2);
        }
      }
    }
  }
  template <int FROM, int... P>
  __attribute__((always_inline)) void add_half(const int16_t* x, const char* unit, std::integer_sequence<int, P...>) {
    (add<FROM + P>(x, unit), ...);
  }

  __attribute__((always_inline)) vec at(int i, int v) const {
    if constexpr (IN_PLACE<N, ROWS>) return to_floats(iadd(even[i][v], signed_right32<4>(odd[i][v])));
    ivec sum = even[i][v];
#pragma GCC unroll 4
    for (int chain = 1; chain < CHAINS<ROWS>; ++chain) sum = iadd(sum, more[chain][i][v]);
    return to_floats(sum);
  }
};

// What Zen 4 reads ahead by itself ends with a page. With prefetches 8 and 12 rows are 1.2 times as fast, 32 of a spread block
// 1.15 times; one row, which waits for memory anyway, is slower.
#if ON_ZEN_4
constexpr int LEAST_PREFETCHED = 4;
INLINE void prefetch_packed(const char* p) { _mm_prefetch(p + (2 << 10), _MM_HINT_T0); }
INLINE void prefetch_spread(const char* p) { _mm_prefetch(p + (4 << 10), _MM_HINT_T1); }
#else
constexpr int LEAST_PREFETCHED = 1;
INLINE void prefetch_packed(const char* p) { prefetch_ahead(p); }
INLINE void prefetch_spread(const char* p) { prefetch_ahead(p); }
#endif

template <typename N, int ROWS>
INLINE void prefetch_unit(const char* unit) {
  if constexpr (N::PACKED && ROWS >= LEAST_PREFETCHED)
    for (int64_t i = 0; i < N::UNIT_BYTES; i += 64) prefetch_packed(unit + i);
}

// Both strips of one block: total [ROWS][32] += . `b`: its packed words. FLUSH is known here, so that sums stay in registers.
template <typename N, int ROWS, int FLUSH>
void multiply_fixed(const FixedRows& r, const BlockScales& s, const char* b, float* total) {
  typedef std::make_integer_sequence<int, 8> Half;
  for (int strip = 0; strip < 2; ++strip) {
    vec part[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; ++v) part[i][v] = vzero();
    const int16_t* x = r.x;
    const int32_t* starts = r.starts;
    const float* sums = r.sums;
    int64_t g = strip * 16;
    for (int64_t k = 0; k < N::DEPTH; k += FLUSH, g += PANEL, starts += r.num_rows, sums += r.num_rows) {
      PairSums<N, ROWS> pairs;
      pairs.start(starts);
      if constexpr (FLUSH == 16) {
        if (k % 32 == 0) {
          prefetch_unit<N, ROWS>(b);
          pairs.template add_half<0>(x, b, Half());
        } else {
          pairs.template add_half<8>(x, b, Half());
          x += 32, b += N::UNIT_BYTES;
        }
      } else {
        for (int64_t unit = 0; unit < FLUSH; unit += 32, x += 32, b += N::UNIT_BYTES) {
          prefetch_unit<N, ROWS>(b);
          pairs.template add_half<0>(x, b, Half());
          pairs.template add_half<8>(x, b, Half());
        }
      }
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; ++v) {
        const vec scale = vload(s.scales + g + v * W);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; ++i) part[i][v] = vfma(pairs.at(i, v), scale, part[i][v]);
        if (s.has_offsets) {
          const vec offset = vload(s.offsets + g + v * W);
#pragma GCC unroll 16
          for (int i = 0; i < ROWS; ++i) part[i][v] = vfma(vset(sums[i]), offset, part[i][v]);
        }
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; ++v) {
        float* to = total + i * PANEL + strip * 16 + v * W;
        vstore(to, vfma(part[i][v], vset(r.scales[i]), vload(to)));
      }
  }
}

#if defined(__AVX512F__)
constexpr int64_t SPREAD_BLOCKS = 2;

// The same over some blocks of bytes without scales, spread out: the totals stay in registers.
template <int ROWS>
void multiply_bytes(const FixedRows& r, const char* b, int64_t num_blocks, float* total) {
  typedef SpreadOf<FixedBytes> N;
  typedef std::make_integer_sequence<int, 8> Half;
  constexpr int64_t UNITS = N::DEPTH / 32;
  for (int strip = 0; strip < 2; ++strip) {
    vec sums[ROWS];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) sums[i] = vload(total + i * PANEL + strip * 16);
    const int16_t* x = r.x;
    const float* scales = r.scales;
    for (int64_t block = 0; block < num_blocks; ++block, x += r.num_rows * N::DEPTH, scales += r.num_rows) {
      const char* unit = b + (2 * block + strip) * UNITS * N::UNIT_BYTES;
      PairSums<N, ROWS> pairs;
      pairs.start(r.starts + block * r.num_rows);
#pragma GCC unroll 2
      for (int64_t i = 0; i < UNITS; ++i, unit += N::UNIT_BYTES) {
        pairs.template add_half<0>(x + i * 32, unit, Half());
        pairs.template add_half<8>(x + i * 32, unit, Half());
      }
#pragma GCC unroll 16
      for (int i = 0; i < ROWS; ++i) sums[i] = vfma(pairs.at(i, 0), vset(scales[i]), sums[i]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) vstore(total + i * PANEL + strip * 16, sums[i]);
  }
}

INLINE void multiply_rows_of_bytes(int64_t rows, const FixedRows& r, const char* b, int64_t num_blocks, float* total) {
  switch (rows) {
    case 1: return multiply_bytes<1>(r, b, num_blocks, total);
    case 2: return multiply_bytes<2>(r, b, num_blocks, total);
    case 4: return multiply_bytes<4>(r, b, num_blocks, total);
    case 8: return multiply_bytes<8>(r, b, num_blocks, total);
    case 12: return multiply_bytes<12>(r, b, num_blocks, total);
  }
}
#endif

// So many rows at once: sizes of which few functions are made.
INLINE int64_t fixed_rows_at_once(int64_t left) {
#if defined(__AVX512F__)
  return left >= FIXED_AT_ONCE ? FIXED_AT_ONCE : left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
#else
  const int64_t passes = (left + FIXED_AT_ONCE - 1) / FIXED_AT_ONCE;
  return (left + passes - 1) / passes;
#endif
}

template <typename N, int FLUSH>
INLINE void multiply_fixed_rows(int64_t rows, const FixedRows& r, const BlockScales& s, const char* b, float* total) {
  switch (rows) {
    case 1: return multiply_fixed<N, 1, FLUSH>(r, s, b, total);
    case 2: return multiply_fixed<N, 2, FLUSH>(r, s, b, total);
    case 4: return multiply_fixed<N, 4, FLUSH>(r, s, b, total);
#if defined(__AVX512F__)
    case 8: return multiply_fixed<N, 8, FLUSH>(r, s, b, total);
    case 12: return multiply_fixed<N, 12, FLUSH>(r, s, b, total);
#else
    case 3: return multiply_fixed<N, 3, FLUSH>(r, s, b, total);
#endif
  }
}

template <typename N>
INLINE void multiply_fixed_rows(int64_t rows, const FixedRows& r, const BlockScales& s, const char* b, int64_t flush,
                                float* total) {
  if constexpr (N::GROUPS_OF_16)
    if (flush == 16) return multiply_fixed_rows<N, 16>(rows, r, s, b, total);
  if (flush == 32) return multiply_fixed_rows<N, 32>(rows, r, s, b, total);
  if (N::DEPTH == 64 || flush == 64) return multiply_fixed_rows<N, 64>(rows, r, s, b, total);
  if constexpr (N::DEPTH == 128) multiply_fixed_rows<N, 128>(rows, r, s, b, total);
}

template <typename N, int... P>
INLINE void spread_unit(const char* from, char* to, std::integer_sequence<int, P...>) {
  for (int64_t i = 0; i < N::UNIT_BYTES; i += 64) prefetch_spread(from + i);
  for (int v = 0; v < VECTORS; ++v) (istore(to + P * 64 + v * W * 4, N::template pair<P>(from, v)), ...);
}

template <typename N>
INLINE void spread_units(const char* from, int64_t num_units, char* to) {
  for (int64_t unit = 0; unit < num_units; ++unit)
    spread_unit<N>(from + unit * N::UNIT_BYTES, to + unit * 1024, std::make_integer_sequence<int, 16>());
}

// Totals into results: a row's own scale if there is one.
template <typename T>
INLINE void finish_fixed(const LinearArgs& a, int64_t row, int64_t rows, int64_t panel, float* c) {
  if (a.scales)
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t n = 0; n < PANEL; n += W)
        vstore(c + i * PANEL + n, vmul(vload(c + i * PANEL + n), vload(a.scales + panel * PANEL + n)));
  finish<T>(a, row, rows, panel, c);
}

template <typename T, typename N>
void fixed_task(const GroupedArgs& g, const Int8Plan<T>& plan, int64_t task, bool few, float* sums, char* tiles) {
  constexpr int64_t UNITS = N::DEPTH / 32, BLOCK = 2 * UNITS * N::UNIT_BYTES;
  const LinearArgs& a = g.linear;
  const Int8Part part(a, plan, task);
  const int64_t count = part.last_row - part.first_row;
  for (int64_t panel = part.first_panel; panel < part.last_panel; ++panel) {
    const FixedScales scales{g.scale_form, larger(1, g.group / g.flush),
                             (const char*)g.scales + panel * g.scale_panel_bytes,
                             g.offsets ? g.offsets + panel * g.num_groups * PANEL : nullptr};
    for (int64_t i = 0; i < count * PANEL; i += W) vstore(sums + i, vzero());
    const char* b = a.weight + panel * plan.num_blocks * BLOCK;
    for (int64_t block = 0; block < plan.num_blocks; ++block, b += BLOCK) {
      BlockScales block_scales;
      block_scales.read(scales, block * (N::DEPTH / g.flush), N::DEPTH / g.flush);
      if (!few) spread_units<N>(b, 2 * UNITS, tiles);
      for (int64_t row = 0; row < count;) {
        const int64_t rows = fixed_rows_at_once(count - row);
        const FixedRows r(g, N::DEPTH, block, part.first_row + row);
        if (few) {
          multiply_fixed_rows<N>(rows, r, block_scales, b, g.flush, sums + row * PANEL);
        } else {
          multiply_fixed_rows<SpreadOf<N>>(rows, r, block_scales, tiles, g.flush, sums + row * PANEL);
        }
        row += rows;
      }
    }
    finish_fixed<T>(a, part.first_row, count, panel, sums);
  }
}

#if defined(__AVX512F__)
// ... for more rows of bytes without scales.
template <typename T>
void bytes_task(const GroupedArgs& g, const Int8Plan<T>& plan, int64_t task, float* sums, char* tiles) {
  typedef FixedBytes N;
  constexpr int64_t UNITS = N::DEPTH / 32, BLOCK = 2 * UNITS * N::UNIT_BYTES;
  const LinearArgs& a = g.linear;
  const Int8Part part(a, plan, task);
  const int64_t count = part.last_row - part.first_row;
  for (int64_t panel = part.first_panel; panel < part.last_panel; ++panel) {
    for (int64_t i = 0; i < count * PANEL; i += W) vstore(sums + i, vzero());
    for (int64_t block = 0; block < plan.num_blocks; block += SPREAD_BLOCKS) {
      const int64_t blocks = smaller(SPREAD_BLOCKS, plan.num_blocks - block);
      spread_units<N>(a.weight + (panel * plan.num_blocks + block) * BLOCK, blocks * 2 * UNITS, tiles);
      for (int64_t row = 0; row < count;) {
        const int64_t rows = fixed_rows_at_once(count - row);
        multiply_rows_of_bytes(rows, FixedRows(g, N::DEPTH, block, part.first_row + row), tiles, blocks, sums + row * PANEL);
        row += rows;
      }
    }
    finish_fixed<T>(a, part.first_row, count, panel, sums);
  }
}
#endif

template <typename T>
void linear_fixed(const GroupedArgs& g, const Region& region) {
  with_fixed(g.numbers, [&](auto n) {
    typedef decltype(n) N;
    const bool few = g.linear.m <= PACKED_ROWS;
    const Int8Plan<T> plan(g.linear, region.num_threads, few, N::DEPTH);
    float* sums = (float*)region.scratch;
    char* rest = region.scratch + ROW_BLOCK * PANEL * sizeof(float);
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<N, FixedBytes>)
      if (g.scale_form == ONE && !few)
        return each_task(region, plan.num_tasks, [&](int64_t task) { bytes_task(g, plan, task, sums, rest); });
#endif
    each_task(region, plan.num_tasks, [&](int64_t task) { fixed_task<T, N>(g, plan, task, few, sums, rest); });
  });
}

template <typename T>
int64_t linear_fixed_scratch(const GroupedArgs&) { return ROW_BLOCK * PANEL * (int64_t)sizeof(float) + 8 * 1024; }
