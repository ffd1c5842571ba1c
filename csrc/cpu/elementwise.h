// x[i] = f(x[i]) in place        scale: f(x) = factor x        soft_cap: factor tanh(x / factor)
//                                gelu_tanh: as activation.h has it
// residual[i] += x[i]            add
//
// In float, rounded once.

#pragma once

#include "exponential.h"
#include "kernels.h"
#include "parallel.h"
#include "vectors.h"

namespace lora_serve::LORA_SERVE_PATH {

// run(i, n) for the vectors of [0, size), among threads.
template <class Run>
static void for_all_vectors(size_t size, Workers& workers, const Run& run) {
  const Team team = workers.team(size >= kParallelElements);
  const size_t num_tasks = tasks_of_rows(team);
  for_each_task(team, num_tasks, [&](size_t task, int) {
    const Range vectors = part_of(ceil_div(size, kLanes), num_tasks, task);
    const size_t begin = vectors.begin * kLanes, end = vectors.end * kLanes;
    for_each_vector((end < size ? end : size) - begin,
                    [&](size_t i, auto n) { run(begin + i, n); });
  });
}

template <class T, class Function>
static void change_elements(const ElementwiseCall& call, Workers& workers, const Function& f) {
  T* x = static_cast<T*>(call.x);
  for_all_vectors(call.size, workers,
                  [&](size_t i, auto n) { store_lanes(x + i, f(load_lanes(x + i, n)), n); });
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

template <class T>
static void gelu_tanh_of(const ElementwiseCall& call, Workers& workers) {
  change_elements<T>(call, workers, [](F32x16 x) { return gelu_tanh(x); });
}

template <class T>
static void add_of(const AddCall& call, Workers& workers) {
  const T* x = static_cast<const T*>(call.x);
  T* residual = static_cast<T*>(call.residual);
  for_all_vectors(call.size, workers, [&](size_t i, auto n) {
    store_lanes(residual + i, add(load_lanes(residual + i, n), load_lanes(x + i, n)), n);
  });
}

}  // namespace lora_serve::LORA_SERVE_PATH
