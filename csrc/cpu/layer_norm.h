// y[n] = (x[n] - mean) / sqrt(variance + eps) * weight + bias        N rows, D width
//
// mean is of x[n], variance the mean over d of (x[n][d] - mean)^2; a bias may be missing. In float,
// rounded once. Sums are of 16 lanes over ascending d, lanes in reduce_add's tree, as in norm.h.

#pragma once

#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "parallel.h"
#include "vectors.h"

namespace lora_serve::LORA_SERVE_PATH {

template <class T>
static void layer_norm_row(const T* x, const T* weight, const T* bias, size_t width, float eps,
                           T* y) {
  F32x16 sums = zero();
  for_each_vector(width, [&](size_t d, auto n) { sums = add(sums, load_lanes(x + d, n)); });
  // In memory, so that lanes beyond a row's end are 0 - 0.
  float mean[kLanes];
  std::fill_n(mean, kLanes, reduce_add(sums) / static_cast<float>(width));
  const auto centred = [&](size_t d, auto n) {
    return sub(load_lanes(x + d, n), load_lanes(mean, n));
  };
  F32x16 squares = zero();
  for_each_vector(width, [&](size_t d, auto n) {
    const F32x16 v = centred(d, n);
    squares = fma(v, v, squares);
  });
  const float variance = reduce_add(squares) / static_cast<float>(width);
  const F32x16 factor = broadcast(1.0f / std::sqrt(variance + eps));
  for_each_vector(width, [&](size_t d, auto n) {
    F32x16 v = mul(mul(centred(d, n), factor), load_lanes(weight + d, n));
    if (bias != nullptr) v = add(v, load_lanes(bias + d, n));
    store_lanes(y + d, v, n);
  });
}

template <class T>
static void layer_norm_of(const LayerNormCall& call, Workers& workers) {
  const Team team = workers.team(call.rows * call.width >= kParallelElements);
  const size_t num_tasks = tasks_of_rows(team);
  for_each_task(team, num_tasks, [&](size_t task, int) {
    const Range rows = part_of(call.rows, num_tasks, task);
    for (size_t r = rows.begin; r < rows.end; ++r) {
      layer_norm_row(static_cast<const T*>(call.x) + r * call.width,
                     static_cast<const T*>(call.weight), static_cast<const T*>(call.bias),
                     call.width, call.eps, static_cast<T*>(call.y) + r * call.width);
    }
  });
}

}  // namespace lora_serve::LORA_SERVE_PATH
