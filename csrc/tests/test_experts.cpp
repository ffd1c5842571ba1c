#include <cmath>
#include <vector>

#include "check.h"
#include "huge_pages.h"
#include "packing.h"

namespace lora_serve::tests {
namespace {

constexpr size_t kRows = 41, kChosen = 2, kIn = 70, kOut = 37;

// The softmax of one row of logits, over all of them or over those chosen.
std::vector<double> shares(const Array& logits, size_t row, size_t num_experts,
                           const std::vector<int32_t>& ids, size_t num_chosen, bool among_chosen) {
  const auto power = [&](size_t e) { return std::exp(logits[row * num_experts + e]); };
  double total = 0;
  for (size_t e = 0; e < num_experts && !among_chosen; ++e) total += power(e);
  for (size_t j = 0; j < num_chosen && among_chosen; ++j) total += power(ids[row * num_chosen + j]);
  std::vector<double> found;
  for (size_t j = 0; j < num_chosen; ++j) found.push_back(power(ids[row * num_chosen + j]) / total);
  return found;
}

void test_choose(const Kernels& kernels, Dtype dtype, size_t num_experts, bool among_chosen) {
  const Case c{&kernels, dtype, "choosing of " + std::to_string(num_experts)};
  Workers three(3);
  const Array logits = Array::random(dtype, kRows * num_experts, 4);
  std::vector<int32_t> ids(kRows * kChosen, -1);
  const Array weights = Array::nans(Dtype::kFloat32, kRows * kChosen);
  kernels.choose({dtype, logits.data(), ids.data(), static_cast<float*>(weights.data()), kRows,
                  num_experts, kChosen, among_chosen},
                 three);
  std::vector<double> exact;
  for (size_t t = 0; t < kRows; ++t) {
    for (const double share : shares(logits, t, num_experts, ids, kChosen, among_chosen)) {
      exact.push_back(share);
    }
    const int32_t first = ids[t * kChosen], second = ids[t * kChosen + 1];
    for (size_t e = 0; e < num_experts; ++e) {
      const bool is_chosen = static_cast<int32_t>(e) == first || static_cast<int32_t>(e) == second;
      const double logit = logits[t * num_experts + e];
      expect(c, is_chosen || logit <= logits[t * num_experts + second], "the largest are chosen");
    }
  }
  expect_close({c.kernels, Dtype::kFloat32, c.name}, weights, exact);
}

void test_products(const Kernels& kernels, Dtype dtype) {
  constexpr size_t kExperts = 5;  // of which the last is never chosen
  const Case c{&kernels, dtype, "products of experts"};
  Workers three(3), one(1);
  std::vector<Array> weights;
  std::vector<WordBuffer> words;
  std::vector<Expert> experts;
  for (size_t e = 0; e < kExperts; ++e) {
    weights.push_back(Array::random(dtype, kOut * kIn, 10 + e));
    words.push_back(allocate_words(packed_words(kOut, kIn, element_bytes(dtype))));
    pack_weight(weights[e].data(), kOut, kIn, dtype, words[e].get(), three.team(true));
    experts.push_back({words[e].get(), {}, nullptr});
  }
  const Array x = Array::random(dtype, kRows * kIn, 1);
  std::vector<int32_t> ids;
  for (size_t p = 0; p < kRows * kChosen; ++p) ids.push_back(static_cast<int32_t>(p * p % 4));
  const auto run = [&](size_t first, size_t rows, Workers& workers, const Array& y) {
    kernels.experts({{dtype, x.at(first * kIn), nullptr, nullptr, y.at(first * kChosen * kOut),
                      rows * kChosen, kIn, kOut},
                     experts.data(), kExperts, ids.data() + first * kChosen, kChosen, false},
                    workers);
  };
  const Array y = Array::nans(dtype, kRows * kChosen * kOut);
  run(0, kRows, three, y);
  std::vector<double> exact;
  for (size_t p = 0; p < kRows * kChosen; ++p) {
    for (size_t n = 0; n < kOut; ++n) {
      double sum = 0;
      for (size_t k = 0; k < kIn; ++k)
        sum += x[p / kChosen * kIn + k] * weights[ids[p]][n * kIn + k];
      exact.push_back(sum);
    }
  }
  expect_close(c, y, exact);
  const Array alone = Array::nans(dtype, y.size());
  for (size_t t = 0; t < kRows; ++t) run(t, 1, one, alone);
  expect_same_bits(c, alone, y, "a row alone has the same bits");
}

void test_sums(const Kernels& kernels, Dtype dtype, size_t width) {
  const Case c{&kernels, dtype, "sums of experts of width " + std::to_string(width)};
  Workers three(3);
  const Array x = Array::random(dtype, kRows * kChosen * width, 1);
  const Array weights = Array::random(Dtype::kFloat32, kRows * kChosen, 2);
  const Array y = Array::nans(dtype, kRows * width);
  kernels.combine({dtype, x.data(), static_cast<const float*>(weights.data()), y.data(), kRows,
                   kChosen, width},
                  three);
  std::vector<double> exact;
  for (size_t i = 0; i < y.size(); ++i) {
    const size_t pair = i / width * kChosen, d = i % width;
    exact.push_back(weights[pair] * x[pair * width + d] +
                    weights[pair + 1] * x[(pair + 1) * width + d]);
  }
  expect_close(c, y, exact);

  const Array added = Array::random(dtype, y.size(), 3), gate = Array::random(dtype, kRows, 4);
  for (size_t i = 0; i < y.size(); ++i) {
    exact[i] = y[i] + added[i] / (1 + std::exp(-gate[i / width]));
  }
  kernels.add_gated({dtype, added.data(), gate.data(), y.data(), kRows, width}, three);
  expect_close(c, y, exact);
}

}  // namespace

void test_experts(const Kernels& kernels, Dtype dtype) {
  for (const size_t num_experts : {2, 16, 60}) {
    test_choose(kernels, dtype, num_experts, false);
    test_choose(kernels, dtype, num_experts, true);
  }
  test_products(kernels, dtype);
  for (const size_t width : {1, 16, 100}) test_sums(kernels, dtype, width);
}

}  // namespace lora_serve::tests
