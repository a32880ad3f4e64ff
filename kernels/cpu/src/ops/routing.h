// Which experts of a mixture each row goes to, and with what weights: kernels/routing.py's, in float32.
//
// A task is a block of rows. A row's scores, its order of experts and its weights come from its own logits alone. Of equals
// the expert (or group) of the lower number comes first, a NaN before everything, so that there are always top_k of them.
#pragma once

constexpr int64_t ROUTE_ROWS = 16;

INLINE bool ranks_before(float a, float b) { return a > b || (a != a && b == b); }

// Indices of the `most` best of values[0 … count), best first. `best` has room for `most` values.
INLINE void best_of(const float* values, int64_t count, int64_t most, int64_t* indices, float* best) {
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (found == most && !ranks_before(values[i], best[most - 1])) continue;
    int64_t at = found < most ? found++ : most - 1;
    for (; at > 0 && ranks_before(values[i], best[at - 1]); --at) best[at] = best[at - 1], indices[at] = indices[at - 1];
    best[at] = values[i], indices[at] = i;
  }
}

// scores = softmax(logits)
INLINE void soften(const float* logits, int64_t count, float* scores) {
  float largest = logits[0];
  for (int64_t i = 1; i < count; ++i) largest = logits[i] > largest || logits[i] != logits[i] ? logits[i] : largest;
  vec sums = vzero();
  for (int64_t i = 0; i < count; i += W) {
    const int64_t left = count - i;
    const vec power = vexp(vsub(load_some(logits + i, left), vset(largest)));
    store_some(scores + i, power, left);
    sums = vadd(sums, vkeep(power, 0, left, vzero()));
  }
  const vec total = vset(vsum(sums));
  for (int64_t i = 0; i < count; i += W) store_some(scores + i, vdiv(load_some(scores + i, count - i), total), count - i);
}

// scores = 1 / (1 + e^-logits)
INLINE void squash(const float* logits, int64_t count, float* scores) {
  for (int64_t i = 0; i < count; i += W) {
    const vec powers = vexp(vsub(vzero(), load_some(logits + i, count - i)));
    store_some(scores + i, vdiv(vset(1.0f), vadd(vset(1.0f), powers)), count - i);
  }
}

// Leaves only the row's best groups: the others' ranking becomes -inf. A group's score sums its `limit_best` highest, in order.
INLINE void limit_groups(const RouteArgs& a, float* ranking, float* of_groups, float* best, int64_t* indices) {
  const int64_t width = a.num_experts / a.num_groups;
  for (int64_t group = 0; group < a.num_groups; ++group) {
    best_of(ranking + group * width, width, a.limit_best, indices, best);
    of_groups[group] = best[0];
    for (int64_t rank = 1; rank < a.limit_best; ++rank) of_groups[group] += best[rank];
  }
  best_of(of_groups, a.num_groups, a.limit_groups, indices, best);
  for (int64_t group = 0, kept; group < a.num_groups; ++group) {
    for (kept = 0; kept < a.limit_groups && indices[kept] != group; ++kept) {}
    for (int64_t i = 0; kept == a.limit_groups && i < width; ++i) ranking[group * width + i] = -__builtin_inff();
  }
}

// Numbers of each of a row's arrays: an even one, so that what comes after float32 is aligned for int64.
INLINE int64_t route_room(const RouteArgs& a) { return round_up(a.num_experts, 2); }

INLINE void route_row(const RouteArgs& a, int64_t row, char* scratch) {
  const int64_t room = route_room(a);
  float *scores = (float*)scratch, *ranking = scores + room, *best = ranking + room, *of_groups = best + room;
  int64_t* indices = (int64_t*)(of_groups + room);
  const float* logits = a.logits + row * a.num_experts;
  a.sigmoid ? squash(logits, a.num_experts, scores) : soften(logits, a.num_experts, scores);
  for (int64_t i = 0; i < a.num_experts; ++i) ranking[i] = a.bias ? scores[i] + a.bias[i] : scores[i];
  if (a.num_groups) limit_groups(a, ranking, of_groups, best, indices);
  int64_t* experts = a.experts + row * a.top_k;
  float* weights = a.weights + row * a.top_k;
  best_of(ranking, a.num_experts, a.top_k, experts, best);
  float total = 0;
  for (int64_t rank = 0; rank < a.top_k; ++rank) weights[rank] = scores[experts[rank]], total += weights[rank];
  for (int64_t rank = 0; rank < a.top_k; ++rank)
    weights[rank] = (a.normalize ? weights[rank] / (total + 1e-20f) : weights[rank]) * a.scale;
}

void route(const RouteArgs& a, const Region& region) {
  for (int64_t first; (first = next_task(region) * ROUTE_ROWS) < a.num_rows;)
    for (int64_t row = first; row < smaller(first + ROUTE_ROWS, a.num_rows); ++row) route_row(a, row, region.scratch);
}

int64_t route_scratch(const RouteArgs& a) { return route_room(a) * (4 * sizeof(float) + sizeof(int64_t)); }
