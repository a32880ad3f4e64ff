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

// From a weight with groups (grouped.h): (number * its scale + its offset) * scale, each step in float32, rounded once.
template <typename T, typename N>
void embedding_numbers(const GroupedEmbeddingArgs& g, const Region& region) {
  const EmbeddingArgs& a = g.embedding;
  const int64_t num_blocks = (a.k + N::DEPTH - 1) / N::DEPTH;
  for (int64_t token; (token = next_task(region)) < a.num_tokens;) {
    const int64_t id = a.ids[token], first = id / PANEL * g.num_groups * PANEL + id % PANEL;
    const char* tile = a.weight + id / PANEL * num_blocks * BLOCK_BYTES + id % PANEL / 16 * TILE_BYTES + id % 16 * 4;
    T* out = (T*)a.out + token * a.k;
    for (int64_t block = 0; block < num_blocks; ++block, tile += BLOCK_BYTES) {
      float row[N::DEPTH];
      for (int64_t word = 0; word < 16; ++word) {
        uint32_t bits;
        __builtin_memcpy(&bits, tile + word * 64, 4);
        for (int64_t j = 0; j < N::PER_WORD; ++j) {
          const int64_t i = word * N::PER_WORD + j, place = first + (block * N::DEPTH + i) / g.group * PANEL;
          row[i] = N::at(bits, j) * g.scales[place];
          if (g.offsets) row[i] += g.offsets[place];
        }
      }
      const int64_t left = smaller(N::DEPTH, a.k - block * N::DEPTH);
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
  }
}
