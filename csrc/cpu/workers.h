// What a kernel may use besides its arguments: threads, and memory to work in.

#pragma once

#include "scratch.h"
#include "thread_pool.h"

namespace lora_serve {

// The threads that share a call's tasks.
struct Team {
  ThreadPool* pool;
  int num_threads;
};

// One caller at a time.
struct Workers {
  explicit Workers(int num_threads) : pool(num_threads) {}

  // All threads, or, where that costs more than it brings, the caller alone.
  Team team(bool worth_sharing) { return {&pool, worth_sharing ? pool.num_threads() : 1}; }

  ThreadPool pool;
  Scratch scratch;
  Scratch plan;  // what a call works out before it knows how much scratch it needs
};

}  // namespace lora_serve
