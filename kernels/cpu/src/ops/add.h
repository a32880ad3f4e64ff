// out = x + y, rounded once.
#pragma once

template <typename T>
void add_rows(const AddArgs& a, const Region& region) {
  for (int64_t row; (row = next_task(region)) < a.num_rows;) {
    const T *x = (const T*)a.x + row * a.x_stride, *y = (const T*)a.y + row * a.y_stride;
    T* out = (T*)a.out + row * a.size;
    for (int64_t i = 0; i < a.size; i += W) {
      const int64_t left = a.size - i;
      store_some(out + i, vadd(load_some(x + i, left), load_some(y + i, left)), left);
    }
  }
}
