// Threads that share the tasks of one call at a time.
//
// A call is done when its tasks are, not when every thread has looked in: where other programs want
// the cores too, a thread that the system keeps waiting costs its share of the work, not a stop.
// The caller works as well, so a call finishes even if no other thread ever gets to run.

#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace lora_serve {

class ThreadPool {
 public:
  // The calling thread counts: num_threads - 1 are started.
  explicit ThreadPool(int num_threads);
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  ~ThreadPool();

  int num_threads() const { return static_cast<int>(threads_.size()) + 1; }

  using Body = void (*)(const void* context, size_t task, int thread);

  // Calls body(context, task, thread) once for every task in [0, num_tasks), with thread in
  // [0, num_threads); returns when all have finished. One caller at a time.
  //
  // Each thread has a part of the tasks, which it takes in ascending order: what lies behind a
  // task's memory is then for the same core, so it pays to ask for it early. A thread that has none
  // left takes the last one of another's.
  void run(size_t num_tasks, Body body, const void* context);

 private:
  void serve(int thread);
  void run_one_task(uint64_t& ticket, int thread);
  size_t take_task(int thread);
  uint64_t wait_for_tasks();

  // The call's number, and how many of its tasks are not claimed yet. A task is claimed by
  // lowering the count, which succeeds only while the call is the current one: then, and only then,
  // the fields below and the parts belong to that call until the task is counted as finished, and
  // the parts hold a task for every claim.
  static constexpr int kCountBits = 24;
  static constexpr uint64_t kCountMask = (uint64_t{1} << kCountBits) - 1;
  alignas(64) std::atomic<uint64_t> ticket_{0};
  Body body_ = nullptr;
  const void* context_ = nullptr;
  alignas(64) std::atomic<size_t> num_finished_{0};

  // The tasks of one thread that are not taken yet.
  class Part {
   public:
    void fill(size_t first, size_t end);
    // False, and no task, if there is none.
    bool take_first(size_t& task);
    bool take_last(size_t& task);

   private:
    alignas(64) std::atomic<uint64_t> range_{0};  // end << 32 | first
  };
  std::vector<Part> parts_;

  alignas(64) std::atomic<int> num_sleeping_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<bool> stop_{false};

  pid_t owner_;  // a forked child inherits the object, but not its threads
  std::vector<std::thread> threads_;
};

}  // namespace lora_serve
