#include <random>

#include "check.h"
#include "huge_pages.h"
#include "quantized_weight.h"

namespace lora_serve::tests {
namespace {

struct Shape {
  size_t rows, in_features, out_features, group;
};

constexpr Shape kShapes[] = {{1, 1, 1, 32},    {2, 7, 5, 32},     {3, 64, 33, 32},
                             {13, 130, 100, 128}, {30, 300, 64, 128}, {250, 48, 20, 16}};

// Codes and scales as they are before they are packed, exactly as long as they are.
struct Codes {
  QuantizedShape shape;
  std::vector<int8_t> codes;
  Array scales;  // bfloat16

  Codes(int bits, const Shape& s)
      : shape{bits, s.group, s.out_features, s.in_features},
        codes(s.out_features * s.in_features),
        scales(Array::random(Dtype::kBfloat16, s.out_features * shape.groups(), 2)) {
    std::mt19937 generator(7);
    std::uniform_int_distribution<int> code(bits == 8 ? -127 : -8, bits == 8 ? 127 : 7);
    for (int8_t& c : codes) c = static_cast<int8_t>(code(generator));
  }

  double weight(size_t n, size_t k) const {
    return scales[n * shape.groups() + k / shape.group] * codes[n * shape.in_features + k];
  }
};

std::vector<double> exact(const Array& x, const Codes& codes, const Array& bias, size_t rows) {
  const QuantizedShape& shape = codes.shape;
  std::vector<double> y;
  for (size_t t = 0; t < rows; ++t) {
    for (size_t n = 0; n < shape.out_features; ++n) {
      double sum = bias[n];
      for (size_t k = 0; k < shape.in_features; ++k) {
        sum += x[t * shape.in_features + k] * codes.weight(n, k);
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
  const Codes codes(bits, s);
  const WordBuffer packed = allocate_words(codes.shape.packed_words());
  pack_quantized(codes.codes.data(), static_cast<const Bfloat16*>(codes.scales.data()),
                 codes.shape, packed.get(), three.team(true));
  const Array x = Array::random(dtype, s.rows * s.in_features, 1);
  const Array bias = Array::random(dtype, s.out_features, 3);
  const auto run = [&](size_t first, size_t rows, Workers& workers, const Array& y) {
    kernels.quantized_linear(
        {{dtype, x.at(first * s.in_features), nullptr, bias.data(), y.at(first * s.out_features),
          rows, s.in_features, s.out_features},
         {codes.shape, packed.get()},
         activations},
        workers);
  };
  const Array y = Array::nans(dtype, s.rows * s.out_features);
  run(0, s.rows, three, y);
  if (!activations) expect_close(c, y, exact(x, codes, bias, s.rows));
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
