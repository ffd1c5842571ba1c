#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "check.h"

namespace lora_serve::tests {
namespace {

constexpr size_t kRows = 12;
constexpr size_t kMostTop = 5;

// Every filter alone and with others; memory that ends where it must.
struct Requests {
  explicit Requests(int64_t size)
      : ids{0, -1, size, size - 1, 0, size / 2}, biases{3, 1, 1, -2, 0, 9} {
    edits = {{ids, 2}, {ids + 2, 3}, {ids, 6}, {ids + 1, 4}, biases, 1.3f, 0.5f, 0.25f, true,
             bitmask, sizeof bitmask};
    const double top_ps[] = {1.0, 0.9, 0.3, 1e-12};
    const int64_t top_ks[] = {0, 3, size, 0, 1, size - 1};
    for (size_t r = 0; r < kRows; ++r) {
      const float scale = r % 5 == 0 ? 0.0f : 0.7f, min_p = r % 3 == 1 ? 0.05f : 0.0f;
      choices[r] = {{scale, min_p, top_ps[r % 4], top_ks[r % 6], r, r},
                    -1,
                    r % 2 == 0 ? static_cast<int64_t>(kMostTop) : -1,
                    r % 4 == 3 ? &edits : nullptr};
    }
  }
  int64_t ids[6];
  float biases[6];
  uint8_t bitmask[3] = {0xff, 0x53, 0x1d};
  RowEdits edits;
  RowChoice choices[kRows];
};

bool same(const RowResult& a, const RowResult& b) {
  return a.token == b.token && a.logit == b.logit && a.peak == b.peak && a.total == b.total &&
         a.rank == b.rank && a.num_top == b.num_top;
}

void test_rows(const Case& c, const Array& logits, size_t size) {
  const Requests requests(static_cast<int64_t>(size));
  Workers three(3), one(1);
  RowResult together[kRows], alone;
  TopEntry top[kRows * kMostTop], top_alone[kMostTop];
  c.kernels->sample(
      {c.dtype, logits.data(), kRows, size, requests.choices, together, top, kMostTop}, three);
  for (size_t r = 0; r < kRows; ++r) {
    const RowResult& row = together[r];
    expect(c, row.token >= 0 && row.token < static_cast<int64_t>(size), "a token there is");
    c.kernels->sample({c.dtype, logits.at(r * size), 1, size, requests.choices + r, &alone,
                       top_alone, kMostTop},
                      one);
    expect(c, same(row, alone), "a row is sampled by itself");
    for (size_t i = 0; i < row.num_top; ++i) {
      const TopEntry &entry = top[r * kMostTop + i], &before = top[r * kMostTop + (i ? i - 1 : 0)];
      expect(c, entry.token == top_alone[i].token && entry.logit == top_alone[i].logit,
             "the most likely are listed by themselves");
      expect(c, entry.logit <= before.logit, "the most likely come in order");
    }
  }
}

// What is kept is what sorting puts first: of equals, -0 and 0 among them, the lowest ids.
void test_largest(const Case& c, size_t size) {
  const float values[] = {0.0f, -0.0f, 1.5f, -3.0f, -std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::max(), 1e-45f, -1e-45f};
  std::vector<float> row(size);
  for (size_t i = 0; i < size; ++i) row[i] = values[(i * i + i / 7) % 8];
  for (const size_t k : {size_t{1}, (size + 1) / 2, size - size / 9, size}) {
    std::vector<uint32_t> sorted(size), kept(size), work(size);
    for (size_t i = 0; i < size; ++i) sorted[i] = kept[i] = static_cast<uint32_t>(i);
    select_largest(row.data(), sorted.data(), size, k);
    std::sort(sorted.begin(), sorted.begin() + static_cast<std::ptrdiff_t>(k));
    keep_largest(row.data(), kept.data(), size, k, work.data());
    for (size_t i = 0; i < k; ++i) expect(c, kept[i] == sorted[i], "the largest are kept");
  }
}

}  // namespace

void test_sampling(const Kernels& kernels, Dtype dtype) {
  for (const size_t size : {1, 2, 17, 64, 512, 700, 3001}) {
    const Case c{&kernels, dtype, "sampling of " + std::to_string(size)};
    Array logits = Array::random(dtype, kRows * size, 1);
    test_rows(c, logits, size);
    for (size_t i = 0; i < logits.size(); i += 3) {
      logits.set(i, i % 2 ? std::numeric_limits<double>::infinity() : std::nan(""));
    }
    test_rows(c, logits, size);
    test_rows(c, Array::nans(dtype, kRows * size), size);
    test_largest(c, size);
  }
}

}  // namespace lora_serve::tests
