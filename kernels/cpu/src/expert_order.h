// The rows of a batch by the experts they go to.
#pragma once
#include <cstdint>
#include <tuple>
#include <vector>

typedef std::tuple<int64_t, int64_t, int64_t> Span;  // expert, where its rows begin and end

// experts [num_rows, top_k] -> rows [num_rows * top_k]: each one's row in the batch, in its order within an expert; places
// [num_rows, top_k]: where a row's own are among `rows`. The spans are of the experts that have any, in ascending order.
inline std::vector<Span> order_by_expert(const int64_t* experts, int64_t num_rows, int64_t top_k, int64_t num_experts,
                                         int64_t* rows, int64_t* places) {
  std::vector<int64_t> next(num_experts);
  for (int64_t i = 0; i < num_rows * top_k; ++i) ++next[experts[i]];
  std::vector<Span> spans;
  int64_t start = 0;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    const int64_t count = next[expert];
    if (count) spans.emplace_back(expert, start, start + count);
    next[expert] = start;
    start += count;
  }
  for (int64_t i = 0; i < num_rows * top_k; ++i) {
    const int64_t place = next[experts[i]]++;
    rows[place] = i / top_k;
    places[i] = place;
  }
  return spans;
}
