// out[row] = the sum of weights[row, r] * results[places[row, r]] over ranks r in order, product and sum rounded each in
// float32, and once at the end.
#pragma once

template <typename T>
void combine(const CombineArgs& a, const Region& region) {
  for (int64_t row; (row = next_task(region)) < a.num_rows;) {
    const float* weights = a.weights + row * a.top_k;
    const int64_t* places = a.places + row * a.top_k;
    T* out = (T*)a.out + row * a.size;
    for (int64_t i = 0; i < a.size; i += W) {
      const int64_t left = a.size - i;
      vec total = vmul(load_some((const T*)a.results + places[0] * a.size + i, left), vset(weights[0]));
      for (int64_t r = 1; r < a.top_k; ++r)
        total = vadd(total, vmul(load_some((const T*)a.results + places[r] * a.size + i, left), vset(weights[r])));
      store_some(out + i, total, left);
    }
  }
}
