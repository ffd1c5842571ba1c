// q[t], k[t] turned by their position's angles; k[t] and v[t] written to slot[t] of the cache.
//
//   first half:  x1 cos - x2 sin      second half:  x2 cos + x1 sin
//
// T tokens, D head size. In float, rounded once. Layout of the cache: kv_layout.h.

#pragma once

#include "kernels.h"
#include "kv_layout.h"
#include "parallel.h"
#include "vectors.h"

namespace lora_serve::LORA_SERVE_PATH {

constexpr size_t kMaxHeadSize = 256;

// to may be x itself.
template <class T>
static void rotate(const T* x, const float* cosines, size_t head_size, T* to) {
  const size_t half = head_size / 2;
  for_each_vector(half, [&](size_t d, auto n) {
    const F32x16 cosine = load_lanes(cosines + d, n);
    const F32x16 sine = load_lanes(cosines + half + d, n);
    const F32x16 x1 = load_lanes(x + d, n);
    const F32x16 x2 = load_lanes(x + half + d, n);
    store_lanes(to + d, sub(mul(x1, cosine), mul(x2, sine)), n);
    store_lanes(to + half + d, add(mul(x2, cosine), mul(x1, sine)), n);
  });
}

template <class T>
static void write_key(const T* key, size_t head_size, T* group, size_t lane) {
  constexpr size_t kStep = kLanes * kPerWord<T>;
  for (size_t d = 0; d < head_size; d += kPerWord<T>) {
    std::memcpy(group + d / kPerWord<T> * kStep + lane * kPerWord<T>, key + d, 4);
  }
}

template <class T>
static void write_value(const T* value, size_t head_size, T* group, size_t lane) {
  T* row = group + lane / kPerWord<T> * head_size * kPerWord<T> + lane % kPerWord<T>;
  for (size_t d = 0; d < head_size; ++d) row[d * kPerWord<T>] = value[d];
}

template <class T>
static void write_token(const RotaryCall& call, const KvLayout& layout, size_t token,
                        const float* cosines) {
  const size_t slot = static_cast<size_t>(call.slots[token]);
  const size_t offset = slot % call.shape.block_size;
  T* block = static_cast<T*>(call.cache) + slot / call.shape.block_size * layout.block;
  for (size_t h = 0; h < call.shape.num_kv_heads; ++h) {
    T* keys = block + h * layout.head + offset / kLanes * layout.group;
    const size_t at = h * layout.head_size;
    T rotated[kMaxHeadSize];
    rotate(static_cast<const T*>(call.k.data) + token * call.k.stride + at, cosines,
           layout.head_size, rotated);
    write_key(rotated, layout.head_size, keys, offset % kLanes);
    write_value(static_cast<const T*>(call.v.data) + token * call.v.stride + at, layout.head_size,
                keys + layout.side, offset % kLanes);
  }
}

template <class T>
static void rotary_and_write_kv_of(const RotaryCall& call, Workers& workers) {
  const KvLayout layout(call.shape);
  const size_t heads = call.num_heads + 2 * call.shape.num_kv_heads;
  const Team team = workers.team(call.tokens * heads * layout.head_size >= kParallelElements);
  const size_t num_tasks = tasks_of_rows(team);
  for_each_task(team, num_tasks, [&](size_t task, int) {
    const Range tokens = part_of(call.tokens, num_tasks, task);
    for (size_t t = tokens.begin; t < tokens.end; ++t) {
      const float* cosines = call.cos_sin + call.positions[t] * layout.head_size;
      T* q = static_cast<T*>(call.q.data) + t * call.q.stride;
      for (size_t h = 0; h < call.num_heads; ++h) {
        rotate(q + h * layout.head_size, cosines, layout.head_size, q + h * layout.head_size);
      }
      if (call.slots[t] >= 0) write_token<T>(call, layout, t, cosines);
    }
  });
}

}  // namespace lora_serve::LORA_SERVE_PATH
