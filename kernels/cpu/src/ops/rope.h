// Rotate the pairs (x[i], x[i + D / 2]) of q and k, after their norms if the model has them; store k and v in their slots.
#pragma once

template <typename T>
INLINE void rotate_head(const T* x, T* out, const RopeArgs& a, const T* weight, const float* cos, const float* sin) {
  const int64_t half = a.head_dim / 2;
  const float inverse = weight ? inverse_rms(x, a.head_dim, a.eps) : 1.0f;
  for (int64_t i = 0; i < half; i += W) {
    const int64_t left = half - i;
    vec first = load_some(x + i, left), second = load_some(x + half + i, left);
    if (weight) {
      first = normed(x + i, weight + i, left, inverse, a.unit_offset);
      second = normed(x + half + i, weight + half + i, left, inverse, a.unit_offset);
    }
    const vec c = load_some(cos + i, left), s = load_some(sin + i, left);
    store_some(out + i, vsub(vmul(first, c), vmul(second, s)), left);
    store_some(out + half + i, vadd(vmul(second, c), vmul(first, s)), left);
  }
}

// The rotated key and the value of one token and kv head, into their rows of the cells.
template <typename C, typename T>
INLINE void store_token(const RopeArgs& a, int64_t token, int64_t head, const T* k, const float* cos, const float* sin) {
  typedef typename C::Stored Stored;
  const int64_t block = a.slot_blocks[token], offset = a.slot_offsets[token];
  Stored* k_cell = (Stored*)a.k_cache + block * a.k_block_stride + head * a.k_head_stride;
  Stored* v_cell = (Stored*)a.v_cache + block * a.v_block_stride + head * a.v_head_stride;
  const T* v = (const T*)a.v + token * a.v_stride + head * a.head_dim;
  if constexpr (SCALED<C>) {
    T key[MAX_HEAD_DIM];
    rotate_head(k, key, a, (const T*)a.k_norm, cos, sin);
    const int64_t scales = cell_values(a.block_size, a.head_dim);
    char* numbers = k_cell + offset * a.head_dim;
    float* scale = (float*)(k_cell + scales) + offset;
    if constexpr (C::ROTATED) {
      float rotated[MAX_HEAD_DIM];
      rotate_row(key, a.head_dim, rotated);
      store_row<C>(rotated, a.head_dim, numbers, scale);
    } else {
      store_row<C>(key, a.head_dim, numbers, scale);
    }
    store_row<C>(v, a.head_dim, v_cell + offset * a.head_dim, (float*)(v_cell + scales) + offset);
  } else {
    rotate_head(k, k_cell + offset * a.head_dim, a, (const T*)a.k_norm, cos, sin);
    __builtin_memcpy(v_cell + offset * a.head_dim, v, a.head_dim * sizeof(T));
  }
}

template <typename T>
void rope(const RopeArgs& a, const Region& region) {
  const int64_t tokens = (a.num_tokens + region.num_threads - 1) / region.num_threads;
  const int64_t end = smaller(a.num_tokens, tokens * (region.thread + 1));
  for (int64_t token = tokens * region.thread; token < end; ++token) {
    const float *cos = a.cos + token * (a.head_dim / 2), *sin = a.sin + token * (a.head_dim / 2);
    for (int64_t h = 0; h < a.num_heads; ++h)
      rotate_head((const T*)a.q + token * a.q_stride + h * a.head_dim, (T*)a.q_out + token * a.q_out_stride + h * a.head_dim, a,
                  (const T*)a.q_norm, cos, sin);
    for (int64_t h = 0; h < a.num_kv_heads; ++h) {
      const T* k = (const T*)a.k + token * a.k_stride + h * a.head_dim;
      if (!a.v) {
        rotate_head(k, (T*)a.k_out + token * a.k_out_stride + h * a.head_dim, a, (const T*)a.k_norm, cos, sin);
        continue;
      }
      switch (a.cells) {
        case PLAIN: store_token<PlainCells<T>>(a, token, h, k, cos, sin); break;
        case INT8_CELLS: store_token<Int8Cells>(a, token, h, k, cos, sin); break;
        case FP8_CELLS: store_token<Fp8Cells>(a, token, h, k, cos, sin); break;
      }
    }
  }
}
