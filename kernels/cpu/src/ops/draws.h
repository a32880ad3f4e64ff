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

// The shortest prefix of the values, from the largest on, whose weights (null: 1 each) reach `target` > 0; both are overwritten.
// False: too close to tell, or not reached.
inline bool shortest_prefix(float* values, float* weights, int64_t n, double target, double margin, Cut& cut) {
  double above = 0;
  for (;;) {
    float low = values[0], high = values[0];
    for (int64_t i = 1; i < n; ++i) low = values[i] < low ? values[i] : low, high = values[i] > high ? values[i] : high;
    if (!(low < high)) break;
    float middle = low / 2 + high / 2;
    if (!(middle >= low && middle < high)) middle = low;
    double mass = 0;
    for (int64_t i = 0; i < n; ++i) mass += values[i] > middle ? (weights ? (double)weights[i] : 1.0) : 0.0;
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

// Of what `cut` keeps the shortest prefix that reaches top_p.
inline bool top_p(const Draw& d, float top, Cut& cut, float* values, float* weights) {
  const float temperature = (float)d.temperature;
  float tie_weight = 0;
  for (int look = 0; look < 2; ++look) {
    const double depth = look == 0 ? NUCLEUS_DEPTH : __builtin_inf();
    const float floor = (float)((double)top - depth * d.temperature);
    double total = 0;
    int64_t n = 0;
    for (int64_t i = 0; i < d.count; i += W) {
      const int64_t count = smaller(W, d.count - i);
      float x[W], p[W];
      const vec some = count == W ? vload(d.logits + i) : vload(d.logits + i, count);
      vstore(x, some);
      if (d.powers) {
        for (int64_t j = 0; j < count; ++j) p[j] = d.powers[i + j];
      } else {
        vstore(p, power(some, top, temperature));
      }
      for (int64_t j = 0; j < count; ++j) {
        if (x[j] == cut.value) tie_weight = p[j];
        if (!(x[j] > cut.value)) continue;
        total += (double)p[j];
        values[n] = x[j], weights[n] = p[j];
        n += x[j] >= floor;
      }
    }
    total += cut.ties * (double)tie_weight;
    for (int64_t i = 0; i < cut.ties && cut.value >= floor; ++i) values[n] = cut.value, weights[n++] = tie_weight;
    double reached = 0;
    for (int64_t i = 0; i < n; ++i) reached += (double)weights[i];
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

// What is kept, -inf in place of the rest.
inline void keep(const Draw& d, Cut cut, float* to) {
  for (int64_t i = 0; i < d.count; ++i) {
    const bool kept = d.logits[i] > cut.value || (d.logits[i] == cut.value && cut.ties-- > 0);
    to[i] = kept ? d.logits[i] : LOWEST;
  }
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

inline void find_contenders(Draw& d, const float* logits) {
  GumbelPart part;
  start(part);
  const int64_t best = d.likeliest / LOOK_BLOCK * LOOK_BLOCK;  // first: its score rules many others out
  for (int64_t i = -LOOK_BLOCK; i < d.count; i += LOOK_BLOCK) {
    const int64_t first = i < 0 ? best : i;
    if (i == best) continue;
    float block[LOOK_BLOCK];
    int64_t ids[LOOK_BLOCK] = {};
    if (d.ids) __builtin_memcpy(ids, d.ids + first, smaller(LOOK_BLOCK, d.count - first) * sizeof(int64_t));
    gumbel_block(d.key, d.temperature, block_at(logits, first, d.count, block), first, d.ids ? ids : nullptr, part);
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
    const float* logits = d.logits;
    if (d.depth > -__builtin_inf() || d.top_p < 1.0 || (d.top_k > 0 && d.top_k < d.count)) {
      if (!filter(d, d.logits[d.likeliest], cut, values, weights)) {
        d.state = UNSURE;
        continue;
      }
      keep(d, cut, values);
      logits = values;
    }
    find_contenders(d, logits);
  }
}

inline int64_t draws_scratch(const DrawsArgs& a) { return 2 * round_up(larger(a.most, STRIPES), 16) * (int64_t)sizeof(float) + 4096; }
