#include "check.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>

#define LORA_SERVE_PATH tests
#include "simd/generic.h"

namespace lora_serve::tests {
namespace {

int failures = 0;

const char* name_of(Dtype dtype) {
  return dtype == Dtype::kFloat32 ? "float32" : dtype == Dtype::kFloat16 ? "float16" : "bfloat16";
}

// What one rounding to the type, and a few hundred in float, may move a sum of normal numbers by.
double tolerance(Dtype dtype) {
  return dtype == Dtype::kFloat32 ? 1e-5 : dtype == Dtype::kFloat16 ? 2e-3 : 1.2e-2;
}

}  // namespace

Array::Array(Dtype dtype, size_t size) : dtype_(dtype), size_(size) {
  if (posix_memalign(&data_, 64, bytes() == 0 ? 1 : bytes()) != 0) std::abort();
}
Array::Array(const Array& other) : Array(other.dtype_, other.size_) {
  std::memcpy(data_, other.data_, bytes());
}
Array::~Array() { std::free(data_); }

Array Array::random(Dtype dtype, size_t size, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal;
  Array array(dtype, size);
  for (size_t i = 0; i < size; ++i) array.set(i, normal(generator));
  return array;
}

Array Array::nans(Dtype dtype, size_t size) {
  Array array(dtype, size);
  for (size_t i = 0; i < size; ++i) array.set(i, std::numeric_limits<double>::quiet_NaN());
  return array;
}

void* Array::at(size_t index) const {
  return static_cast<char*>(data_) + index * element_bytes(dtype_);
}

double Array::operator[](size_t index) const {
  switch (dtype_) {
    case Dtype::kFloat32:
      return static_cast<const float*>(data_)[index];
    case Dtype::kFloat16:
      return widen(static_cast<const Float16*>(data_)[index]);
    case Dtype::kBfloat16:
      return widen(static_cast<const Bfloat16*>(data_)[index]);
  }
  std::abort();
}

void Array::set(size_t index, double value) {
  const float x = static_cast<float>(value);
  switch (dtype_) {
    case Dtype::kFloat32:
      static_cast<float*>(data_)[index] = x;
      return;
    case Dtype::kFloat16:
      static_cast<Float16*>(data_)[index] = narrow_to(x, Float16{});
      return;
    case Dtype::kBfloat16:
      static_cast<Bfloat16*>(data_)[index] = narrow_to(x, Bfloat16{});
      return;
  }
}

void expect(const Case& c, bool holds, const std::string& claim) {
  if (holds) return;
  ++failures;
  std::printf("%s %s %s: %s\n", c.kernels == nullptr ? "-" : c.kernels->path, name_of(c.dtype),
              c.name.c_str(), claim.c_str());
}

void expect_close(const Case& c, const Array& got, const std::vector<double>& exact) {
  double largest = 1, worst = 0;
  for (size_t i = 0; i < exact.size(); ++i) largest = std::fmax(largest, std::fabs(exact[i]));
  for (size_t i = 0; i < exact.size(); ++i) {
    const double error = std::fabs(got[i] - exact[i]);
    if (!(error <= worst)) worst = error;  // keeps NaN
  }
  expect(c, got.size() == exact.size(), "wrong size");
  expect(c, worst <= tolerance(got.dtype()) * largest,
         "off by " + std::to_string(worst) + " of " + std::to_string(largest));
}

void expect_same_bits(const Case& c, const Array& got, const Array& expected,
                      const std::string& claim) {
  expect(c, got.bytes() == expected.bytes(), claim + " (size)");
  expect(c, std::memcmp(got.data(), expected.data(), got.bytes()) == 0, claim);
}

int num_failures() { return failures; }

}  // namespace lora_serve::tests
