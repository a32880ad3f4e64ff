// Where a sequence's keys and values lie, by groups of tokens, and their prefetches. Included by attention.h.
#pragma once

// On AVX2 values are packed after the weights, so that memory is read in both halves of the work, and not faster than Zen 3's 24
// buffers of misses take: more prefetches are dropped.
constexpr bool VALUES_LATER = W == 8;
constexpr int64_t AHEAD = VALUES_LATER ? 4 : 2;  // groups, of keys or values or of both, from prefetch to use
constexpr int64_t RING = VALUES_LATER ? 16 : 4;  // groups whose places are kept: of a whole split and AHEAD
constexpr int64_t FEW_QUERIES = 24;              // rows for which values are packed group by group

alignas(64) const char ZEROS[4096] = {};  // a token that isn't there; head_dim is at most 1024

// Where the keys and values of GROUP tokens lie, and their scales if they have some.
template <typename C>
struct TokenGroup {
  const typename C::Stored *keys[GROUP], *values[GROUP];
  const float *key_scales[GROUP], *value_scales[GROUP];
};

// ... of those from `position` on.
template <typename C>
INLINE void find_tokens(const AttentionArgs& a, const AttentionTile& tile, int64_t position, TokenGroup<C>& to) {
  typedef typename C::Stored Stored;
  const int64_t* table = a.block_tables + tile.sequence * a.table_stride;
  const int64_t scales = cell_values(a.block_size, a.head_dim);
  int64_t offset = position % a.block_size;
  for (int64_t i = 0; i < GROUP; offset = 0) {
    const int64_t there = smaller(GROUP - i, tile.kv_end - position - i), count = smaller(there, a.block_size - offset);
    if (there <= 0) {
      for (; i < GROUP; ++i) {
        to.keys[i] = to.values[i] = (const Stored*)ZEROS;
        if constexpr (SCALED<C>) to.key_scales[i] = to.value_scales[i] = (const float*)ZEROS;
      }
      return;
    }
    const int64_t block = table[(position + i) / a.block_size];
    const Stored* k = (const Stored*)a.k_cache + block * a.k_block_stride + tile.head * a.k_head_stride;
    const Stored* v = (const Stored*)a.v_cache + block * a.v_block_stride + tile.head * a.v_head_stride;
    for (const int64_t end = i + count; i < end; ++i, ++offset) {
      to.keys[i] = k + offset * a.head_dim;
      to.values[i] = v + offset * a.head_dim;
      if constexpr (SCALED<C>) {
        to.key_scales[i] = (const float*)(k + scales) + offset;
        to.value_scales[i] = (const float*)(v + scales) + offset;
      }
    }
  }
}

// Into L2. Into L1 they'd wait for its few buffers: 1.7 times slower in decode steps on Zen 4.
template <typename T>
INLINE void prefetch_tokens(const T* const* tokens, int64_t head_dim, int64_t count = GROUP) {
  for (int64_t i = 0; i < count; ++i)
    for (int64_t d = 0; d < head_dim; d += DEPTH<T>) _mm_prefetch((const char*)(tokens[i] + d), _MM_HINT_T1);
}
INLINE void prefetch_scales(const float* const* scales) {
  for (int64_t i = 0; i < GROUP; i += 8) _mm_prefetch((const char*)scales[i], _MM_HINT_T1);
}

// Half of what the step AHEAD of step `g` reads: a split's steps are its groups' keys, then their values.
template <typename C>
INLINE void prefetch_half(const AttentionArgs& a, const TokenGroup<C>* ring, int64_t g, bool values, int64_t begin, int64_t end,
                          int half) {
  const int64_t there = g + AHEAD < end ? g + AHEAD : values ? g + AHEAD : g + AHEAD - end + begin;
  const TokenGroup<C>& tokens = ring[there % RING];
  const bool of_values = values == (g + AHEAD < end);
  prefetch_tokens((of_values ? tokens.values : tokens.keys) + half * (GROUP / 2), a.head_dim, GROUP / 2);
}
