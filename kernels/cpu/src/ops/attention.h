// Paged attention for decode steps and prefill chunks alike: a tile of query rows against splits of the keys and values.
//
//   rows     the tokens of a tile times the query heads that share one kv head
//   splits   SPLIT tokens of the sequence, from position 0, for every row of every path
//
// Each split gives a row its own maximum, sum of weights and weighted values; they are merged in ascending order. A row's
// result is therefore the same alone in a decode step, in a chunk, and whether its splits are computed by one thread or several:
// what the other rows of a tile see beyond (or before) its own tokens has weight exactly 0.
#pragma once

constexpr int64_t SPLIT = 256;
constexpr int64_t TILE_TARGET = 64;  // query rows: enough to make repacking the keys and values cheap
constexpr float NOTHING = -1e30f;    // a maximum that any score replaces; finite, so that no difference of two is NaN

template <typename T>
struct AttentionShape {
  int64_t tokens_per_tile, rows, width;  // rows: computed; width: head_dim in whole panels
  int64_t value_panel_bytes, blocks_per_group;

  explicit AttentionShape(const AttentionArgs& a) {
    tokens_per_tile = larger(1, TILE_TARGET / a.group_size);
    int64_t longest = 0;
    for (int64_t s = 0; s < a.num_sequences; ++s) longest = larger(longest, a.cu_seqlens[s + 1] - a.cu_seqlens[s]);
    rows = computed_rows<T>(smaller(tokens_per_tile, longest) * a.group_size);
    width = round_up(a.head_dim, PANEL);
    blocks_per_group = GROUP / DEPTH<T>;
    value_panel_bytes = SPLIT / DEPTH<T> * BLOCK_BYTES;
  }
};

struct AttentionTile {
  int64_t sequence, head, first_row, num_tokens, first_position;  // first_row: in the batch
  int64_t kv_begin, kv_end;                                       // what its rows see, together
  int64_t first_split, last_split;                                // half open

  AttentionTile(const AttentionArgs& a, int64_t tokens_per_tile, int64_t tile) {
    head = tile % a.num_kv_heads;
    tile /= a.num_kv_heads;
    for (sequence = 0;; ++sequence) {
      const int64_t length = a.cu_seqlens[sequence + 1] - a.cu_seqlens[sequence];
      const int64_t count = (length + tokens_per_tile - 1) / tokens_per_tile;
      if (tile >= count) {
        tile -= count;
        continue;
      }
      const int64_t offset = (count - 1 - tile) * tokens_per_tile;  // the longest first
      first_row = a.cu_seqlens[sequence] + offset;
      num_tokens = smaller(tokens_per_tile, length - offset);
      first_position = a.kv_lens[sequence] - length + offset;
      break;
    }
    kv_begin = a.window ? larger(0, first_position - a.window + 1) : 0;
    kv_end = first_position + num_tokens;
    first_split = kv_begin / SPLIT;
    last_split = (kv_end + SPLIT - 1) / SPLIT;
  }

  static int64_t count(const AttentionArgs& a, int64_t tokens_per_tile) {
    int64_t n = 0;
    for (int64_t s = 0; s < a.num_sequences; ++s)
      n += (a.cu_seqlens[s + 1] - a.cu_seqlens[s] + tokens_per_tile - 1) / tokens_per_tile;
    return n * a.num_kv_heads;
  }
};

#include "attention_tokens.h"

// What a split, or all splits so far, give the rows: float32 values [rows, width], maximum (in powers of two) and sum [rows].
struct Partial {
  float *values, *top, *sum;

  Partial(char* at, int64_t rows, int64_t width) {
    values = (float*)at;
    top = values + rows * width;
    sum = top + rows;
  }
  static int64_t bytes(int64_t rows, int64_t width) { return round_up(rows * (width + 2) * 4, 64); }
};

template <typename T>
struct AttentionScratch {
  Rows<T>* q;   // [rows, width]
  char* keys;   // SPLIT tokens in tile order
  char* values;
  float* scores;     // [rows, SPLIT]
  Rows<T>* weights;  // [rows, SPLIT], of T's numbers
  char* split;    // Partial
  char* total;
  float *key_scales, *value_scales;  // [SPLIT], of quantized cells

