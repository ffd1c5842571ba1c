// y[t][i] = silu(x[t][i]) * x[t][I + i]        T rows, I width
//
// In float, rounded once.

#pragma once

#include "exponential.h"
#include "norm.h"

namespace lora_serve::LORA_SERVE_PATH {

template <class T>
static void silu_and_mul_row(const T* gate, size_t begin, size_t end, size_t width, T* y) {
  for_each_vector(end - begin, [&](size_t i, auto n) {
    const F32x16 up = load_lanes(gate + width + begin + i, n);
    store_lanes(y + begin + i, mul(silu(load_lanes(gate + begin + i, n)), up), n);
  });
}

// Cut along rows and columns both: at one row a wide layer is worth sharing too.
template <class T>
static void silu_and_mul_of(const SiluCall& call, Workers& workers) {
  const Team team = workers.team(call.rows * call.width >= kParallelElements);
  const size_t num_tasks = tasks_of_rows(team);
  const size_t vectors = ceil_div(call.width, kLanes);
  for_each_task(team, num_tasks, [&](size_t task, int) {
    const Range all = part_of(call.rows * vectors, num_tasks, task);
    for (size_t at = all.begin; at < all.end;) {
      const size_t row = at / vectors;
      const size_t row_end = (row + 1) * vectors < all.end ? (row + 1) * vectors : all.end;
      const size_t end = (row_end - row * vectors) * kLanes;
      silu_and_mul_row(static_cast<const T*>(call.x) + row * 2 * call.width,
                       (at - row * vectors) * kLanes, end < call.width ? end : call.width,
                       call.width, static_cast<T*>(call.y) + row * call.width);
      at = row_end;
    }
  });
}

}  // namespace lora_serve::LORA_SERVE_PATH
