// y[n] = x[n] * weight / sqrt(mean over d of x[n][d]^2 + eps)        N rows, D width
//
// The weight has x's type, or is float. In float, rounded once.
// With a residual, residual[n] += x[n] is rounded to its type first and then normalised. Squares
// are summed in 16 lanes over ascending d, lanes in reduce_add's tree: the order depends on D only.

#pragma once

#include <cmath>

#include "kernels.h"
#include "parallel.h"
#include "vectors.h"

namespace lora_serve::LORA_SERVE_PATH {

template <class T, class W>
static void norm_row(const T* x, const W* weight, size_t width, float eps, T* y) {
  F32x16 squares = zero();
  for_each_vector(width, [&](size_t d, auto n) {
    const F32x16 v = load_lanes(x + d, n);
    squares = fma(v, v, squares);
  });
  const float mean = reduce_add(squares) / static_cast<float>(width);
  const F32x16 factor = broadcast(1.0f / std::sqrt(mean + eps));
  for_each_vector(width, [&](size_t d, auto n) {
    const F32x16 v = mul(load_lanes(x + d, n), factor);
    store_lanes(y + d, mul(v, load_lanes(weight + d, n)), n);
  });
}

template <class T>
static void add_row(const T* x, size_t width, T* residual) {
  for_each_vector(width, [&](size_t d, auto n) {
    store_lanes(residual + d, add(load_lanes(residual + d, n), load_lanes(x + d, n)), n);
  });
}

template <class T, class W>
static void norm_rows(const NormCall& call, Workers& workers) {
  const Team team = workers.team(call.rows * call.width >= kParallelElements);
  const size_t num_tasks = tasks_of_rows(team);
  for_each_task(team, num_tasks, [&](size_t task, int) {
    const Range rows = part_of(call.rows, num_tasks, task);
    for (size_t r = rows.begin; r < rows.end; ++r) {
      const T* x = static_cast<const T*>(call.x.data) + r / call.heads * call.x.stride +
                   r % call.heads * call.width;
      if (call.residual != nullptr) {
        T* residual = static_cast<T*>(call.residual) + r * call.width;
        add_row(x, call.width, residual);
        x = residual;
      }
      T* y = static_cast<T*>(call.y) + r * call.width;
      norm_row(x, static_cast<const W*>(call.weight), call.width, call.eps, y);
    }
  });
}

template <class T>
static void norm_of(const NormCall& call, Workers& workers) {
  if (call.weight_dtype == Dtype::kFloat32) return norm_rows<T, float>(call, workers);
  norm_rows<T, T>(call, workers);
}

}  // namespace lora_serve::LORA_SERVE_PATH
