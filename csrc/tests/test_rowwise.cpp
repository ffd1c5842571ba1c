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

void test_norm(const Kernels& kernels, Dtype dtype, Dtype weight_dtype, size_t width) {
  const Case c{&kernels, dtype,
               "norm of width " + std::to_string(width) +
                   (weight_dtype == dtype ? "" : ", its weight in float")};
  Workers three(3), one(1);
  const Array x = Array::random(dtype, kRows * width, 1);
  const Array residual = Array::random(dtype, kRows * width, 2);
  const Array weight = Array::random(weight_dtype, width, 3);
  Array sums(dtype, x.size());
  for (size_t i = 0; i < x.size(); ++i) sums.set(i, x[i] + residual[i]);

  const Array y = Array::nans(dtype, x.size());
  kernels.norm({dtype, {x.data(), width}, 1, residual.data(), weight_dtype, weight.data(), y.data(),
                kRows, width, 1e-5f},
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
    kernels.norm({dtype, {sums.at(t * width), width}, 1, nullptr, weight_dtype, weight.data(),
                  alone.at(t * width), 1, width, 1e-5f},
                 one);
  }
  expect_same_bits(c, alone, y, "a row is normed by itself");
}

// Norms heads 1 to kHeads of kTokens fused rows, the last of which ends where memory does.
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
    kernels.norm({dtype, x, heads, nullptr, dtype, weight.data(), y.data(), kTokens * kHeads, width,
                  1e-5f},
                 three);
    return y;
  };
  expect_same_bits(c, norm({fused.at(width), stride}, kHeads), norm({rows.data(), width}, 1),
                   "heads inside fused rows give the bits of rows by themselves");
}

struct Gate {
  const char* name;
  void (*kernel)(const ActivationCall&, Workers&);
  double (*activation)(double);
};

double silu(double x) { return x / (1 + std::exp(-x)); }

double gelu_tanh(double x) {
  return x / 2 * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x)));
}

void test_gate(const Kernels& kernels, Dtype dtype, const Gate& gate, size_t width) {
  const Case c{&kernels, dtype, gate.name + (" of width " + std::to_string(width))};
  Workers three(3), one(1);
  Array x = Array::random(dtype, kRows * 2 * width, 1);
  x.set(0, -1e4);  // far beyond where exp overflows
  const Array y = Array::nans(dtype, kRows * width);
  gate.kernel({dtype, x.data(), y.data(), kRows, width}, three);
  std::vector<double> exact;
  for (size_t i = 0; i < y.size(); ++i) {
    const size_t at = i / width * 2 * width + i % width;
    exact.push_back(gate.activation(x[at]) * x[at + width]);
  }
  expect_close(c, y, exact);
  const Array alone = Array::nans(dtype, y.size());
  for (size_t t = 0; t < kRows; ++t) {
    gate.kernel({dtype, x.at(t * 2 * width), alone.at(t * width), 1, width}, one);
  }
  expect_same_bits(c, alone, y, "a row is gated by itself");
}

struct Change {
  const char* name;
  void (*kernel)(const ElementwiseCall&, Workers&);
  double (*function)(double);
};

constexpr float kFactor = 0.7f;

// With a bias and without.
void test_layer_norm(const Kernels& kernels, Dtype dtype, size_t width) {
  const Case c{&kernels, dtype, "layer norm of width " + std::to_string(width)};
  Workers three(3), one(1);
  const Array x = Array::random(dtype, kRows * width, 1);
  const Array weight = Array::random(dtype, width, 2), bias = Array::random(dtype, width, 3);
  for (const void* added :
       {static_cast<const void*>(bias.data()), static_cast<const void*>(nullptr)}) {
    const Array y = Array::nans(dtype, x.size());
    kernels.layer_norm({dtype, x.data(), weight.data(), added, y.data(), kRows, width, 1e-3f},
                       three);
    std::vector<double> exact;
    for (size_t t = 0; t < kRows; ++t) {
      double mean = 0, variance = 0;
      const double size = static_cast<double>(width);
      for (size_t d = 0; d < width; ++d) mean += x[t * width + d] / size;
      for (size_t d = 0; d < width; ++d) variance += std::pow(x[t * width + d] - mean, 2) / size;
      for (size_t d = 0; d < width; ++d) {
        const double normed = (x[t * width + d] - mean) / std::sqrt(variance + 1e-3);
        exact.push_back(normed * weight[d] + (added == nullptr ? 0.0 : bias[d]));
      }
    }
    expect_close(c, y, exact);
    const Array alone = Array::nans(dtype, x.size());
    for (size_t t = 0; t < kRows; ++t) {
      kernels.layer_norm(
          {dtype, x.at(t * width), weight.data(), added, alone.at(t * width), 1, width, 1e-3f},
          one);
    }
    expect_same_bits(c, alone, y, "a row is normed by itself");
  }
}

void test_add(const Kernels& kernels, Dtype dtype, size_t width) {
  const Case c{&kernels, dtype, "add of width " + std::to_string(width)};
  Workers three(3);
  const Array x = Array::random(dtype, kRows * width, 1);
  const Array residual = Array::random(dtype, kRows * width, 2);
  Array sums(dtype, x.size());
  for (size_t i = 0; i < x.size(); ++i) sums.set(i, x[i] + residual[i]);
  kernels.add({dtype, x.data(), residual.data(), x.size()}, three);
  expect_same_bits(c, residual, sums, "the residual is the rounded sum");
}

void test_change(const Kernels& kernels, Dtype dtype, const Change& change, size_t width) {
  const Case c{&kernels, dtype, change.name + (" of width " + std::to_string(width))};
  Workers three(3), one(1);
  Array x = Array::random(dtype, kRows * width, 1);
  std::vector<double> exact;
  for (size_t i = 0; i < x.size(); ++i) {
    x.set(i, x[i] * std::pow(10.0, static_cast<double>(i % 7) - 4));
    exact.push_back(change.function(x[i]));
  }
  const Array alone = x;
  change.kernel({dtype, x.data(), x.size(), kFactor}, three);
  expect_close(c, x, exact);
  for (size_t t = 0; t < kRows; ++t) {
    change.kernel({dtype, alone.at(t * width), width, kFactor}, one);
  }
  expect_same_bits(c, alone, x, "a row is changed by itself");
}

}  // namespace

void test_rowwise(const Kernels& kernels, Dtype dtype) {
  for (const size_t width : {1, 15, 16, 100, 896}) {
    test_norm(kernels, dtype, dtype, width);
    test_norm(kernels, dtype, Dtype::kFloat32, width);
    test_norm_of_heads(kernels, dtype, width);
    test_gate(kernels, dtype, {"silu", kernels.silu_and_mul, silu}, width);
    test_gate(kernels, dtype, {"gelu", kernels.gelu_tanh_and_mul, gelu_tanh}, width);
    test_change(kernels, dtype,
                {"scale", kernels.scale, [](double x) { return kFactor * x; }}, width);
    test_change(kernels, dtype,
                {"soft cap", kernels.soft_cap,
                 [](double x) { return kFactor * std::tanh(x / kFactor); }},
                width);
    test_change(kernels, dtype, {"plain gelu", kernels.gelu_tanh, gelu_tanh}, width);
    test_layer_norm(kernels, dtype, width);
    test_add(kernels, dtype, width);
  }
}

}  // namespace lora_serve::tests
