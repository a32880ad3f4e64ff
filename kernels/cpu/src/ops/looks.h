// What sampling wants to know of a row of logits, found in passing while a chunk of them is still in the cache:
//
//   top          the likeliest; of equal ones the lowest ids
//   contenders   who may win the draw (gumbel.h)
//   log total    ln Σ e^logit: over each 32 columns in float32, relative to the largest of them; those sums in float64, in order
//
// Blocks of 64 columns count from column 0, so what is found depends on the row alone, and is the same of whole rows. The linear
// op runs as it is, on one thread and a slice of the weight at a time.
#pragma once

constexpr int64_t LOOK_BLOCK = 2 * PANEL;

INLINE void start(LookPart& p) {
  p.is_broken = false, p.floor = -__builtin_inff(), p.num_top = 0;
  start(p.gumbel);
}

// Whether one of a panel's numbers is above the bound, or a NaN.
INLINE bool any_not_below(const float* x, float bound) {
  bool any = false;
  for (int i = 0; i < PANEL; i += W) {
#ifdef __AVX512F__
    any |= _mm512_cmp_ps_mask(vload(x + i), vset(bound), _CMP_NLE_UQ) != 0;
#else
    any |= _mm256_movemask_ps(_mm256_cmp_ps(vload(x + i), vset(bound), _CMP_NLE_UQ)) != 0;
#endif
  }
  return any;
}

INLINE void insert(LookPart& p, int64_t most, int64_t id, float value) {
  int64_t at = p.num_top < most ? p.num_top++ : most - 1;
  for (; at > 0 && p.values[at - 1] < value; --at) p.values[at] = p.values[at - 1], p.ids[at] = p.ids[at - 1];
  p.values[at] = value, p.ids[at] = id;
  if (p.num_top == most) p.floor = p.values[most - 1];
}

INLINE void add_powers(const float* x, const Powers& powers, int64_t panel) {
  vec most = vload(x);
  for (int i = W; i < PANEL; i += W) most = vmax(most, vload(x + i));
  const float largest = vmaximum(most);
  vec sum = vzero();
  if (largest > -__builtin_inff())
    for (int i = 0; i < PANEL; i += W) sum = vadd(sum, vexp(vsub(vload(x + i), vset(largest))));
  powers.largest[panel] = largest, powers.sums[panel] = vsum(sum);
}

// 64 logits from column `first` on, -inf past the end.
inline void look_at(const Look& look, const float* logits, int64_t first, const Powers& powers, LookPart& p) {
  for (int64_t panel = 0; panel < LOOK_BLOCK; panel += PANEL) {
    const float* x = logits + panel;
    if (any_not_below(x, p.floor))
      for (int64_t i = 0; i < PANEL; ++i) {
        if (x[i] > p.floor) insert(p, look.num_top, first + panel + i, x[i]);
        p.is_broken |= x[i] != x[i];
      }
    if (look.wants_total) add_powers(x, powers, (first + panel) / PANEL);
  }
  if (look.temperature > 0) gumbel_block(look.key, look.temperature, logits, first, nullptr, p.gumbel);
}

inline double log_total(const Powers& powers, int64_t num_panels) {
  float most = powers.largest[0];
  for (int64_t i = 1; i < num_panels; ++i) most = powers.largest[i] > most ? powers.largest[i] : most;
  double total = 0;
  for (int64_t i = 0; i < num_panels; i += W) {
    float scaled[W];
    vstore(scaled, vmul(vload(powers.sums + i), vexp(vsub(vload(powers.largest + i), vset(most)))));
    for (int64_t j = 0; j < smaller(W, num_panels - i); ++j) total += (double)scaled[j];
  }
  return (double)most + __builtin_log(total);
}

INLINE LinearArgs slice(const LinearArgs& a, int64_t panel, int64_t num_panels, int64_t panel_bytes, float* out) {
  LinearArgs s = a;
  s.weight += panel * panel_bytes;
  s.bias = a.bias ? a.bias + panel * PANEL : nullptr;
  s.scales = a.scales ? a.scales + panel * PANEL : nullptr;
  s.out = out, s.out_stride = num_panels * PANEL;
  s.n_out = smaller(num_panels * PANEL, a.n_out - panel * PANEL);
  return s;
}

INLINE GroupedArgs slice(const GroupedArgs& g, int64_t panel, int64_t num_panels, int64_t panel_bytes, float* out) {
  GroupedArgs s = g;
  s.linear = slice(g.linear, panel, num_panels, panel_bytes, out);
  s.scales = (const char*)g.scales + panel * g.scale_panel_bytes;
  s.offsets = g.offsets ? g.offsets + panel * g.num_groups * PANEL : nullptr;
  return s;
}

INLINE const LinearArgs& linear_of(const LinearArgs& a) { return a; }
INLINE const LinearArgs& linear_of(const GroupedArgs& g) { return g.linear; }

