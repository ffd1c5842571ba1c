// The system's ids of a pool's threads, by which somebody else may pin them to cores.

#pragma once

#include <vector>

#include "thread_pool.h"

namespace lora_serve {

// Of the caller and of each thread of the pool, in their order; empty where there are no such ids.
std::vector<int> thread_ids(ThreadPool& pool);

}  // namespace lora_serve
