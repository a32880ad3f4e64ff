// Rows of a packed weight (pack.h), times a scale: a token's embedding from the lm_head it is tied to.
#pragma once

template <typename T>
void embedding(const EmbeddingArgs& a, const Region& region) {
  constexpr int64_t PER_WORD = 4 / sizeof(T);
  const int64_t num_blocks = (a.k + DEPTH<T> - 1) / DEPTH<T>;
  for (int64_t token; (token = next_task(region)) < a.num_tokens;) {
    const int64_t id = a.ids[token];
    const char* tile = a.weight + id / PANEL * num_blocks * BLOCK_BYTES + id % PANEL / 16 * TILE_BYTES + id % 16 * 4;
    T* out = (T*)a.out + token * a.k;
    for (int64_t block = 0; block < num_blocks; ++block, tile += BLOCK_BYTES) {
      T row[DEPTH<T>];
      for (int64_t word = 0; word < 16; ++word) __builtin_memcpy(row + word * PER_WORD, tile + word * 64, 4);
      const int64_t left = smaller(DEPTH<T>, a.k - block * DEPTH<T>);
      for (int64_t i = 0; i < left; i += W)
        store_some(out + block * DEPTH<T> + i, vmul(load_some(row + i, left - i), vset(a.scale)), left - i);
    }
  }
}

// The same from int8 rows: q * (the row's scale * scale), rounded once.
template <typename T>
void embedding_int8(const EmbeddingArgs& a, const Region& region) {
  const int64_t num_blocks = (a.k + DEPTH_INT8 - 1) / DEPTH_INT8;
  for (int64_t token; (token = next_task(region)) < a.num_tokens;) {
    const int64_t id = a.ids[token];
    const char* tile = a.weight + id / PANEL * num_blocks * BLOCK_BYTES + id % PANEL / 16 * TILE_BYTES + id % 16 * 4;
    const vec scale = vset(a.scales[id] * a.scale);
    T* out = (T*)a.out + token * a.k;
    for (int64_t block = 0; block < num_blocks; ++block, tile += BLOCK_BYTES) {
      float row[DEPTH_INT8];
      for (int64_t word = 0; word < 16; ++word)
        for (int64_t j = 0; j < 4; ++j) row[word * 4 + j] = (signed char)tile[word * 64 + j];
      const int64_t left = smaller(DEPTH_INT8, a.k - block * DEPTH_INT8);
      for (int64_t i = 0; i < left; i += W)
        store_some(out + block * DEPTH_INT8 + i, vmul(vload(row + i), scale), left - i);
    }
  }
}

INLINE float half_at(const void* p, int64_t i) {
  uint16_t bits;
  __builtin_memcpy(&bits, (const char*)p + 2 * i, 2);
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
}

// From a weight with groups (grouped.h): (number * its scale + its offset) * scale, each step in float32, rounded once.
template <typename T, typename N>
void embedding_numbers(const GroupedEmbeddingArgs& g, const Region& region) {
  const EmbeddingArgs& a = g.embedding;
  const int64_t num_blocks = (a.k + N::DEPTH - 1) / N::DEPTH;
  for (int64_t token; (token = next_task(region)) < a.num_tokens;) {
    const int64_t id = a.ids[token], first = id / PANEL * g.num_groups * PANEL + id % PANEL;
    const bool halves = g.scale_form == FLOAT16_SCALES;
    const char* tile = a.weight + id / PANEL * num_blocks * BLOCK_BYTES + id % PANEL / 16 * TILE_BYTES + id % 16 * 4;
    T* out = (T*)a.out + token * a.k;
    for (int64_t block = 0; block < num_blocks; ++block, tile += BLOCK_BYTES) {
      float row[N::DEPTH];
      for (int64_t word = 0; word < 16; ++word) {
        uint32_t bits;
        __builtin_memcpy(&bits, tile + word * 64, 4);
        for (int64_t j = 0; j < N::PER_WORD; ++j) {
          const int64_t i = word * N::PER_WORD + j, place = first + (block * N::DEPTH + i) / g.group * PANEL;
          row[i] = N::at(bits, j) * (halves ? half_at(g.scales, place) : ((const float*)g.scales)[place]);
          if (g.offsets) row[i] += g.offsets[place];
        }
      }
      const int64_t left = smaller(N::DEPTH, a.k - block * N::DEPTH);
      for (int64_t i = 0; i < left; i += W)
        store_some(out + block * N::DEPTH + i, vmul(vload(row + i), vset(a.scale)), left - i);
    }
  }
}

// From one that only goes in fixed point (fixed.h).
template <typename T, typename N>
void embedding_fixed(const GroupedEmbeddingArgs& g, const Region& region) {
  constexpr int64_t UNITS = N::DEPTH / 32, BLOCK = 2 * UNITS * N::UNIT_BYTES;
  const EmbeddingArgs& a = g.embedding;
  const int64_t num_blocks = (a.k + N::DEPTH - 1) / N::DEPTH;
  for (int64_t token; (token = next_task(region)) < a.num_tokens;) {
    const int64_t id = a.ids[token], panel = id / PANEL, lane = id % 16;
    const char* strip = a.weight + panel * num_blocks * BLOCK + id % PANEL / 16 * UNITS * N::UNIT_BYTES + lane * 4;
    const FixedScales scales{g.scale_form, 1, (const char*)g.scales + panel * g.scale_panel_bytes,
                             g.offsets ? g.offsets + panel * g.num_groups * PANEL : nullptr};
    T* out = (T*)a.out + token * a.k;
    float row[N::DEPTH], scale[W], offset[W];
    for (int64_t block = 0; block < num_blocks; ++block) {
      const int64_t left = smaller(N::DEPTH, a.k - block * N::DEPTH);
      for (int64_t i = 0; i < N::DEPTH; ++i) {
        const int64_t group = (block * N::DEPTH + i) / g.group;
        if (i == 0 || i % g.group == 0) {
          const int64_t first = id % PANEL / W * W;
          vstore(scale, scales.scale(group, first));
          if (scales.has_offsets()) vstore(offset, scales.offset(group, first));
        }
        const int32_t number = N::at(strip + block * BLOCK + i / 32 * N::UNIT_BYTES, i % 32) + N::ZERO;
        row[i] = number * scale[id % W];
        if (scales.has_offsets()) row[i] += offset[id % W];
      }
      for (int64_t i = 0; i < left; i += W)
        store_some(out + block * N::DEPTH + i, vmul(vload(row + i), vset(a.scale)), left - i);
    }
  }
}

template <typename T>
void embedding_grouped(const GroupedEmbeddingArgs& g, const Region& region) {
  switch (g.numbers) {
    case INT4: return embedding_numbers<T, Int4>(g, region);
    case INT8: return embedding_numbers<T, Int8>(g, region);
    case FP8: return embedding_numbers<T, Fp8>(g, region);
    default: with_fixed(g.numbers, [&](auto n) { embedding_fixed<T, decltype(n)>(g, region); });
  }
}
