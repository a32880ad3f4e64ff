// linear_tiles.h for one row: on vectors, by the tiles' own additions, so to their bits. A tile's product of 32 k is
//
//   C += E + O,   E and O from 0: chains of fused multiply-adds of the first, and of the second, k of each pair
//
// as Intel's manual has TDPBF16PS. Numbers go from registers into it: nothing is stored, spread out and read again.
#pragma once

// One block of 32 k, both strips: c [2] += . x: 16 pairs, as float32 [first 16][second 16].
template <typename N, int... P>
INLINE void multiply_block(const N& numbers, const char* unit0, const char* unit1, const float* x, vec* c,
                           std::integer_sequence<int, P...>) {
  vec even[2] = {vzero(), vzero()}, odd[2] = {vzero(), vzero()};
  (
      [&] {
        const vec first = vset(x[P]), second = vset(x[16 + P]);
        const ivec pair0 = numbers.template pair<P>(unit0), pair1 = numbers.template pair<P>(unit1);
        even[0] = vfma(first, low_floats(pair0), even[0]);
        even[1] = vfma(first, low_floats(pair1), even[1]);
        odd[0] = vfma(second, high_floats(pair0), odd[0]);
        odd[1] = vfma(second, high_floats(pair1), odd[1]);
      }(),
      ...);
  for (int strip = 0; strip < 2; ++strip) c[strip] = vadd(c[strip], vadd(even[strip], odd[strip]));
}

// ... half of one: a flush of 16.
template <typename N>
INLINE void multiply_unit(const N& numbers, const char* unit0, const char* unit1, const float* x, int64_t flush, int64_t half,
                          vec* c) {
  if (flush >= 32) return multiply_block(numbers, unit0, unit1, x, c, std::make_integer_sequence<int, 16>());
  if (half == 0) return multiply_block(numbers, unit0, unit1, x, c, std::make_integer_sequence<int, 8>());
  multiply_block(numbers, unit0, unit1, x, c, std::integer_sequence<int, 8, 9, 10, 11, 12, 13, 14, 15>());
}

// The pairs of x in the tiles' order, as float32.
inline void widen_pairs(const bf16* x, int64_t depth, float* to) {
  for (int64_t k = 0; k < depth; k += 32) {
    vstore(to + k, load_even(x + k));
    vstore(to + k + 16, load_odd(x + k));
  }
}

template <typename N, bool OFFSETS>
void multiply_row(const GroupedArgs& g, const N& numbers, const FixedScales& s, const char* b, int64_t depth, const float* x,
                  float* total) {
  constexpr int64_t UNITS = N::DEPTH / 32, STRIP = UNITS * N::UNIT_BYTES;
  const vec unit = vset(N::UNIT);
  vec sums[2] = {vzero(), vzero()};
  for (int64_t k = 0, f = 0; k < depth; ++f) {
    vec c[2] = {vzero(), vzero()};
    for (const int64_t end = smaller(k + g.flush, depth); k < end; k += smaller(g.flush, 32)) {
      const char* at = b + k / N::DEPTH * 2 * STRIP + k % N::DEPTH / 32 * N::UNIT_BYTES;
      multiply_unit(numbers, at, at + STRIP, x + k / 32 * 32, g.flush, k % 32, c);
    }
    for (int strip = 0; strip < 2; ++strip) {
      sums[strip] = vfma(c[strip], vmul(s.scale(f, strip * 16), unit), sums[strip]);
      if (OFFSETS) sums[strip] = vfma(vset(g.x_sums[f]), s.offset(f, strip * 16), sums[strip]);
    }
  }
  vstore(total, sums[0]);
  vstore(total + 16, sums[1]);
}

template <typename N>
void one_row_task(const GroupedArgs& g, const N& numbers, const Int8Plan<bf16>& plan, int64_t task, const float* x, float* total) {
  const int64_t depth = plan.num_blocks * N::DEPTH, panel_bytes = depth / 32 * 2 * N::UNIT_BYTES;
  const Int8Part part(g.linear, plan, task);
  for (int64_t panel = part.first_panel; panel < part.last_panel; ++panel) {
    const FixedScales scales = panel_scales(g, panel, depth);
    if (scales.has_offsets()) {
      multiply_row<N, true>(g, numbers, scales, g.linear.weight + panel * panel_bytes, depth, x, total);
    } else {
      multiply_row<N, false>(g, numbers, scales, g.linear.weight + panel * panel_bytes, depth, x, total);
    }
    finish<bf16>(g.linear, 0, 1, panel, total);
  }
}
