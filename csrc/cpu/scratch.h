// Memory that a kernel needs only while it runs, kept from call to call because fresh pages cost
// more than small kernels do.

#pragma once

#include <cstddef>

namespace lora_serve {

// One caller at a time. Contents do not survive the next `take`.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch();

  // 64-byte aligned, uninitialised. Throws std::bad_alloc.
  void* take(size_t bytes);

 private:
  void* memory_ = nullptr;
  size_t capacity_ = 0;
};

}  // namespace lora_serve
