#include "check.h"
#include "huge_pages.h"
#include "packing.h"
#include "quantized_weight.h"

namespace lora_serve::tests {
namespace {

struct Shape {
  size_t rows, in_features, out_features, group;
};

constexpr Shape kShapes[] = {{1, 1, 1, 32},      {2, 7, 5, 32},    {3, 64, 533, 32},
                             {13, 130, 700, 128}, {5, 300, 961, 128}};

bool allows(const Bitmask& mask, size_t n) {
  return mask.data == nullptr || (n / 8 < mask.size && (mask.data[n / 8] >> n % 8 & 1));
}

// An LM head, and its screen.
struct Head {
  const Kernels& kernels;
  Dtype dtype;
  Shape shape;
  Array weight;
  WordBuffer packed, codes;
  std::vector<float> weight_norms, error_norms;

  Head(const Kernels& kernels, Dtype dtype, const Shape& shape, Workers& workers)
      : kernels(kernels),
        dtype(dtype),
        shape(shape),
        weight(Array::random(dtype, shape.out_features * shape.in_features, 2)),
        packed(allocate_words(
            packed_words(shape.out_features, shape.in_features, element_bytes(dtype)))),
        codes(allocate_words(quantized().packed_words())),
        weight_norms(quantized().panels() * kLanes),
        error_norms(weight_norms.size()) {
    pack_weight(weight.data(), shape.out_features, shape.in_features, dtype, packed.get(),
                workers.team(true));
    kernels.quantize({dtype, weight.data(), quantized(), codes.get()}, workers);
    kernels.screen_norms({dtype, weight.data(), {quantized(), codes.get()}, weight_norms.data(),
                          error_norms.data()},
                         workers);
  }

  QuantizedShape quantized() const {
    return {8, shape.group, shape.out_features, shape.in_features};
  }

  std::vector<int64_t> tokens_of(const Array& x, Workers& workers,
                                 const std::vector<Bitmask>& bitmasks = {},
                                 const std::vector<TokenChoice>& choices = {}) const {
    std::vector<int64_t> tokens(shape.rows);
    kernels.screened_tokens(
        {{dtype, x.data(), packed.get(), nullptr, nullptr, shape.rows, shape.in_features,
          shape.out_features},
         {{quantized(), codes.get()}, weight_norms.data(), error_norms.data()},
         bitmasks.empty() ? nullptr : bitmasks.data(),
         choices.empty() ? nullptr : choices.data(),
         tokens.data()},
        workers);
    return tokens;
  }

  // What sampling.h chooses of all outputs.
  std::vector<int64_t> drawn_of_all(const Array& x, Workers& workers,
                                    const std::vector<TokenChoice>& choices) const {
    const Array y = Array::nans(dtype, shape.rows * shape.out_features);
    kernels.linear({dtype, x.data(), packed.get(), nullptr, y.data(), shape.rows,
                    shape.in_features, shape.out_features},
                   workers);
    std::vector<RowChoice> asked;
    for (const TokenChoice& choice : choices) asked.push_back({choice, -1, -1, nullptr});
    std::vector<RowResult> results(shape.rows);
    kernels.sample({dtype, y.data(), shape.rows, shape.out_features, asked.data(),
                    results.data(), nullptr, 0},
                   workers);
    std::vector<int64_t> tokens;
    for (const RowResult& result : results) tokens.push_back(result.token);
    return tokens;
  }

  // The first of the largest of all outputs that are allowed.
  std::vector<int64_t> by_all_outputs(const Array& x, Workers& workers,
                                      const std::vector<Bitmask>& bitmasks = {}) const {
    const Array y = Array::nans(dtype, shape.rows * shape.out_features);
    kernels.linear({dtype, x.data(), packed.get(), nullptr, y.data(), shape.rows,
                    shape.in_features, shape.out_features},
                   workers);
    std::vector<int64_t> tokens;
    for (size_t t = 0; t < shape.rows; ++t) {
      int64_t best = kUndecided;
      for (size_t n = 0; n < shape.out_features; ++n) {
        if (!bitmasks.empty() && !allows(bitmasks[t], n)) continue;
        const size_t row = t * shape.out_features;
        if (best < 0 || y[row + n] > y[row + static_cast<size_t>(best)]) {
          best = static_cast<int64_t>(n);
        }
      }
      tokens.push_back(best);
    }
    return tokens;
  }
};

// Masks of all kinds side by side: each other row has none, the others allow more and more.
void test_masks(const Case& c, const Head& head, const Array& x, Workers& workers) {
  std::vector<std::vector<uint8_t>> bytes(head.shape.rows);
  std::vector<Bitmask> masks(head.shape.rows, Bitmask{nullptr, 0});
  uint32_t random = 1;
  for (size_t t = 0; t < head.shape.rows; t += 2) {
    bytes[t].resize((head.shape.out_features + 7) / 8 - t / 4 % 2);
    for (uint8_t& byte : bytes[t]) {
      random = random * 1664525 + 1013904223;
      byte = random >> 24 < 4 + 20 * t ? static_cast<uint8_t>(random >> 16) : 0;
    }
    masks[t] = {bytes[t].data(), bytes[t].size()};
  }
  const std::vector<int64_t> tokens = head.tokens_of(x, workers, masks);
  const std::vector<int64_t> expected = head.by_all_outputs(x, workers, masks);
  for (size_t t = 0; t < head.shape.rows; ++t) {
    expect(c, tokens[t] == expected[t] || tokens[t] == kUndecided, "the token that is allowed");
  }
}

// Rows of all kinds of draws side by side.
void test_draws(const Case& c, const Head& head, const Array& x, Workers& workers) {
  std::vector<TokenChoice> choices;
  for (size_t t = 0; t < head.shape.rows; ++t) {
    const float scale = t % 4 == 3 ? 0.0f : t % 2 == 0 ? 2.0f : 30.0f;
    const float min_p = t % 3 == 1 ? 0.3f : 0.0f;
    const int64_t top_k = t % 3 == 0 ? static_cast<int64_t>(1 + 2 * t) : 0;
    choices.push_back({scale, min_p, t % 5 == 2 ? 0.7 : 1.0, top_k, t, t});
  }
  const std::vector<int64_t> tokens = head.tokens_of(x, workers, {}, choices);
  const std::vector<int64_t> expected = head.drawn_of_all(x, workers, choices);
  for (size_t t = 0; t < head.shape.rows; ++t) {
    expect(c, tokens[t] == expected[t] || tokens[t] == kUndecided, "the token that is drawn");
  }
}

}  // namespace

void test_screening(const Kernels& kernels, Dtype dtype) {
  Workers three(3), one(1);
  for (const Shape& shape : kShapes) {
    const Case c{&kernels, dtype,
                 "greedy " + std::to_string(shape.rows) + " x " +
                     std::to_string(shape.in_features) + " -> " +
                     std::to_string(shape.out_features)};
    const Head head(kernels, dtype, shape, three);
    const Array x = Array::random(dtype, shape.rows * shape.in_features, 1);
    const std::vector<int64_t> tokens = head.tokens_of(x, three);
    const std::vector<int64_t> expected = head.by_all_outputs(x, three);
    for (size_t t = 0; t < shape.rows; ++t) {
      expect(c, tokens[t] == expected[t] || tokens[t] == kUndecided, "the greedy token");
    }
    expect(c, head.tokens_of(x, one) == tokens, "by one thread as by three");
    test_masks(c, head, x, three);
    test_draws(c, head, x, three);
  }
}

}  // namespace lora_serve::tests
