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

}  // namespace

void test_thread_pool() {
  for (const int num_threads : {1, 2, 3, 7}) {
    const Case c{nullptr, Dtype::kFloat32, "pool of " + std::to_string(num_threads)};
    ThreadPool pool(num_threads);
    bool once = true;
    for (size_t call = 0; call < 3000; ++call) once = each_ran_once(pool, call % 40) && once;
    expect(c, once, "every task runs once");
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // its threads are asleep by now
    expect(c, each_ran_once(pool, 100), "sleeping threads wake");
  }
}

}  // namespace lora_serve::tests
