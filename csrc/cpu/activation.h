// y[t][i] = f(x[t][i]) * x[t][I + i]        T rows, I width, f = silu or gelu_tanh
//
// In float, rounded once.

#pragma once

#include "exponential.h"
#include "norm.h"

namespace lora_serve::LORA_SERVE_PATH {

template <class T, class Activation>
static void gate_row(const T* gate, size_t begin, size_t end, size_t width, T* y,
                     const Activation& activation) {
  for_each_vector(end - begin, [&](size_t i, auto n) {
    const F32x16 up = load_lanes(gate + width + begin + i, n);
    store_lanes(y + begin + i, mul(activation(load_lanes(gate + begin + i, n)), up), n);
  });
}

// Cut along rows and columns both: at one row a wide layer is worth sharing too.
template <class T, class Activation>
static void gate_rows(const ActivationCall& call, Workers& workers, const Activation& activation) {
  const Team team = workers.team(call.rows * call.width >= kParallelElements);
  const size_t num_tasks = tasks_of_rows(team);
  const size_t vectors = ceil_div(call.width, kLanes);
  for_each_task(team, num_tasks, [&](size_t task, int) {
    const Range all = part_of(call.rows * vectors, num_tasks, task);
    for (size_t at = all.begin; at < all.end;) {
      const size_t row = at / vectors;
      const size_t row_end = (row + 1) * vectors < all.end ? (row + 1) * vectors : all.end;
      const size_t end = (row_end - row * vectors) * kLanes;
      gate_row(static_cast<const T*>(call.x) + row * 2 * call.width, (at - row * vectors) * kLanes,
               end < call.width ? end : call.width, call.width,
               static_cast<T*>(call.y) + row * call.width, activation);
      at = row_end;
    }
  });
}

template <class T>
static void silu_and_mul_of(const ActivationCall& call, Workers& workers) {
  gate_rows<T>(call, workers, [](F32x16 x) { return silu(x); });
}

template <class T>
static void gelu_tanh_and_mul_of(const ActivationCall& call, Workers& workers) {
  gate_rows<T>(call, workers, [](F32x16 x) { return gelu_tanh(x); });
}

}  // namespace lora_serve::LORA_SERVE_PATH
