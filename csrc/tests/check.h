// Random inputs, the plainest sums in double, and comparing with them.
//
// Outputs start as NaN and buffers end where they must, so that a sanitizer, or NaN, shows what a
// kernel forgets to write and what it reads too far.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels.h"

namespace lora_serve::tests {

// One array of a given type, exactly as long as its elements; 64-byte aligned like torch's.
class Array {
 public:
  Array(Dtype dtype, size_t size);
  Array(const Array& other);
  Array& operator=(const Array&) = delete;
  ~Array();

  static Array random(Dtype dtype, size_t size, uint32_t seed);
  static Array nans(Dtype dtype, size_t size);

  Dtype dtype() const { return dtype_; }
  size_t size() const { return size_; }
  void* data() const { return data_; }
  void* at(size_t index) const;
  double operator[](size_t index) const;
  void set(size_t index, double value);
  size_t bytes() const { return size_ * element_bytes(dtype_); }

 private:
  Dtype dtype_;
  size_t size_;
  void* data_;
};

// What is being tested: printed when something fails.
struct Case {
  const Kernels* kernels;
  Dtype dtype;
  std::string name;
};

// Each prints the case and the fault, and counts it.
void expect(const Case& c, bool holds, const std::string& claim);
void expect_close(const Case& c, const Array& got, const std::vector<double>& exact);
void expect_same_bits(const Case& c, const Array& got, const Array& expected,
                      const std::string& claim);
int num_failures();

void test_thread_pool();
void test_ggml_blocks();
void test_halves(const Kernels& kernels, Dtype dtype);
void test_linear(const Kernels& kernels, Dtype dtype);
void test_quantized(const Kernels& kernels, Dtype dtype);
void test_stored_codes(const Kernels& kernels, Dtype dtype);
void test_experts(const Kernels& kernels, Dtype dtype);
void test_lora(const Kernels& kernels, Dtype dtype);
void test_rowwise(const Kernels& kernels, Dtype dtype);
void test_attention(const Kernels& kernels, Dtype dtype);
void test_sampling(const Kernels& kernels, Dtype dtype);
void test_screening(const Kernels& kernels, Dtype dtype);

}  // namespace lora_serve::tests