  static int64_t bytes(const AttentionShape<T>& s) {
    return round_up(s.rows * s.width * sizeof(Rows<T>), 64) + 2 * SPLIT * s.width * sizeof(T) +
           s.rows * SPLIT * (4 + sizeof(Rows<T>)) + 2 * Partial::bytes(s.rows, s.width) + 2 * SPLIT * 4;
  }
  AttentionScratch(char* at, const AttentionShape<T>& s) {
    auto take = [&at](int64_t bytes) { return (at += bytes) - bytes; };
    q = (Rows<T>*)take(round_up(s.rows * s.width * sizeof(Rows<T>), 64));
    keys = take(SPLIT * s.width * sizeof(T));
    values = take(SPLIT * s.width * sizeof(T));
    scores = (float*)take(s.rows * SPLIT * 4);
    weights = (Rows<T>*)take(s.rows * SPLIT * sizeof(Rows<T>));
    split = take(Partial::bytes(s.rows, s.width));
    total = take(Partial::bytes(s.rows, s.width));
    key_scales = (float*)take(SPLIT * 4);
    value_scales = (float*)take(SPLIT * 4);
  }
};

// x rounded to T, as a product's rows keep it.
template <typename T>
INLINE void store_rounded(Rows<T>* p, vec x, int64_t left) {
  if constexpr (sizeof(Rows<T>) == sizeof(T)) {
    store_some(p, x, left);
  } else {
    store_some(p, rounded(x), left);
  }
}

template <typename T, typename C>
INLINE void copy_queries(const AttentionArgs& a, const AttentionTile& tile, const AttentionShape<T>& shape, Rows<T>* to) {
  for (int64_t token = 0; token < tile.num_tokens; ++token) {
    const T* from = (const T*)a.q + (tile.first_row + token) * a.q_stride + tile.head * a.group_size * a.head_dim;
    for (int64_t g = 0; g < a.group_size; ++g, to += shape.width, from += a.head_dim) {
      if constexpr (C::ROTATED) {
        float rotated[MAX_HEAD_DIM];
        rotate_row(from, a.head_dim, rotated);
        const vec inverse = vset(1.0f / (float)rotated_piece(a.head_dim));
        for (int64_t d = 0; d < a.head_dim; d += W)
          store_rounded<T>(to + d, vmul(load_some(rotated + d, a.head_dim - d), inverse), a.head_dim - d);
      } else if constexpr (sizeof(Rows<T>) == sizeof(T)) {
        __builtin_memcpy(to, from, a.head_dim * sizeof(T));
      } else {
        for (int64_t d = 0; d < a.head_dim; d += W) store_some(to + d, load_some(from + d, a.head_dim - d), a.head_dim - d);
      }
      __builtin_memset(to + a.head_dim, 0, (shape.width - a.head_dim) * sizeof(Rows<T>));
    }
  }
}

// Scores of one row, in powers of two: scaled, by key too if they have scales, capped, -inf where the row sees nothing.
// -> the maximum.
INLINE float finish_scores(const AttentionArgs& a, float* scores, const float* key_scales, int64_t begin, int64_t end, int64_t low,
                           int64_t high) {
  const vec scale = vset(a.cap > 0 ? a.scale / a.cap : a.scale * LOG2_E), cap = vset(a.cap * LOG2_E);
  vec top = vset(NOTHING);
  for (int64_t i = begin; i < end; i += W) {
    vec s = vload(scores + i);
    if (key_scales) s = vmul(s, vload(key_scales + i));
    s = vmul(s, scale);
    if (a.cap > 0) s = vmul(vtanh(s), cap);
    if (i < low || i + W > high) s = vkeep(s, low - i, high - i, vset(-__builtin_inff()));
    vstore(scores + i, s);
    top = vmax(s, top);
  }
  return vmaximum(top);
}

// weights = 2^(scores - top), times the values' scales if they have some. -> the sum without those.
template <typename T>
INLINE float weigh(const float* scores, const float* value_scales, Rows<T>* weights, int64_t begin, int64_t end, float top) {
  vec sum = vzero();
  for (int64_t i = begin; i < end; i += W) {
    const vec p = vexp2(vsub(vload(scores + i), vset(top)));
    store_rounded<T>(weights + i, value_scales ? vmul(p, vload(value_scales + i)) : p, W);
    sum = vadd(sum, p);
  }
  return vsum(sum);
}

// A split's values times the weights, group by group or all at once.
template <typename T, typename C>
INLINE void add_values(const AttentionArgs& a, const AttentionShape<T>& shape, const AttentionScratch<T>& scratch,
                       const TokenGroup<C>* ring, int64_t begin, int64_t end, int64_t rows, const Partial& to, TileScope& scope) {
  const int64_t step = !VALUES_LATER || rows > FEW_QUERIES ? end - begin : 1;
  for (int64_t first = begin; first < end; first += step) {
    for (int64_t g = first; VALUES_LATER && g < first + step; ++g) {
      prefetch_half(a, ring, g, true, begin, end, 0);
      const auto* values = ring[g % RING].values;
      pack_cell_values<C, T>(values, a.head_dim, scratch.values, shape.value_panel_bytes, g * shape.blocks_per_group);
      prefetch_half(a, ring, g, true, begin, end, 1);
    }
    const int64_t first_block = first * shape.blocks_per_group, num_blocks = step * shape.blocks_per_group;
    for (int64_t d = 0; d < shape.width; d += PANEL) {
      const char* panel = scratch.values + d / PANEL * shape.value_panel_bytes + first_block * BLOCK_BYTES;
      const Rows<T>* weights = scratch.weights + first * GROUP;
      const Product<T, Rows<T>> product{weights, SPLIT, panel, num_blocks, to.values + d, shape.width};
      multiply_all(rows, product, first > begin, scope);
    }
  }
}

