// What the machine can do at best, for judging the kernels in the same minute and under the same
// neighbours: the path's multiply-add from registers, and reading memory once.

#pragma once

#include "kernels.h"
#include "parallel.h"
#include "product.h"
#include "tiles.h"

namespace lora_serve::LORA_SERVE_PATH {

// Returns the floating-point operations done by all threads together.
template <class T>
static size_t multiply_only_of(size_t rounds, Workers& workers) {
  using Dot = typename DotFor<T>::Type;
  const size_t num_tasks = static_cast<size_t>(workers.pool.num_threads());
  for_each_task(workers.team(true), num_tasks, [&](size_t, int) {
    alignas(64) uint32_t words[kLanes] = {};
    typename Dot::Left left[2] = {};
    asm volatile("" : "+m"(words), "+m"(left));  // the compiler may not know that they are zero
    const auto a = Dot::left(left, 0);
    const auto b = Dot::right(load_words(words), 0);
    F32x16 acc[kMaxRows][kMaxVectors];
    for (int r = 0; r < kMaxRows; ++r) {  // all different, or they would be computed once
      for (int v = 0; v < kMaxVectors; ++v) {
        acc[r][v] = broadcast(static_cast<float>(r * kMaxVectors + v));
      }
    }
    for (size_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
      for (int r = 0; r < kMaxRows; ++r) {
#pragma GCC unroll 16
        for (int v = 0; v < kMaxVectors; ++v) acc[r][v] = Dot::multiply_add(a, b, acc[r][v]);
      }
    }
    float sum[kLanes];
    for (int r = 0; r < kMaxRows; ++r) {
      for (int v = 0; v < kMaxVectors; ++v) {
        store(sum, acc[r][v]);
        asm volatile("" : : "m"(sum));
      }
    }
  });
  constexpr size_t kPerMultiplyAdd = 2 * kLanes * kPerWord<T> / Dot::kSteps;
  return num_tasks * rounds * kMaxRows * kMaxVectors * kPerMultiplyAdd;
}

#ifdef __AMX_BF16__

template <>
size_t multiply_only_of<Bfloat16>(size_t rounds, Workers& workers) {
  const size_t num_tasks = static_cast<size_t>(workers.pool.num_threads());
  for_each_task(workers.team(true), num_tasks, [&](size_t, int) {
    configure_tiles(kRowsOfTile);
    clear_tiles<kTileColumns>();
    _tile_zero(TILE_LEFT);
    _tile_zero(TILE_RIGHT);
    for (size_t round = 0; round < rounds; ++round) {
      _tile_dpbf16ps(0, TILE_LEFT, TILE_RIGHT);
      _tile_dpbf16ps(1, TILE_LEFT, TILE_RIGHT);
      _tile_dpbf16ps(2, TILE_LEFT, TILE_RIGHT);
      _tile_dpbf16ps(3, TILE_LEFT, TILE_RIGHT);
    }
  });
  constexpr size_t kPerTile = 2 * kRowsOfTile * kLanes * kTileWords * kPerWord<Bfloat16>;
  return num_tasks * rounds * kTileColumns * kPerTile;
}

#endif

static size_t multiply_only(Dtype dtype, size_t rounds, Workers& workers) {
  switch (dtype) {
    case Dtype::kFloat32:
      return multiply_only_of<float>(rounds, workers);
    case Dtype::kFloat16:
      return multiply_only_of<Float16>(rounds, workers);
    case Dtype::kBfloat16:
      return multiply_only_of<Bfloat16>(rounds, workers);
  }
  return 0;
}

// Reads every cache line of [memory, memory + bytes) once, in the tasks and order of a product.
static void read_only(const void* memory, size_t bytes, Workers& workers) {
  const size_t lines = bytes / 64;
  const size_t num_tasks = static_cast<size_t>(workers.pool.num_threads()) * 8;
  for_each_task(workers.team(true), num_tasks, [&](size_t task, int) {
    const Range range = part_of(lines, num_tasks, task);
    F32x16 sums[4] = {zero(), zero(), zero(), zero()};
    for (size_t i = range.begin; i + 4 <= range.end; i += 4) {
#pragma GCC unroll 4
      for (size_t j = 0; j < 4; ++j) {
        const uint32_t* line = static_cast<const uint32_t*>(memory) + (i + j) * kLanes;
        sums[j] = add(sums[j], Widen<float>::element(load_words(line), 0));
      }
    }
    float sum[kLanes];
    store(sum, add(add(sums[0], sums[1]), add(sums[2], sums[3])));
    asm volatile("" : : "m"(sum));
  });
}

}  // namespace lora_serve::LORA_SERVE_PATH
