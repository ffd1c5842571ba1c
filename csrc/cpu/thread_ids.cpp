#include "thread_ids.h"

#include <atomic>

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace lora_serve {

std::vector<int> thread_ids(ThreadPool& pool) {
#ifdef __linux__
  struct Roll {
    std::vector<int> ids;
    std::atomic<size_t> num_here{0};
  } roll;
  roll.ids.resize(static_cast<size_t>(pool.num_threads()));
  const ThreadPool::Body body = [](const void* context, size_t, int thread) {
    Roll& all = *static_cast<Roll*>(const_cast<void*>(context));
    all.ids[static_cast<size_t>(thread)] = static_cast<int>(syscall(SYS_gettid));
    all.num_here.fetch_add(1);
    // A thread that waits here takes no second task, so that each gets one.
    while (all.num_here.load() < all.ids.size()) std::this_thread::yield();
  };
  pool.run(roll.ids.size(), body, &roll);
  return roll.ids;
#else
  (void)pool;
  return {};
#endif
}

}  // namespace lora_serve
