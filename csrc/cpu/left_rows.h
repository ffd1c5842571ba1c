// The left side of a product as the dot wants it: rows of Left elements, whole words long.
//
// x (rows, width) of T is used as it lies where it already is that; otherwise it is widened, or
// padded with a zero, into scratch.

#pragma once

#include "parallel.h"
#include "product.h"
#include "scratch.h"
#include "vectors.h"

namespace lora_serve::LORA_SERVE_PATH {

template <class Dot>
struct LeftRows {
  const typename Dot::Left* data;
  size_t stride;
};

// Widens if Left is wider than T; elements from width to padded are zero.
template <class T, class Left>
static void copy_row(const T* from, size_t width, size_t padded, Left* to) {
  if constexpr (sizeof(T) == sizeof(Left)) {
    std::memcpy(static_cast<void*>(to), from, width * sizeof(T));
  } else {
    for_each_vector(width,
                    [&](size_t i, auto n) { store_lanes(to + i, load_lanes(from + i, n), n); });
  }
  std::memset(static_cast<void*>(to + width), 0, (padded - width) * sizeof(Left));
}

template <class T>
static constexpr size_t whole_words(size_t width) {
  return round_up(width, kPerWord<T>);
}

// padded: how long a row must be for the right side, at least width.
template <class Dot, class T>
static constexpr bool usable_as_it_lies(size_t width, size_t padded) {
  return sizeof(typename Dot::Left) == sizeof(T) && padded == width;
}

template <class Dot, class T>
static size_t left_bytes(size_t rows, size_t width, size_t padded) {
  if (usable_as_it_lies<Dot, T>(width, padded)) return 0;
  return round_up(rows * padded * sizeof(typename Dot::Left), 64);
}

template <class Dot, class T>
static size_t left_bytes(size_t rows, size_t width) {
  return left_bytes<Dot, T>(rows, width, whole_words<T>(width));
}

// `memory` has left_bytes(rows, width, padded).
template <class Dot, class T>
static LeftRows<Dot> left_rows(const T* x, size_t rows, size_t width, size_t padded, void* memory,
                               Team team) {
  using Left = typename Dot::Left;
  if (usable_as_it_lies<Dot, T>(width, padded)) return {reinterpret_cast<const Left*>(x), width};
  Left* to = static_cast<Left*>(memory);
  constexpr size_t kRowsPerTask = 32;
  for_each_task(team, ceil_div(rows, kRowsPerTask), [&](size_t task, int) {
    const size_t end = rows < (task + 1) * kRowsPerTask ? rows : (task + 1) * kRowsPerTask;
    for (size_t r = task * kRowsPerTask; r < end; ++r) {
      copy_row(x + r * width, width, padded, to + r * padded);
    }
  });
  return {to, padded};
}

template <class Dot, class T>
static LeftRows<Dot> left_rows(const T* x, size_t rows, size_t width, void* memory, Team team) {
  return left_rows<Dot>(x, rows, width, whole_words<T>(width), memory, team);
}

}  // namespace lora_serve::LORA_SERVE_PATH
