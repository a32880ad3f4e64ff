// Several products of one kind in one region: rows of a mixture's experts, or of the heads of latent attention.
//
// Each is the product of linear.h, by the same tasks and the same chains of additions, so its bits are those of a call of its
// own. Tasks are dealt out over all of them in order: none is too small for several threads, and no thread waits in between.
#pragma once

template <typename T>
void linear_each(const LinearEachArgs& a, const Region& region) {
  int64_t num_tasks = 0;
  for (int64_t i = 0; i < a.count; ++i) num_tasks += LinearPlan<T>(a.each[i], region.num_threads).num_tasks;
  if (!num_tasks) return;
  LinearScope scope;
  int64_t at = 0, first_task = 0;  // tasks are dealt in ascending order, so nobody looks back
  LinearPlan<T> plan(a.each[0], region.num_threads);
  each_task(region, num_tasks, [&](int64_t task) {
    while (task >= first_task + plan.num_tasks) {
      first_task += plan.num_tasks;
      plan = LinearPlan<T>(a.each[++at], region.num_threads);
    }
    linear_task(a.each[at], plan, task - first_task, (float*)region.scratch, scope);
  });
}

template <typename T>
int64_t linear_each_scratch(const LinearEachArgs& a) {
  int64_t bytes = 0;
  for (int64_t i = 0; i < a.count; ++i) bytes = larger(bytes, linear_scratch<T>(a.each[i]));
  return bytes;
}