template <typename T, typename C>
void attend_split(const AttentionArgs& a, const AttentionTile& tile, const AttentionShape<T>& shape,
                  const AttentionScratch<T>& scratch, int64_t split, const Partial& to, TileScope& scope) {
  const int64_t base = split * SPLIT, rows = tile.num_tokens * a.group_size, computed = computed_rows<T>(rows);
  const int64_t begin = larger(0, tile.kv_begin - base) / GROUP, end = (smaller(SPLIT, tile.kv_end - base) + GROUP - 1) / GROUP;
  const int64_t key_panel_bytes = GROUP * shape.width * sizeof(T);
  TokenGroup<C> ring[RING];  // of the group being packed and the AHEAD next ones, in the next split too
  for (int64_t g = begin; g < begin + AHEAD; ++g) find_tokens(a, tile, base + g * GROUP, ring[g % RING]);
  for (int64_t g = begin; g < end; ++g) {
    const TokenGroup<C>& tokens = ring[g % RING];
    TokenGroup<C>& next = ring[(g + AHEAD) % RING];
    find_tokens(a, tile, base + (g + AHEAD) * GROUP, next);
    if (VALUES_LATER) {
      prefetch_half(a, ring, g, false, begin, end, 0);
    } else {
      prefetch_tokens(next.keys, a.head_dim);
      prefetch_tokens(next.values, a.head_dim);
    }
    if constexpr (SCALED<C>) {
      prefetch_scales(next.key_scales);
      prefetch_scales(next.value_scales);
      for (int64_t i = 0; i < GROUP; ++i) {
        scratch.key_scales[g * GROUP + i] = *tokens.key_scales[i] * KEY_UNIT<C, T>;
        scratch.value_scales[g * GROUP + i] = *tokens.value_scales[i] * VALUE_UNIT<C, T>;
      }
    }
    char* panel = scratch.keys + g * key_panel_bytes;
    pack_cell_keys<C, T>(tokens.keys, a.head_dim, panel);
    if (VALUES_LATER) {
      prefetch_half(a, ring, g, false, begin, end, 1);
    } else {
      pack_cell_values<C, T>(tokens.values, a.head_dim, scratch.values, shape.value_panel_bytes, g * shape.blocks_per_group);
    }
    const int64_t num_blocks = (a.head_dim + DEPTH<T> - 1) / DEPTH<T>;
    const Product<T, Rows<T>> product{scratch.q, shape.width, panel, num_blocks, scratch.scores + g * GROUP, SPLIT};
    multiply_all(computed, product, false, scope);
  }
  const float* key_scales = SCALED<C> ? scratch.key_scales : nullptr;
  const float* value_scales = SCALED<C> ? scratch.value_scales : nullptr;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t position = tile.first_position + row / a.group_size;
    const int64_t low = a.window ? position - a.window + 1 - base : 0, high = position + 1 - base;
    float* scores = scratch.scores + row * SPLIT;
    to.top[row] = finish_scores(a, scores, key_scales, begin * GROUP, end * GROUP, low, high);
  }
  for (int64_t row = 0; row < rows; ++row) {
    Rows<T>* weights = scratch.weights + row * SPLIT;
    to.sum[row] = weigh<T>(scratch.scores + row * SPLIT, value_scales, weights, begin * GROUP, end * GROUP, to.top[row]);
  }
  add_values<T, C>(a, shape, scratch, ring, begin, end, computed, to, scope);
}

// total = total and `split`, the next one.
INLINE void merge(const Partial& total, const Partial& split, int64_t rows, int64_t width) {
  for (int64_t row = 0; row < rows; ++row) {
    const float top = total.top[row] > split.top[row] ? total.top[row] : split.top[row];
    float factors[2 * W], *values = total.values + row * width;
    vstore(factors, vexp2(vset(total.top[row] - top)));
    vstore(factors + W, vexp2(vset(split.top[row] - top)));
    const vec before = vset(factors[0]), now = vset(factors[W]);
    for (int64_t d = 0; d < width; d += W)
      vstore(values + d, vadd(vmul(vload(values + d), before), vmul(vload(split.values + row * width + d), now)));
    total.sum[row] = total.sum[row] * factors[0] + split.sum[row] * factors[W];
    total.top[row] = top;
  }
}

