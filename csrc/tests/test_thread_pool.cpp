#include <atomic>
#include <chrono>
#include <thread>

#include "check.h"
#include "thread_pool.h"

namespace lora_serve::tests {
namespace {

struct Counts {
  std::vector<std::atomic<int>> runs;
  explicit Counts(size_t size) : runs(size) {}
  static void count(const void* context, size_t task, int) {
    static_cast<const Counts*>(context)->count(task);
  }
  void count(size_t task) const { ++const_cast<Counts*>(this)->runs[task]; }
};

bool each_ran_once(ThreadPool& pool, size_t num_tasks) {
  Counts counts(num_tasks);
  pool.run(num_tasks, Counts::count, &counts);
  for (const auto& runs : counts.runs) {
    if (runs != 1) return false;
  }
  return true;
}

// Which tasks each thread ran, in order. The first tasks take longer, so that others help there.
struct Runs {
  std::vector<std::vector<size_t>> of_thread;
  explicit Runs(int num_threads) : of_thread(num_threads) {}
  static void note(const void* context, size_t task, int thread) {
    const_cast<Runs*>(static_cast<const Runs*>(context))->of_thread[thread].push_back(task);
    std::this_thread::sleep_for(std::chrono::microseconds(task < 7 ? 2000 : 50));
  }
};

bool own_tasks_come_first_and_ascend(ThreadPool& pool, size_t num_tasks) {
  Runs runs(pool.num_threads());
  pool.run(num_tasks, Runs::note, &runs);
  for (int thread = 0; thread < pool.num_threads(); ++thread) {
    const size_t begin = num_tasks * thread / pool.num_threads();
    const size_t end = num_tasks * (thread + 1) / pool.num_threads();
    size_t due = begin;
    for (const size_t task : runs.of_thread[thread]) {
      if (task == due) {
        ++due;
      } else if (begin <= task && task < end) {
        return false;
      } else {
        due = end;
      }
    }
  }
  return true;
}

// The first task waits for all others, of whosever part they are.
struct FirstWaits {
  size_t num_tasks;
  std::atomic<size_t> others{0};
  static void run(const void* context, size_t task, int) {
    FirstWaits& self = *const_cast<FirstWaits*>(static_cast<const FirstWaits*>(context));
    if (task > 0) {
      ++self.others;
    } else {
      while (self.others + 1 != self.num_tasks) std::this_thread::yield();
    }
  }
};

}  // namespace

void test_thread_pool() {
  for (const int num_threads : {1, 2, 3, 7}) {
    const Case c{nullptr, Dtype::kFloat32, "pool of " + std::to_string(num_threads)};
    ThreadPool pool(num_threads);
    bool once = true;
    for (size_t call = 0; call < 3000; ++call) once = each_ran_once(pool, call % 40) && once;
    expect(c, once, "every task runs once");
    expect(c, own_tasks_come_first_and_ascend(pool, 50), "a thread's own tasks come first");
    if (num_threads > 1) {
      FirstWaits waits{50};
      pool.run(waits.num_tasks, FirstWaits::run, &waits);
      expect(c, waits.others == 49, "others take what a busy thread has left");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // its threads are asleep by now
    expect(c, each_ran_once(pool, 100), "sleeping threads wake");
  }
}

}  // namespace lora_serve::tests
