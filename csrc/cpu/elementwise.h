// x[i] = f(x[i]) in place        scale: f(x) = factor x        soft_cap: factor tanh(x / factor)
//
// In float, rounded once.

#pragma once

#include "exponential.h"
#include "kernels.h"
#include "parallel.h"
#include "vectors.h"

namespace lora_serve::LORA_SERVE_PATH {

template <class T, class Function>
static void change_elements(const ElementwiseCall& call, Workers& workers, const Function& f) {
  const Team team = workers.team(call.size >= kParallelElements);
  const size_t num_tasks = tasks_of_rows(team);
  for_each_task(team, num_tasks, [&](size_t task, int) {
    const Range vectors = part_of(ceil_div(call.size, kLanes), num_tasks, task);
    const size_t begin = vectors.begin * kLanes, end = vectors.end * kLanes;
    T* x = static_cast<T*>(call.x) + begin;
    for_each_vector((end < call.size ? end : call.size) - begin,
                    [&](size_t i, auto n) { store_lanes(x + i, f(load_lanes(x + i, n)), n); });
  });
}

template <class T>
static void scale_of(const ElementwiseCall& call, Workers& workers) {
  const F32x16 factor = broadcast(call.factor);
  change_elements<T>(call, workers, [=](F32x16 x) { return mul(x, factor); });
}

template <class T>
static void soft_cap_of(const ElementwiseCall& call, Workers& workers) {
  const F32x16 cap = broadcast(call.factor);
  change_elements<T>(call, workers, [=](F32x16 x) { return mul(cap, tanh(div(x, cap))); });
}

}  // namespace lora_serve::LORA_SERVE_PATH
