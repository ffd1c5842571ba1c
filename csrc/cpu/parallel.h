// Sharing tasks among OpenMP threads. A task writes its own outputs and nothing else, so results
// cannot depend on how many threads there are or which of them takes what.

#pragma once

#include <cstddef>
#include <cstdint>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace lora_serve::LORA_SERVE_PATH {

// Calls run(task, thread) for every task in [0, num_tasks), in ascending order of start. One thread
// wakes nobody.
template <class Run>
inline void for_each_task(int num_threads, size_t num_tasks, const Run& run) {
#ifdef _OPENMP
  if (num_threads > 1 && num_tasks > 1) {
    size_t next = 0;
#pragma omp parallel num_threads(num_threads)
    {
      const int thread = omp_get_thread_num();
      for (;;) {
        const size_t task = __atomic_fetch_add(&next, size_t{1}, __ATOMIC_RELAXED);
        if (task >= num_tasks) break;
        run(task, thread);
      }
    }
    return;
  }
#endif
  for (size_t task = 0; task < num_tasks; ++task) run(task, 0);
}

struct Range {
  size_t begin, end;
};

// Part `index` of [0, size) cut into num_parts nearly equal ranges.
static inline Range part_of(size_t size, size_t num_parts, size_t index) {
  return {size * index / num_parts, size * (index + 1) / num_parts};
}

}  // namespace lora_serve::LORA_SERVE_PATH
