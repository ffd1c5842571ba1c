#include <cstring>

#include "check.h"
#include "halves.h"
#include "huge_pages.h"
#include "packing.h"

namespace lora_serve::tests {
namespace {

constexpr size_t kRows = 5, kHalf = 131, kInFeatures = 2 * kHalf, kOutFeatures = 32;

// Rows (a, a) or (a, -a): a product of the two leaves nothing but what rounding did to its sums, so
// that their order shows in every bit of the result.
Array doubled(Dtype dtype, size_t rows, double sign, uint32_t seed) {
  const Array half = Array::random(dtype, rows * kHalf, seed);
  Array whole(dtype, rows * kInFeatures);
  for (size_t r = 0; r < rows; ++r) {
    for (size_t k = 0; k < kHalf; ++k) {
      whole.set(r * kInFeatures + k, half[r * kHalf + k]);
      whole.set(r * kInFeatures + kHalf + k, sign * half[r * kHalf + k]);
    }
  }
  return whole;
}

}  // namespace

void test_halves(const Kernels& kernels, Dtype dtype) {
  if (dtype == Dtype::kFloat32 || std::strcmp(kernels.path, "scalar") == 0) return;
  // Tiles have another order: tests/ops/cpu/test_tiles.py.
  if (dtype == Dtype::kBfloat16 && std::strcmp(kernels.path, "amx") == 0) return;
  const Case c{&kernels, dtype, "order of a word's halves"};
  expect(c, widens_with_fma(), "the test is built with a fused multiply-add");
  const Array x = doubled(dtype, kRows, 1, 1);
  const Array weight = doubled(dtype, kOutFeatures, -1, 2);
  const WordBuffer words = allocate_words(packed_words(kOutFeatures, kInFeatures, 2));
  Workers one(1);
  pack_weight(weight.data(), kOutFeatures, kInFeatures, dtype, words.get(), one.team(false));

  const Array y = Array::nans(dtype, kRows * kOutFeatures);
  kernels.linear(
      {dtype, x.data(), words.get(), nullptr, y.data(), kRows, kInFeatures, kOutFeatures}, one);
  const auto widened = [&](Halves order) {
    const Array product = Array::nans(dtype, y.size());
    widened_product(order, dtype, x.data(), words.get(), kRows, kInFeatures, kOutFeatures,
                    product.data());
    return product;
  };
  expect_same_bits(c, widened(Halves::kUpperFirst), y, "upper first gives the bits of this path");
  const Array mutant = widened(Halves::kLowerFirst);
  expect(c, std::memcmp(mutant.data(), y.data(), y.bytes()) != 0, "lower first is noticed");
}

}  // namespace lora_serve::tests
