// Draws from whole rows: min-p, top-k and top-p as engine/candidates.py has them, then who may win (gumbel.h); a row a task.
//
// Each filter keeps a prefix of the order (logit descending, id ascending): everything above a logit, and the first so many that
// equal it. The logit is found by halving the range of values, dropping the half that it isn't in. Top-p compares sums of powers
// that differ from the reference's in the last bits: where they are within `margin` (relative) of what is asked, it is UNSURE.
#pragma once

struct Cut {
  float value;   // everything above it is kept,
  int64_t ties;  // and the first so many that equal it
};

constexpr double NUCLEUS_DEPTH = 8.0;  // top-p looks first at what has e^-8 of the largest probability at least
constexpr int64_t STRIPES = 1024;      // the k-th largest of so many maxima is a floor for the k-th largest
constexpr float LOWEST = -__builtin_inff();

// The sums of a vector's lower and upper half, lane by lane.
typedef double double_v __attribute__((vector_size(W * 4)));
INLINE double_v halves(vec x) {
#ifdef __AVX512F__
  return (double_v)_mm512_add_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(x)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)));
#else
  return (double_v)_mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(x)), _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)));
#endif
}

INLINE void extent(const float* values, int64_t n, float& low, float& high) {
  vec lows = vset(values[0]), highs = lows;
  int64_t i = 0;
  for (; i + W <= n; i += W) lows = vmin(lows, vload(values + i)), highs = vmax(highs, vload(values + i));
  low = -vmaximum(vsub(vzero(), lows)), high = vmaximum(highs);
  for (; i < n; ++i) low = values[i] < low ? values[i] : low, high = values[i] > high ? values[i] : high;
}

// The weights (null: 1 each) of the values above `bound`, added up.
INLINE double mass_above(const float* values, const float* weights, int64_t n, float bound) {
  double_v sums{};
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    const float_v weight = (float_v)(weights ? vload(weights + i) : vset(1.0f));
    sums += halves((vec)((float_v)vload(values + i) > bound ? weight : float_v{}));
  }
  double mass = 0;
  for (; i < n; ++i) mass += values[i] > bound ? (weights ? (double)weights[i] : 1.0) : 0.0;
  for (int lane = 0; lane < HALF_W; ++lane) mass += sums[lane];
  return mass;
}

// The shortest prefix of the values, from the largest on, whose weights (null: 1 each) reach `target` > 0; both are overwritten.
// False: too close to tell, or not reached.
inline bool shortest_prefix(float* values, float* weights, int64_t n, double target, double margin, Cut& cut) {
  double above = 0;
  for (;;) {
    float low, high;
    extent(values, n, low, high);
    if (!(low < high)) break;
    float middle = low / 2 + high / 2;
    if (!(middle >= low && middle < high)) middle = low;
    const double mass = mass_above(values, weights, n, middle);
    if (margin > 0 && __builtin_fabs(above + mass - target) <= margin) return false;
    const bool upper = above + mass >= target;
    if (!upper) above += mass;
    int64_t kept = 0;
    for (int64_t i = 0; i < n; ++i) {
      values[kept] = values[i];
      if (weights) weights[kept] = weights[i];
      kept += (values[i] > middle) == upper;
    }
    n = kept;
  }
  const double weight = weights ? (double)weights[0] : 1.0;
  const int64_t ties = larger(1, (int64_t)__builtin_ceil((target - above) / weight));
  cut = Cut{values[0], ties};
  if (ties > n) return false;
  if (margin == 0) return true;
  const bool first = above == 0 && ties == 1;
  return above + ties * weight >= target + margin && (first || above + (ties - 1) * weight < target - margin);
}

// Keeps all that is at least `floor`.
inline Cut at_least(const Draw& d, float floor) {
  int64_t ties = 0;
  for (int64_t i = 0; i < d.count && floor > LOWEST; ++i) ties += d.logits[i] == floor;
  return Cut{floor, ties};
}

// What is at least `floor`, into `to`.
inline int64_t gather(const float* x, int64_t count, float floor, float* to) {
  int64_t n = 0;
  for (int64_t i = 0; i < count; ++i)
    if (x[i] >= floor && x[i] > LOWEST) to[n++] = x[i];
  return n;
}

