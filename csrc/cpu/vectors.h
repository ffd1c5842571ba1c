// Walking a row in steps of 16 lanes, the last of which may hold fewer.

#pragma once

#include "blocks.h"

namespace lora_serve::LORA_SERVE_PATH {

// Elements below which one thread is done sooner than two. Zen 4, 2 cores, November 2026: 32 K
// elements take 3 us.
constexpr size_t kParallelElements = 32 << 10;

// A few to a thread, so that one that is late leaves little behind.
static inline size_t tasks_of_rows(Team team) {
  return team.num_threads == 1 ? 1 : static_cast<size_t>(team.num_threads) * 4;
}

// run(d, n) for d = 0, 16, ... below width; n lanes, a compile-time 16 except at the end.
template <class Run>
SIMD_INLINE void for_each_vector(size_t width, const Run& run) {
  size_t d = 0;
  for (; d + kLanes <= width; d += kLanes) run(d, Count<kLanes>());
  if (d < width) run(d, static_cast<int>(width - d));
}

template <class T>
SIMD_INLINE F32x16 load_lanes(const T* p, Count<kLanes>) {
  return load(p);
}
template <class T>
SIMD_INLINE F32x16 load_lanes(const T* p, int n) {
  return load_first(p, n);
}
template <class T>
SIMD_INLINE void store_lanes(T* p, F32x16 x, Count<kLanes>) {
  store(p, x);
}
template <class T>
SIMD_INLINE void store_lanes(T* p, F32x16 x, int n) {
  store_first(p, x, n);
}

}  // namespace lora_serve::LORA_SERVE_PATH