INLINE void clear(const Partial& total, int64_t rows, int64_t width) {
  __builtin_memset(total.values, 0, rows * width * 4);
  for (int64_t row = 0; row < rows; ++row) {
    total.top[row] = NOTHING;
    total.sum[row] = 0.0f;
  }
}

template <typename T>
INLINE void write_out(const AttentionArgs& a, const AttentionTile& tile, const Partial& total, int64_t width) {
  for (int64_t row = 0; row < tile.num_tokens * a.group_size; ++row) {
    const int64_t token = row / a.group_size, head = tile.head * a.group_size + row % a.group_size;
    T* out = (T*)a.out + (tile.first_row + token) * a.out_stride + head * a.head_dim;
    const float* values = total.values + row * width;
    const vec sum = vset(total.sum[row]);
    for (int64_t d = 0; d < a.head_dim; d += W) {
      const vec y = vadd(vdiv(vload(values + d), sum), vzero());  // -0 becomes 0: its sign may depend on what had weight 0
      if (a.head_dim - d >= W) {
        vstore(out + d, y);
      } else {
        vstore(out + d, y, (int)(a.head_dim - d));
      }
    }
  }
}

// A task is a tile, or with `partials` one split of one tile.
template <typename T, typename C>
void attend(const AttentionArgs& a, const Region& region) {
  const AttentionShape<T> shape(a);
  const AttentionScratch<T> scratch(region.scratch, shape);
  const int64_t num_tiles = AttentionTile::count(a, shape.tokens_per_tile);
  const int64_t partial_bytes = Partial::bytes(shape.rows, shape.width);
  const int64_t splits_per_tile = a.partials ? a.table_stride * a.block_size / SPLIT + 1 : 1;
  TileScope scope;
  for (int64_t task; (task = next_task(region)) < num_tiles * splits_per_tile;) {
    const AttentionTile tile(a, shape.tokens_per_tile, task / splits_per_tile);
    const int64_t rows = tile.num_tokens * a.group_size, computed = computed_rows<T>(rows);
    if (a.partials) {
      const int64_t split = tile.first_split + task % splits_per_tile;
      if (split >= tile.last_split) continue;
      copy_queries<T, C>(a, tile, shape, scratch.q);
      attend_split<T, C>(a, tile, shape, scratch, split, Partial(a.partials + task * partial_bytes, computed, shape.width), scope);
      continue;
    }
    copy_queries<T, C>(a, tile, shape, scratch.q);
    const Partial total(scratch.total, computed, shape.width), next(scratch.split, computed, shape.width);
    attend_split<T, C>(a, tile, shape, scratch, tile.first_split, total, scope);
    for (int64_t split = tile.first_split + 1; split < tile.last_split; ++split) {
      attend_split<T, C>(a, tile, shape, scratch, split, next, scope);
      merge(total, next, rows, shape.width);
    }
    write_out<T>(a, tile, total, shape.width);
  }
}

template <typename T>
void attention(const AttentionArgs& a, const Region& region) {
  switch (a.cells) {
    case PLAIN: return attend<T, PlainCells<T>>(a, region);
    case INT8_CELLS: return attend<T, Int8Cells>(a, region);
    case FP8_CELLS: return attend<T, Fp8Cells>(a, region);
  }
}

template <typename T>
void attention_merge(const AttentionArgs& a, const Region& region) {
  const AttentionShape<T> shape(a);
  const AttentionScratch<T> scratch(region.scratch, shape);
  const int64_t num_tiles = AttentionTile::count(a, shape.tokens_per_tile);
  const int64_t partial_bytes = Partial::bytes(shape.rows, shape.width);
  const int64_t splits_per_tile = a.table_stride * a.block_size / SPLIT + 1;
  for (int64_t task; (task = next_task(region)) < num_tiles;) {
    const AttentionTile tile(a, shape.tokens_per_tile, task);
    const int64_t rows = tile.num_tokens * a.group_size, computed = computed_rows<T>(rows);
    const Partial total(scratch.total, computed, shape.width);
    clear(total, rows, shape.width);
    for (int64_t split = tile.first_split; split < tile.last_split; ++split) {
      char* at = a.partials + (task * splits_per_tile + split - tile.first_split) * partial_bytes;
      merge(total, Partial(at, computed, shape.width), rows, shape.width);
    }
    write_out<T>(a, tile, total, shape.width);
  }
}

template <typename T>
int64_t attention_scratch(const AttentionArgs& a) { return AttentionScratch<T>::bytes(AttentionShape<T>(a)); }
