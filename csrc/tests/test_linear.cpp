#include "check.h"
#include "huge_pages.h"
#include "packing.h"

namespace lora_serve::tests {
namespace {

struct Shape {
  size_t rows, in_features, out_features;
};

constexpr Shape kShapes[] = {{1, 1, 1},     {1, 16, 16},   {2, 7, 5},    {3, 64, 33},
                             {13, 33, 100}, {12, 896, 17}, {25, 50, 64}, {150, 96, 40},
                             {40, 257, 96}, {6, 4864, 48}, {70, 64, 40},
                             {33, 1312, 40}};

WordBuffer packed(const Array& weight, const Shape& shape, Workers& workers) {
  WordBuffer words = allocate_words(
      packed_words(shape.out_features, shape.in_features, element_bytes(weight.dtype())));
  pack_weight(weight.data(), shape.out_features, shape.in_features, weight.dtype(), words.get(),
              workers.team(true));
  return words;
}

std::vector<double> exact(const Array& x, const Array& weight, const Array& bias,
                          const Shape& shape) {
  std::vector<double> y;
  for (size_t t = 0; t < shape.rows; ++t) {
    for (size_t n = 0; n < shape.out_features; ++n) {
      double sum = bias[n];
      for (size_t k = 0; k < shape.in_features; ++k) {
        sum += x[t * shape.in_features + k] * weight[n * shape.in_features + k];
      }
      y.push_back(sum);
    }
  }
  return y;
}

constexpr Shape kGatedShapes[] = {{1, 33, 64},  {13, 64, 192},  {40, 96, 64},
                                  {70, 64, 192}, {33, 1312, 128}, {150, 64, 64}};

// The product and then the activation give the bits that both at once give; a bias or none.
void test_gated_linear(const Kernels& kernels, Dtype dtype, const Shape& shape, bool has_bias) {
  Workers three(3);
  const Case c{&kernels, dtype,
               "gated linear " + std::to_string(shape.rows) + " x " +
                   std::to_string(shape.in_features) + " -> " + std::to_string(shape.out_features)};
  const Array x = Array::random(dtype, shape.rows * shape.in_features, 1);
  const Array weight = Array::random(dtype, shape.out_features * shape.in_features, 2);
  const Array bias = Array::random(dtype, shape.out_features, 3);
  const WordBuffer words = packed(weight, shape, three);
  const size_t width = shape.out_features / 2;
  const Array both = Array::nans(dtype, shape.rows * shape.out_features);
  const void* added = has_bias ? bias.data() : nullptr;
  LinearCall call{dtype,       x.data(),   words.get(),       added,
                  both.data(), shape.rows, shape.in_features, shape.out_features};
  kernels.linear(call, three);
  for (const Gate gate : {Gate::kSilu, Gate::kGeluTanh}) {
    const auto activate = gate == Gate::kSilu ? kernels.silu_and_mul : kernels.gelu_tanh_and_mul;
    const Array expected = Array::nans(dtype, shape.rows * width);
    activate({dtype, both.data(), expected.data(), shape.rows, width}, three);
    const Array y = Array::nans(dtype, shape.rows * width);
    call.y = y.data();
    kernels.gated_linear({call, gate}, three);
    expect_same_bits(c, y, expected, "the product and then the activation have the same bits");
  }
}

}  // namespace

void test_linear(const Kernels& kernels, Dtype dtype) {
  Workers three(3), one(1);
  for (const Shape& shape : kShapes) {
    const Case c{&kernels, dtype,
                 "linear " + std::to_string(shape.rows) + " x " +
                     std::to_string(shape.in_features) + " -> " +
                     std::to_string(shape.out_features)};
    const Array x = Array::random(dtype, shape.rows * shape.in_features, 1);
    const Array weight = Array::random(dtype, shape.out_features * shape.in_features, 2);
    const Array bias = Array::random(dtype, shape.out_features, 3);
    const WordBuffer words = packed(weight, shape, three);
    const auto run = [&](size_t first, size_t rows, Workers& workers, const Array& y) {
      kernels.linear(
          {dtype, x.at(first * shape.in_features), words.get(), bias.data(),
           y.at(first * shape.out_features), rows, shape.in_features, shape.out_features},
          workers);
    };
    const Array y = Array::nans(dtype, shape.rows * shape.out_features);
    run(0, shape.rows, three, y);
    expect_close(c, y, exact(x, weight, bias, shape));
    const Array alone = Array::nans(dtype, y.size());
    for (size_t t = 0; t < shape.rows; ++t) run(t, 1, one, alone);
    expect_same_bits(c, alone, y, "a row alone has the same bits");
  }
  for (const Shape& shape : kGatedShapes) {
    test_gated_linear(kernels, dtype, shape, true);
    test_gated_linear(kernels, dtype, shape, false);
  }
}

}  // namespace lora_serve::tests