// Of what is at least `floor` the `k` largest.
inline Cut top_k(const Draw& d, float floor, int64_t k, float* values) {
  const int64_t width = d.count / STRIPES;
  if (width > 1 && k <= STRIPES / 4) {
    for (int64_t i = 0; i < STRIPES; ++i) values[i] = LOWEST;
    for (int64_t first = 0; first < width * STRIPES; first += STRIPES)
      for (int64_t i = 0; i < STRIPES; i += W) vstore(values + i, vmax(vload(values + i), vload(d.logits + first + i)));
    Cut stripes;
    if (shortest_prefix(values, nullptr, STRIPES, (double)k, 0, stripes) && stripes.value > floor) floor = stripes.value;
  }
  const int64_t n = gather(d.logits, d.count, floor, values);
  if (k >= n) return at_least(d, floor);
  Cut cut;
  shortest_prefix(values, nullptr, n, (double)k, 0, cut);
  return cut;
}

// e^((x - top) / T), as the reference has it but for the last bits; T rounded to float32.
INLINE vec power(vec x, float top, float temperature) { return vexp(vdiv(vsub(x, vset(top)), vset(temperature))); }

// Whether one of 64 values is at least `floor`.
INLINE bool any_reaches(const float* x, float floor) {
  int_v reached{};
  for (int i = 0; i < LOOK_BLOCK; i += W) reached |= (float_v)vload(x + i) >= floor;
  return any_lane((words_v)reached);
}

// The weight of what equals the cut, if any of it is kept.
inline float tie_weight(const Draw& d, float top, Cut cut) {
  if (cut.ties == 0) return 0;
  float weights[W];
  vstore(weights, power(vset(cut.value), top, (float)d.temperature));
  for (int64_t i = 0; i < d.count && d.powers; ++i)
    if (d.logits[i] == cut.value) return d.powers[i];
  return weights[0];
}

// All weights that `cut` keeps are added up. What is above it and at least `floor` goes into values and weights; how many.
inline int64_t weigh(const Draw& d, float top, Cut cut, float floor, float* values, float* weights, double& total) {
  const float temperature = (float)d.temperature;
  float room[LOOK_BLOCK], power_room[LOOK_BLOCK], mine[LOOK_BLOCK];
  double_v sums{};
  int64_t n = 0;
  for (int64_t first = 0; first < d.count; first += LOOK_BLOCK) {
    const float* x = block_at(d.logits, first, d.count, room);
    const float* powers = d.powers ? block_at(d.powers, first, d.count, power_room) : nullptr;
    for (int i = 0; i < LOOK_BLOCK; i += W) {
      const float_v some = (float_v)vload(x + i), p = (float_v)(powers ? vload(powers + i) : power((vec)some, top, temperature));
      const vec kept = (vec)(some > cut.value ? p : float_v{});
      sums += halves(kept);
      vstore(mine + i, kept);
    }
    if (!any_reaches(x, floor)) continue;
    for (int64_t i = 0; i < smaller(LOOK_BLOCK, d.count - first); ++i) {
      values[n] = x[i], weights[n] = mine[i];
      n += x[i] > cut.value && x[i] >= floor;
    }
  }
  total = 0;
  for (int i = 0; i < HALF_W; ++i) total += sums[i];
  return n;
}

// Of what `cut` keeps the shortest prefix that reaches top_p.
inline bool top_p(const Draw& d, float top, Cut& cut, float* values, float* weights) {
  const float of_tie = tie_weight(d, top, cut);
  for (int look = 0; look < 2; ++look) {
    const double depth = look == 0 ? NUCLEUS_DEPTH : __builtin_inf();
    const float floor = (float)((double)top - depth * d.temperature);
    double total;
    int64_t n = weigh(d, top, cut, floor, values, weights, total);
    total += cut.ties * (double)of_tie;
    for (int64_t i = 0; i < cut.ties && cut.value >= floor; ++i) values[n] = cut.value, weights[n++] = of_tie;
    const double reached = mass_above(values, weights, n, LOWEST);
    const double wanted = d.top_p * total, margin = d.margin * total;
    if (reached < wanted + margin && look == 0) continue;
    return shortest_prefix(values, weights, n, wanted, margin, cut);
  }
  return false;
}

