#include "check.h"
#include "lora_adapter.h"

namespace lora_serve::tests {
namespace {

constexpr size_t kIn = 50, kOut = 120, kRows = 40;

// Two parts, with columns 40..69 between them left alone.
struct Adapter {
  size_t ranks[2];
  Array a0, b0, a1, b1;
  LoraAdapter packed;

  Adapter(Dtype dtype, size_t rank0, size_t rank1, uint32_t seed)
      : ranks{rank0, rank1},
        a0(Array::random(dtype, rank0 * kIn, seed)),
        b0(Array::random(dtype, 40 * rank0, seed + 1)),
        a1(Array::random(dtype, rank1 * kIn, seed + 2)),
        b1(Array::random(dtype, 50 * rank1, seed + 3)),
        packed(dtype, {{},
                       {{a0.data(), b0.data(), rank0, kIn, 40, 0, 0.5f},
                        {a1.data(), b1.data(), rank1, kIn, 50, 70, 2.0f}}}) {}

  double delta(const Array& x, size_t row, size_t column) const {
    if (column < 40) return 0.5 * part(a0, b0, ranks[0], x, row, column);
    return column < 70 ? 0.0 : 2.0 * part(a1, b1, ranks[1], x, row, column - 70);
  }

  static double part(const Array& a, const Array& b, size_t rank, const Array& x, size_t row,
                     size_t column) {
    double sum = 0;
    for (size_t r = 0; r < rank; ++r) {
      double hidden = 0;
      for (size_t k = 0; k < kIn; ++k) hidden += a[r * kIn + k] * x[row * kIn + k];
      sum += hidden * b[column * rank + r];
    }
    return sum;
  }
};

struct Rows {
  size_t begin, end;
  const Adapter* adapter;
};

void run(const Kernels& kernels, const Array& x, const Array& y, const std::vector<Rows>& parts,
         size_t linear_index, Workers& workers) {
  std::vector<LoraSegment> segments;
  for (const Rows& rows : parts) {
    segments.push_back({rows.begin, rows.end, rows.adapter->packed.linears()});
  }
  const LoraPlan plan{segments.data(), segments.size()};
  kernels.lora({x.dtype(), x.data(), y.data(), &plan, linear_index, kIn, kOut}, workers);
}

}  // namespace

void test_lora(const Kernels& kernels, Dtype dtype) {
  const Case c{&kernels, dtype, "lora"};
  Workers three(3), one(1);
  const Adapter odd(dtype, 5, 1, 10), even(dtype, 16, 64, 20);
  const Array x = Array::random(dtype, kRows * kIn, 1);
  const Array base = Array::random(dtype, kRows * kOut, 2);
  const std::vector<Rows> segments = {{1, 2, &odd}, {2, 17, &even}, {20, 40, &odd}};

  std::vector<double> expected;
  for (size_t i = 0; i < base.size(); ++i) expected.push_back(base[i]);
  for (const Rows& rows : segments) {
    for (size_t t = rows.begin; t < rows.end; ++t) {
      for (size_t n = 0; n < kOut; ++n) expected[t * kOut + n] += rows.adapter->delta(x, t, n);
    }
  }
  const Array y = base;
  run(kernels, x, y, segments, 1, three);
  expect_close(c, y, expected);

  const Array alone = base;
  for (const Rows& rows : segments) {
    for (size_t t = rows.begin; t < rows.end; ++t) {
      run(kernels, x, alone, {{t, t + 1, rows.adapter}}, 1, one);
    }
  }
  expect_same_bits(c, alone, y, "a row's delta is its own");

  const Array untouched = base;
  run(kernels, x, untouched, segments, 0, three);
  expect_same_bits(c, untouched, base, "a layer without parts is left alone");
}

}  // namespace lora_serve::tests
