// out[row, i] = x[row, order[i]].
#pragma once

template <typename T>
void take_columns(const ColumnsArgs& a, const Region& region) {
  for (int64_t row; (row = next_task(region)) < a.num_rows;) {
    const T* x = (const T*)a.x + row * a.x_stride;
    T* out = (T*)a.out + row * a.num_columns;
    for (int64_t i = 0; i < a.num_columns; ++i) out[i] = x[a.order[i]];
  }
}
