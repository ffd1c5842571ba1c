// The system's ids of a pool's threads, by which another library may pin them to cores.

#pragma once

#include <vector>

#include "thread_pool.h"

namespace lora_serve {

// Ids of the caller and of each thread of the pool, in their order; empty where there are none.
std::vector<int> thread_ids(ThreadPool& pool);

}  // namespace lora_serve