// An even number of panels, so that chunks are whole blocks. On AVX2 more rows than pass at once get the panels of a task of
// theirs: they are widened for each chunk (linear_avx2.h).
template <typename Args>
int64_t panels_of_chunk(const LookedArgs<Args>& l) {
  const int64_t least = W == 8 && linear_of(l.args).m > STREAMED_ROWS ? MAX_CHUNK : 2;
  return larger(least, STREAMED_CHUNK / l.beside.panel_bytes / 2 * 2);
}

INLINE Powers powers_of(const Beside& b, int64_t look) {
  if (!b.powers) return Powers{};
  float* largest = b.powers + look * 2 * b.num_panels;
  return Powers{largest, largest + b.num_panels};
}

template <typename Args>
void look_at_chunk(const LookedArgs<Args>& l, int64_t first, int64_t width, float* logits, LookPart* parts) {
  const Beside& b = l.beside;
  const LinearArgs& a = linear_of(l.args);
  for (int64_t i = 0; i < b.num_whole; ++i) {
    const int64_t row = b.whole[i], count = smaller(width, a.n_out - first);
    __builtin_memcpy((float*)a.out + row * a.out_stride + first, logits + row * width, count * sizeof(float));
  }
  for (int64_t row = 0; row < a.m; ++row)
    for (int64_t i = larger(0, b.num_columns - first); i < width; ++i) logits[row * width + i] = -__builtin_inff();
  for (int64_t i = 0; i < b.num_looks; ++i)
    for (int64_t n = 0; n < width && first + n < b.num_columns; n += LOOK_BLOCK)
      look_at(b.looks[i], logits + b.looks[i].row * width + n, first + n, powers_of(b, i), parts[i]);
}

template <typename Args>
void looked(const LookedArgs<Args>& l, const Region& region) {
  const Beside& b = l.beside;
  const int64_t num_panels = panels_of_chunk(l), width = num_panels * PANEL, n_out = linear_of(l.args).n_out;
  float* logits = (float*)(region.scratch + round_up(l.linear->scratch_bytes(l.args), 64));
  LookPart* parts = b.parts + region.thread * b.num_looks;
  for (int64_t i = 0; i < b.num_looks; ++i) start(parts[i]);
  each_task(region, (n_out + width - 1) / width, [&](int64_t task) {
    int64_t counter = 0;
    l.linear->run(slice(l.args, task * num_panels, num_panels, b.panel_bytes, logits), Region{0, 1, &counter, region.scratch});
    look_at_chunk(l, task * width, width, logits, parts);
  });
}

template <typename Args>
int64_t looked_scratch(const LookedArgs<Args>& l) {
  const int64_t width = panels_of_chunk(l) * PANEL;
  return round_up(l.linear->scratch_bytes(l.args), 64) + linear_of(l.args).m * width * (int64_t)sizeof(float);
}

// From the sums over panels to those of rows.
inline void totals(const Beside& b, const Region& region) {
  for (int64_t i; (i = next_task(region)) < b.num_looks;)
    if (b.looks[i].wants_total) b.looks[i].log_total = log_total(powers_of(b, i), round_up(b.num_columns, PANEL) / PANEL);
}

// 64 of a row's logits, where the row has no more with -inf after them in `block`.
INLINE const float* block_at(const float* row, int64_t first, int64_t count, float* block) {
  if (first + LOOK_BLOCK <= count) return row + first;
  for (int64_t i = 0; i < LOOK_BLOCK; ++i) block[i] = first + i < count ? row[first + i] : -__builtin_inff();
  return block;
}

// One more than there are tokens before it in the order (logit descending, id ascending).
inline int64_t rank_of(const float* logits, int64_t count, int64_t token) {
  const float mine = logits[token];
  int64_t rank = 1;
  for (int64_t i = 0; i < token; ++i) rank += logits[i] >= mine;
  for (int64_t i = token + 1; i < count; ++i) rank += logits[i] > mine;
  return rank;
}

// A row a task.
inline void row_looks(const RowLooksArgs& a, const Region& region) {
  const Powers powers{(float*)region.scratch, (float*)region.scratch + a.num_panels};
  for (int64_t task; (task = next_task(region)) < a.num_looks;) {
    Look& look = a.looks[task];
    float block[LOOK_BLOCK];
    start(a.parts[task]);
    for (int64_t first = 0; first < a.num_columns; first += LOOK_BLOCK)
      look_at(look, block_at(look.logits, first, a.num_columns, block), first, powers, a.parts[task]);
    if (look.wants_total) look.log_total = log_total(powers, round_up(a.num_columns, PANEL) / PANEL);
    if (look.token >= 0) look.rank = rank_of(look.logits, a.num_columns, look.token);
  }
}

inline int64_t row_looks_scratch(const RowLooksArgs& a) { return 2 * a.num_panels * (int64_t)sizeof(float); }
