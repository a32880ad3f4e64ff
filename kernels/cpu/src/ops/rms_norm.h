// out = x / sqrt(mean(x²) + eps) * w, or * (1 + w); x += residual first, rounded to x's type, when there is one.
#pragma once

template <typename T>
INLINE vec load_some(const T* p, int64_t left) { return left >= W ? vload(p) : vload(p, (int)left); }
template <typename T>
INLINE void store_some(T* p, vec v, int64_t left) {
  if (left >= W) {
    vstore(p, v);
  } else {
    vstore(p, v, (int)left);
  }
}

// 1 / sqrt(mean(x²) + eps); four sums side by side, vectors dealt to them in turn.
template <typename T>
INLINE float inverse_rms(const T* x, int64_t size, float eps) {
  vec sums[4] = {vzero(), vzero(), vzero(), vzero()};
  for (int64_t i = 0; i < size; i += 4 * W)
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j)
      if (i + j * W < size) {
        const vec v = load_some(x + i + j * W, size - i - j * W);
        sums[j] = vfma(v, v, sums[j]);
      }
  const float mean = vsum(vadd(vadd(sums[0], sums[1]), vadd(sums[2], sums[3]))) / (float)size;
  return 1.0f / __builtin_sqrtf(mean + eps);
}

template <typename T>
INLINE vec normed(const T* x, const T* weight, int64_t left, float inverse, bool unit_offset) {
  vec w = load_some(weight, left);
  if (unit_offset) w = vadd(w, vset(1.0f));
  return vmul(vmul(load_some(x, left), vset(inverse)), w);
}

template <typename T>
void rms_norm(const NormArgs& a, const Region& region) {
  const int64_t rows = (a.num_rows + region.num_threads - 1) / region.num_threads;
  const int64_t end = smaller(a.num_rows, rows * (region.thread + 1));
  for (int64_t row = rows * region.thread; row < end; ++row) {
    const T* x = (const T*)a.x + row * a.x_stride;
    if (a.residual) {
      T* total = (T*)a.total + row * a.size;
      const T* residual = (const T*)a.residual + row * a.size;
      for (int64_t i = 0; i < a.size; i += W)
        store_some(total + i, vadd(load_some(x + i, a.size - i), load_some(residual + i, a.size - i)), a.size - i);
      x = total;
    }
    const float inverse = inverse_rms(x, a.size, a.eps);
    T* out = (T*)a.out + row * a.out_stride;
    for (int64_t i = 0; i < a.size; i += W)
      store_some(out + i, normed(x + i, (const T*)a.weight + i, a.size - i, inverse, a.unit_offset), a.size - i);
  }
}
