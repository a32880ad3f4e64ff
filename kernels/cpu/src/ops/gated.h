// out = act(gate) * up, for weights that aren't packed together.
#pragma once

template <typename T>
void gated_rows(const GatedArgs& a, const Region& region) {
  for (int64_t row; (row = next_task(region)) < a.num_rows;) {
    const T *gate = (const T*)a.gate + row * a.gate_stride, *up = (const T*)a.up + row * a.up_stride;
    T* out = (T*)a.out + row * a.out_stride;
    for (int64_t i = 0; i < a.size; i += W) {
      const int64_t left = a.size - i;
      store_some(out + i, gated(load_some(gate + i, left), load_some(up + i, left), a.activation), left);
    }
  }
}

// The same over what `linear` makes of a packed gate and up projection without the activation.
template <typename T>
void gated_strips(const GatedStripsArgs& a, const Region& region) {
  for (int64_t row; (row = next_task(region)) < a.num_rows;) {
    const float* both = a.both + row * a.both_stride;
    T* out = (T*)a.out + row * a.out_stride;
    for (int64_t i = 0; i < a.size; i += W) {
      const float* gate = both + i / 16 * 32 + i % 16;
      store_some(out + i, gated(vload(gate), vload(gate + 16), a.activation), a.size - i);
    }
  }
}