inline bool filter(const Draw& d, float top, Cut& cut, float* values, float* weights) {
  float floor = LOWEST;
  if (d.depth > -__builtin_inf()) {
    floor = (float)((double)top + d.depth);
    floor = floor < top ? floor : top;
    cut = at_least(d, floor);
  }
  if (d.top_k > 0 && d.top_k < d.count) cut = top_k(d, floor, d.top_k, values);
  return d.top_p >= 1.0 || top_p(d, top, cut, values, weights);
}

// The index of the last of the cut's ties that is kept; -1: none.
inline int64_t last_tie(const Draw& d, Cut cut) {
  float block[LOOK_BLOCK];
  for (int64_t first = 0; first < d.count && cut.ties > 0; first += LOOK_BLOCK) {
    const float* x = block_at(d.logits, first, d.count, block);
    if (!any_reaches(x, cut.value)) continue;
    for (int64_t i = 0; i < LOOK_BLOCK; ++i)
      if (x[i] == cut.value && --cut.ties == 0) return first + i;
  }
  return -1;
}

// 64 values with -inf in place of what isn't kept: of those that equal the cut all but the first `ties` places.
INLINE void keep(const float* x, float cut, int64_t ties, float* to) {
  for (int64_t i = 0; i < LOOK_BLOCK; ++i) to[i] = x[i] >= cut ? x[i] : LOWEST;
  for (int64_t i = larger(0, ties); i < LOOK_BLOCK; ++i) to[i] = to[i] > cut ? to[i] : LOWEST;
}

// The first of the largest; -1: there is a NaN or nothing finite.
inline int64_t likeliest(const float* x, int64_t count) {
  LookPart p;
  Look look{};
  look.num_top = 1;
  float block[LOOK_BLOCK];
  start(p);
  for (int64_t first = 0; first < count; first += LOOK_BLOCK)
    look_at(look, block_at(x, first, count, block), first, Powers{}, p);
  return p.is_broken || p.num_top == 0 || p.values[0] == __builtin_inff() ? -1 : p.ids[0];
}

inline void find_contenders(Draw& d, Cut cut) {
  GumbelPart part;
  start(part);
  const int64_t best = d.likeliest / LOOK_BLOCK * LOOK_BLOCK;  // first: its score rules many others out
  const int64_t last = last_tie(d, cut);
  for (int64_t i = -LOOK_BLOCK; i < d.count; i += LOOK_BLOCK) {
    const int64_t first = i < 0 ? best : i;
    if (i == best) continue;
    float block[LOOK_BLOCK], kept[LOOK_BLOCK];
    const float* x = block_at(d.logits, first, d.count, block);
    if (!any_reaches(x, cut.value)) continue;
    keep(x, cut.value, last + 1 - first, kept);
    int64_t ids[LOOK_BLOCK] = {};
    if (d.ids) __builtin_memcpy(ids, d.ids + first, smaller(LOOK_BLOCK, d.count - first) * sizeof(int64_t));
    gumbel_block(d.key, d.temperature, kept, first, d.ids ? ids : nullptr, part);
  }
  d.num_contenders = part.count;
  if (part.count < 0) return;
  keep_above(part, gumbel_floor(part.best));
  d.num_contenders = part.count;
  __builtin_memcpy(d.contenders, part.index, part.count * sizeof(int64_t));
}

inline void draws(const DrawsArgs& a, const Region& region) {
  float *values = (float*)region.scratch, *weights = values + a.most;
  for (int64_t task; (task = next_task(region)) < a.num_draws;) {
    Draw& d = a.draws[task];
    d.likeliest = likeliest(d.logits, d.count), d.num_contenders = 0;
    d.state = d.likeliest < 0 ? NOT_FINITE : DRAWN;
    if (d.state != DRAWN || d.temperature <= 0) continue;
    Cut cut{LOWEST, 0};
    if (filter(d, d.logits[d.likeliest], cut, values, weights)) {
      find_contenders(d, cut);
    } else {
      d.state = UNSURE;
    }
  }
}

inline int64_t draws_scratch(const DrawsArgs& a) { return 2 * round_up(larger(a.most, STRIPES), 16) * (int64_t)sizeof(float) + 4096; }
