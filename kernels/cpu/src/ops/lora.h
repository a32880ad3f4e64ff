// y[row] += (x[row] Aᵀ) Bᵀ with the low-rank A and B of the row's adapter; rows without one are not listed.
//
// A task is a block of at most LORA_ROWS rows of one adapter. An element of x Aᵀ is one chain of fused multiply-adds for
// each lane over ascending k and one sum of the lanes; one of the result a chain over the ranks, added once: a row's
// result depends neither on its neighbours nor on other adapters.
#pragma once

constexpr int64_t LORA_ROWS = 16;
constexpr int LORA_GROUP = 8;  // ranks that share a pass over x

// h[i] = x · a[i], for N rows of A.
template <typename T, int N>
INLINE void shrink(const T* x, const T* a, int64_t k, float* h) {
  vec sums[N];
  for (int i = 0; i < N; ++i) sums[i] = vzero();
  for (int64_t j = 0; j < k; j += W) {
    const int64_t left = k - j;
    const vec value = load_some(x + j, left);
    for (int i = 0; i < N; ++i) sums[i] = vfma(value, load_some(a + i * k + j, left), sums[i]);
  }
  for (int i = 0; i < N; ++i) h[i] = vsum(sums[i]);
}

// y[columns] += h · b over `rank` rows of b; `strip`: 16 columns of y, then 16 of the other part.
template <typename T, typename Y>
INLINE void expand(Y* y, const float* h, const T* b, int64_t rank, int64_t b_stride, int64_t width, bool strips) {
  for (int64_t j = 0; j < width; j += W) {
    const int64_t left = width - j;
    vec sum = vzero();
    for (int64_t i = 0; i < rank; ++i) sum = vfma(vset(h[i]), load_some(b + i * b_stride + j, left), sum);
    Y* out = y + (strips ? j / 16 * 32 + j % 16 : j);
    store_some(out, vadd(load_some(out, left), sum), left);
  }
}

template <typename T, typename Y>
INLINE void lora_block(const LoraArgs& a, const int64_t* block, float* h) {
  const T* matrix_a = (const T*)a.a + block[0] * a.num_parts * a.max_rank * a.k;
  const T* matrix_b = (const T*)a.b + block[0] * a.max_rank * a.b_width;
  int64_t b_offset = 0, y_offset = 0;
  for (int64_t part = 0; part < a.num_parts; ++part) {
    const int64_t rank = a.ranks[block[0] * a.num_parts + part], width = a.widths[part];
    for (int64_t at = block[1]; rank && at < block[2]; ++at) {
      const T* x = (const T*)a.x + a.rows[at] * a.x_stride;
      const T* from = matrix_a + part * a.max_rank * a.k;
      int64_t i = 0;
      for (; i + LORA_GROUP <= rank; i += LORA_GROUP) shrink<T, LORA_GROUP>(x, from + i * a.k, a.k, h + i);
      for (; i < rank; ++i) shrink<T, 1>(x, from + i * a.k, a.k, h + i);
      expand((Y*)a.y + a.rows[at] * a.y_stride + y_offset, h, matrix_b + b_offset, rank, a.b_width, width, a.strips);
    }
    b_offset += width;
    y_offset += a.strips ? 16 : width;
  }
}

template <typename T>
void lora(const LoraArgs& a, const Region& region) {
  for (int64_t task; (task = next_task(region)) < a.num_blocks;) {
    const int64_t* block = a.blocks + 3 * task;
    if (a.float32_y) {
      lora_block<T, float>(a, block, (float*)region.scratch);
    } else {
      lora_block<T, T>(a, block, (float*)region.scratch);
    }
  }
}

template <typename T>
int64_t lora_scratch(const LoraArgs& a) { return a.max_rank * sizeof(float); }
