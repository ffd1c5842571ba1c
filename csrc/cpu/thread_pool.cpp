#include "thread_pool.h"

#include <unistd.h>

#include <cassert>

namespace lora_serve {
namespace {

// Turns of waiting before a thread sleeps, about 100 us on Zen 4: longer than the gaps between the
// kernels of a step, shorter than those between steps, where others should have the core.
constexpr int kSpinsBeforeSleep = 4000;

// Turns of waiting before the caller offers its core to the thread with the last task.
constexpr int kSpinsBeforeYield = 1000;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

constexpr size_t first_of(uint64_t range) { return range & UINT32_MAX; }
constexpr size_t end_of(uint64_t range) { return range >> 32; }

}  // namespace

void ThreadPool::Part::fill(size_t first, size_t end) {
  range_.store(uint64_t{end} << 32 | first, std::memory_order_relaxed);
}

bool ThreadPool::Part::take_first(size_t& task) {
  uint64_t range = range_.load(std::memory_order_relaxed);
  while (first_of(range) < end_of(range)) {
    task = first_of(range);
    if (range_.compare_exchange_weak(range, range + 1, std::memory_order_relaxed)) return true;
  }
  return false;
}

bool ThreadPool::Part::take_last(size_t& task) {
  constexpr uint64_t kOne = uint64_t{1} << 32;
  uint64_t range = range_.load(std::memory_order_relaxed);
  while (first_of(range) < end_of(range)) {
    task = end_of(range) - 1;
    if (range_.compare_exchange_weak(range, range - kOne, std::memory_order_relaxed)) return true;
  }
  return false;
}

ThreadPool::ThreadPool(int num_threads) : parts_(num_threads), owner_(getpid()) {
  for (int thread = 1; thread < num_threads; ++thread) {
    threads_.emplace_back([this, thread] { serve(thread); });
  }
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) {
    if (getpid() == owner_) {
      thread.join();
    } else {
      thread.detach();
    }
  }
}

void ThreadPool::run(size_t num_tasks, Body body, const void* context) {
  assert(num_tasks <= kCountMask);
  for (size_t part = 0; part < parts_.size(); ++part) {
    parts_[part].fill(num_tasks * part / parts_.size(), num_tasks * (part + 1) / parts_.size());
  }
  body_ = body;
  context_ = context;
  num_finished_.store(0, std::memory_order_relaxed);
  const uint64_t call = (ticket_.load(std::memory_order_relaxed) >> kCountBits) + 1;
  uint64_t ticket = call << kCountBits | num_tasks;
  ticket_.store(ticket);  // sequentially consistent with num_sleeping_, as in wait_for_tasks
  if (num_sleeping_.load() > 0) {
    const std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }

  while ((ticket & kCountMask) != 0) run_one_task(ticket, 0);
  for (int spins = 0; num_finished_.load(std::memory_order_acquire) != num_tasks; ++spins) {
    if (spins < kSpinsBeforeYield) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

// Runs a task if `ticket`, as last seen, is still current; either way brings it up to date.
void ThreadPool::run_one_task(uint64_t& ticket, int thread) {
  if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel,
                                     std::memory_order_acquire)) {
    return;
  }
  body_(context_, take_task(thread), thread);
  num_finished_.fetch_add(1, std::memory_order_release);
  ticket = ticket_.load(std::memory_order_acquire);
}

// The task of a claim.
size_t ThreadPool::take_task(int thread) {
  size_t task;
  if (parts_[thread].take_first(task)) return task;
  // A part that was seen empty stays empty, so one round finds a task.
  for (size_t next = thread + 1;; ++next) {
    if (parts_[next % parts_.size()].take_last(task)) return task;
  }
}

void ThreadPool::serve(int thread) {
  uint64_t ticket = 0;
  while (!stop_.load(std::memory_order_relaxed)) {
    while ((ticket & kCountMask) != 0) run_one_task(ticket, thread);
    ticket = wait_for_tasks();
  }
}

uint64_t ThreadPool::wait_for_tasks() {
  for (int spins = 0; spins < kSpinsBeforeSleep; ++spins) {
    const uint64_t ticket = ticket_.load(std::memory_order_acquire);
    if ((ticket & kCountMask) != 0 || stop_.load(std::memory_order_relaxed)) return ticket;
    pause();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  num_sleeping_.fetch_add(1);
  wake_.wait(lock, [&] { return (ticket_.load() & kCountMask) != 0 || stop_.load(); });
  num_sleeping_.fetch_sub(1);
  return ticket_.load(std::memory_order_acquire);
}

}  // namespace lora_serve
