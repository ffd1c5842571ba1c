#include <algorithm>
#include <cmath>
#include <cstring>

#include "check.h"
#include "huge_pages.h"
#include "quantized_weight.h"

namespace lora_serve::tests {
namespace {

struct Shape {
  size_t rows, in_features, out_features, group;
};

constexpr Shape kShapes[] = {{1, 1, 1, 32},    {2, 7, 5, 32},     {3, 64, 33, 32},
                             {13, 130, 100, 128}, {30, 300, 64, 128}, {250, 48, 20, 16},
                             {9, 112, 40, 16}, {16, 288, 40, 128}};

// The weights (N, K) that codes and scales stand for, read from where quantized_weight.h says that
// they lie.
std::vector<double> dequantized(const QuantizedWeight& packed) {
  constexpr size_t kNibbleOf[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  const QuantizedShape& shape = packed.shape;
  std::vector<double> weights;
  for (size_t n = 0; n < shape.out_features; ++n) {
    const size_t panel = n / kLanes, lane = n % kLanes;
    for (size_t k = 0; k < shape.in_features; ++k) {
      const size_t in_word = k % shape.per_unit();
      const uint32_t word = packed.codes(panel)[k / shape.per_unit() * kLanes + lane];
      const int code = shape.bits == 8
                           ? static_cast<int8_t>(word >> (8 * in_word))
                           : static_cast<int>(word >> (4 * kNibbleOf[in_word]) & 15) - 8;
      const Bfloat16 scale = packed.bfloat16_scales(panel)[k / shape.group * kLanes + lane];
      const uint32_t bits = static_cast<uint32_t>(scale.bits) << 16;
      float step;
      std::memcpy(&step, &bits, sizeof step);
      weights.push_back(code * static_cast<double>(step));
    }
  }
  return weights;
}

// Half a step, or a whole one where a code was cut, and what a rounded scale moves the largest by.
void expect_near(const Case& c, const Array& weight, const QuantizedShape& shape,
                 const std::vector<double>& codes) {
  double worst = 0;
  for (size_t i = 0; i < codes.size(); ++i) {
    const size_t row = i / shape.in_features * shape.in_features;
    const size_t group = row + (i - row) / shape.group * shape.group;
    double largest = 0;
    for (size_t j = group; j < std::min(group + shape.group, row + shape.in_features); ++j) {
      largest = std::fmax(largest, std::fabs(weight[j]));
    }
    const double most = largest * (shape.bits == 8 ? 0.51 / 127 + 0.002 : 1.02 / 8);
    worst = std::fmax(worst, std::fabs(codes[i] - weight[i]) / most);
  }
  expect(c, worst <= 1, "a weight is off by " + std::to_string(worst) + " of what is allowed");
}

std::vector<double> exact(const Array& x, const std::vector<double>& weights, const Array& bias,
                          const Shape& s) {
  std::vector<double> y;
  for (size_t t = 0; t < s.rows; ++t) {
    for (size_t n = 0; n < s.out_features; ++n) {
      double sum = bias[n];
      for (size_t k = 0; k < s.in_features; ++k) {
        sum += x[t * s.in_features + k] * weights[n * s.in_features + k];
      }
      y.push_back(sum);
    }
  }
  return y;
}

void test_shape(const Kernels& kernels, Dtype dtype, int bits, bool activations, const Shape& s) {
  const Case c{&kernels, dtype,
               std::to_string(bits) + " bits" + (activations ? " both, " : ", ") +
                   std::to_string(s.rows) + " x " + std::to_string(s.in_features) + " -> " +
                   std::to_string(s.out_features)};
  Workers three(3), one(1);
  const QuantizedShape shape{bits, s.group, s.out_features, s.in_features};
  const WordBuffer words = allocate_words(shape.packed_words());
  const QuantizedWeight packed{shape, words.get()};
  const Array weight = Array::random(dtype, s.out_features * s.in_features, 2);
  kernels.quantize({dtype, weight.data(), shape, words.get()}, three);
  const std::vector<double> codes = dequantized(packed);
  expect_near(c, weight, shape, codes);
  const Array x = Array::random(dtype, s.rows * s.in_features, 1);
  const Array bias = Array::random(dtype, s.out_features, 3);
  const auto run = [&](size_t first, size_t rows, Workers& workers, const Array& y) {
    kernels.quantized_linear(
        {{dtype, x.at(first * s.in_features), nullptr, bias.data(), y.at(first * s.out_features),
          rows, s.in_features, s.out_features},
         packed,
         activations},
        workers);
  };
  const Array y = Array::nans(dtype, s.rows * s.out_features);
  run(0, s.rows, three, y);
  if (!activations) expect_close(c, y, exact(x, codes, bias, s));
  const Array alone = Array::nans(dtype, y.size());
  for (size_t t = 0; t < s.rows; ++t) run(t, 1, one, alone);
  expect_same_bits(c, alone, y, "a row alone has the same bits");
}

}  // namespace

void test_quantized(const Kernels& kernels, Dtype dtype) {
  for (const Shape& shape : kShapes) {
    for (const int bits : {8, 4}) {
      for (const bool activations : {false, true}) {
        test_shape(kernels, dtype, bits, activations, shape);
      }
    }
  }
}

}  // namespace lora_serve::tests
