#include <cmath>

#include "check.h"

namespace lora_serve::tests {
namespace {

constexpr size_t kRows = 40;  // enough that threads share the widest

double squared_mean(const Array& x, size_t row, size_t width) {
  double sum = 0;
  for (size_t d = 0; d < width; ++d) sum += x[row * width + d] * x[row * width + d];
  return sum / static_cast<double>(width);
}

void test_norm(const Kernels& kernels, Dtype dtype, size_t width) {
  const Case c{&kernels, dtype, "norm of width " + std::to_string(width)};
  Workers three(3), one(1);
  const Array x = Array::random(dtype, kRows * width, 1);
  const Array residual = Array::random(dtype, kRows * width, 2);
  const Array weight = Array::random(dtype, width, 3);
  Array sums(dtype, x.size());
  for (size_t i = 0; i < x.size(); ++i) sums.set(i, x[i] + residual[i]);

  const Array y = Array::nans(dtype, x.size());
  kernels.norm({dtype, {x.data(), width}, 1, residual.data(), weight.data(), y.data(), kRows, width,
                1e-5f},
               three);
  expect_same_bits(c, residual, sums, "the residual is the rounded sum");
  std::vector<double> exact;
  for (size_t t = 0; t < kRows; ++t) {
    const double root = std::sqrt(squared_mean(sums, t, width) + 1e-5);
    for (size_t d = 0; d < width; ++d) exact.push_back(sums[t * width + d] / root * weight[d]);
  }
  expect_close(c, y, exact);

  const Array alone = Array::nans(dtype, x.size());
  for (size_t t = 0; t < kRows; ++t) {
    kernels.norm({dtype, {sums.at(t * width), width}, 1, nullptr, weight.data(),
                  alone.at(t * width), 1, width, 1e-5f},
                 one);
  }
  expect_same_bits(c, alone, y, "a row is normed by itself");
}

// Of kTokens fused rows, heads 1 to kHeads are normed, the last of which ends where memory does.
void test_norm_of_heads(const Kernels& kernels, Dtype dtype, size_t width) {
  constexpr size_t kTokens = 10, kHeads = 4;
  const Case c{&kernels, dtype, "norm of heads of width " + std::to_string(width)};
  Workers three(3);
  const size_t stride = (kHeads + 1) * width;
  const Array fused = Array::random(dtype, kTokens * stride, 1);
  const Array weight = Array::random(dtype, width, 3);
  Array rows(dtype, kTokens * kHeads * width);
  for (size_t i = 0; i < rows.size(); ++i) {
    rows.set(i, fused[i / (kHeads * width) * stride + width + i % (kHeads * width)]);
  }
  const auto norm = [&](TokenRows x, size_t heads) {
    Array y = Array::nans(dtype, rows.size());
    kernels.norm({dtype, x, heads, nullptr, weight.data(), y.data(), kTokens * kHeads, width, 1e-5f},
                 three);
    return y;
  };
  expect_same_bits(c, norm({fused.at(width), stride}, kHeads), norm({rows.data(), width}, 1),
                   "heads inside fused rows give the bits of rows by themselves");
}

void test_silu(const Kernels& kernels, Dtype dtype, size_t width) {
  const Case c{&kernels, dtype, "silu of width " + std::to_string(width)};
  Workers three(3), one(1);
  Array x = Array::random(dtype, kRows * 2 * width, 1);
  x.set(0, -1e4);  // far beyond where exp overflows
  const Array y = Array::nans(dtype, kRows * width);
  kernels.silu_and_mul({dtype, x.data(), y.data(), kRows, width}, three);
  std::vector<double> exact;
  for (size_t i = 0; i < y.size(); ++i) {
    const size_t at = i / width * 2 * width + i % width;
    exact.push_back(x[at] / (1 + std::exp(-x[at])) * x[at + width]);
  }
  expect_close(c, y, exact);
  const Array alone = Array::nans(dtype, y.size());
  for (size_t t = 0; t < kRows; ++t) {
    kernels.silu_and_mul({dtype, x.at(t * 2 * width), alone.at(t * width), 1, width}, one);
  }
  expect_same_bits(c, alone, y, "a row is gated by itself");
}

}  // namespace

void test_rowwise(const Kernels& kernels, Dtype dtype) {
  for (const size_t width : {1, 15, 16, 100, 896}) {
    test_norm(kernels, dtype, width);
    test_norm_of_heads(kernels, dtype, width);
    test_silu(kernels, dtype, width);
  }
}

}  // namespace lora_serve::tests
