// Sharing tasks among threads. A task writes its own outputs and nothing else, so results cannot
// depend on how many threads there are or which of them takes what.

#pragma once

#include <cstddef>

#include "workers.h"

#ifdef __AMX_TILE__
#include <immintrin.h>
#endif

namespace lora_serve::LORA_SERVE_PATH {

// What a thread sets up while it works at a task, and gives back at its end.
#ifdef __AMX_TILE__
struct TaskScope {
  static inline thread_local size_t tile_rows = 0;  // 0: tiles are not configured by us

  TaskScope() { tile_rows = 0; }
  ~TaskScope() {
    if (tile_rows != 0) _tile_release();
    tile_rows = 0;
  }
};
#else
struct TaskScope {
  TaskScope() {}
};
#endif

// Calls run(task, thread) for every task in [0, num_tasks), in ascending order of start.
template <class Run>
static void for_each_task(Team team, size_t num_tasks, const Run& run) {
  if (team.num_threads > 1 && num_tasks > 1) {
    team.pool->run(
        num_tasks,
        [](const void* context, size_t task, int thread) {
          const TaskScope scope;
          (*static_cast<const Run*>(context))(task, thread);
        },
        &run);
    return;
  }
  const TaskScope scope;
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
