// Several products of one kind in one region: rows of a mixture's experts, or of the heads of latent attention.
//
// Each is the product of linear.h, by the same tasks and the same chains of additions, so its bits are those of a call of its
// own. Tasks are dealt out over all of them in order: none is too small for several threads, and no thread waits in between.
#pragma once

template <typename T>
void linear_each(const LinearEachArgs& a, const Region& region) {
  LinearScope scope;
  int64_t at = 0, first_task = 0;  // tasks are dealt in ascending order, so nobody looks back
  if (!a.count) return;
  LinearPlan<T> plan(a.each[0], region.num_threads);
  for (;;) {
    const int64_t task = next_task(region);
    while (task >= first_task + plan.num_tasks) {
      first_task += plan.num_tasks;
      if (++at == a.count) return;
      plan = LinearPlan<T>(a.each[at], region.num_threads);
    }
    linear_task(a.each[at], plan, task - first_task, (float*)region.scratch, scope);
  }
}

template <typename T>
int64_t linear_each_scratch(const LinearEachArgs& a) {
  int64_t bytes = 0;
  for (int64_t i = 0; i < a.count; ++i) bytes = larger(bytes, linear_scratch<T>(a.each[i]));
  return bytes;
}
