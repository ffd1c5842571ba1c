#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "check.h"

namespace lora_serve::tests {
namespace {

struct Shape {
  size_t num_heads, num_kv_heads, head_size, block_size, seq_len;
  int64_t window;
  float softcap;
};

constexpr Shape kShapes[] = {{1, 1, 16, 16, 1, 0, 0},    {4, 2, 32, 16, 130, 0, 0},
                             {7, 1, 64, 32, 70, 0, 0},   {3, 3, 80, 16, 65, 20, 0},
                             {2, 1, 256, 48, 100, 1, 0}, {1, 1, 16, 16, 530, 0, 0},
                             {1, 1, 16, 16, 590, 70, 0}, {2, 1, 256, 16, 90, 40, 0.5}};

// One request: its fused q, k, v rows, its blocks dealt in disorder, and a cache full of NaN.
struct Request {
  Dtype dtype;
  Shape shape;
  Array rows, cos_sin, cache;
  std::vector<int32_t> table;
  std::vector<int64_t> positions, slots;

  Request(Dtype type, const Shape& s)
      : dtype(type),
        shape(s),
        rows(Array::random(type, s.seq_len * width(), 1)),
        cos_sin(Dtype::kFloat32, s.seq_len * s.head_size),
        cache(Array::nans(type, 0)),
        table(ceil_div(s.seq_len, s.block_size)),
        positions(s.seq_len),
        slots(s.seq_len) {
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), std::mt19937(5));
    std::iota(positions.begin(), positions.end(), 0);
    for (size_t p = 0; p < s.seq_len; ++p) {
      slots[p] = static_cast<int64_t>(static_cast<size_t>(table[p / s.block_size]) * s.block_size +
                                      p % s.block_size);
      for (size_t d = 0; d < s.head_size; ++d) {
        const double angle = 0.01 * static_cast<double>(p * (d % (s.head_size / 2)));
        cos_sin.set(p * s.head_size + d, 2 * d < s.head_size ? std::cos(angle) : std::sin(angle));
      }
    }
  }

  size_t width() const { return (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size; }
  size_t cache_size() const {
    return table.size() * shape.block_size * 2 * shape.num_kv_heads * shape.head_size;
  }
  TokenRows heads_from(const Array& fused, size_t token, size_t head) const {
    return {fused.at(token * width() + head * shape.head_size), width()};
  }

  // Attention of all positions, in chunks of at most `chunk`, from an empty cache.
  Array run(const Kernels& kernels, size_t chunk, Workers& workers) const {
    const Array kv = Array::nans(dtype, cache_size());
    const Array fused = rows;
    const size_t out_width = shape.num_heads * shape.head_size;
    Array out = Array::nans(dtype, shape.seq_len * out_width);
    const KvShape kv_shape{shape.block_size, shape.num_kv_heads, shape.head_size};
    for (size_t begin = 0; begin < shape.seq_len; begin += chunk) {
      const size_t tokens = std::min(chunk, shape.seq_len - begin);
      kernels.rotary_and_write_kv(
          {dtype, heads_from(fused, begin, 0), heads_from(fused, begin, shape.num_heads),
           heads_from(fused, begin, shape.num_heads + shape.num_kv_heads),
           static_cast<const float*>(cos_sin.data()), positions.data() + begin,
           slots.data() + begin, kv.data(), kv_shape, tokens, shape.num_heads},
          workers);
      const int32_t query_start[] = {0, static_cast<int32_t>(tokens)};
      const int32_t seq_len = static_cast<int32_t>(begin + tokens);
      // Blocks that lie before all windows have no address that may be looked at.
      std::vector<int32_t> seen = table;
      for (size_t b = 0; b < table.size(); ++b) {
        const int64_t end = static_cast<int64_t>((b + 1) * shape.block_size);
        const bool is_hidden =
            shape.window > 0 && end <= static_cast<int64_t>(begin) - shape.window + 1;
        if (is_hidden) seen[b] = 1 << 24;
      }
      const AttentionPlan plan{query_start, &seq_len, seen.data(), 1, seen.size()};
      kernels.attention(
          {dtype, heads_from(fused, begin, 0), out.at(begin * out_width), kv.data(), kv_shape,
           &plan, shape.num_heads, 1 / std::sqrt(static_cast<float>(shape.head_size)), shape.window,
           shape.softcap,
           nullptr},
          workers);
    }
    return out;
  }

  // Attention of the last `count` positions as if each were a request of its own, which decodes in
  // the blocks of all of them.
  Array run_last(const Kernels& kernels, size_t count, Workers& workers) const {
    const Array kv = Array::nans(dtype, cache_size());
    const Array fused = rows;
    const KvShape kv_shape{shape.block_size, shape.num_kv_heads, shape.head_size};
    kernels.rotary_and_write_kv(
        {dtype, heads_from(fused, 0, 0), heads_from(fused, 0, shape.num_heads),
         heads_from(fused, 0, shape.num_heads + shape.num_kv_heads),
         static_cast<const float*>(cos_sin.data()), positions.data(), slots.data(), kv.data(),
         kv_shape, shape.seq_len, shape.num_heads},
        workers);
    std::vector<int32_t> query_start{0}, seq_lens, tables;
    for (size_t i = 0; i < count; ++i) {
      query_start.push_back(static_cast<int32_t>(i + 1));
      seq_lens.push_back(static_cast<int32_t>(shape.seq_len - count + i + 1));
      tables.insert(tables.end(), table.begin(), table.end());
    }
    const AttentionPlan plan{query_start.data(), seq_lens.data(), tables.data(), count,
                             table.size()};
    Array out = Array::nans(dtype, count * shape.num_heads * shape.head_size);
    kernels.attention(
        {dtype, heads_from(fused, shape.seq_len - count, 0), out.data(), kv.data(), kv_shape,
         &plan, shape.num_heads, 1 / std::sqrt(static_cast<float>(shape.head_size)), shape.window,
         shape.softcap, nullptr},
        workers);
    return out;
  }

  // Head `head` of the fused row of `token`, rotated and rounded unless it is a value.
  std::vector<double> head_of(size_t token, size_t head) const {
    const size_t size = shape.head_size, half = size / 2;
    const auto x = [&](size_t d) { return rows[token * width() + head * size + d]; };
    const auto angle = [&](size_t d) { return cos_sin[token * size + d]; };
    Array rounded(dtype, size);
    for (size_t d = 0; d < half; ++d) {
      rounded.set(d, x(d) * angle(d) - x(half + d) * angle(half + d));
      rounded.set(half + d, x(half + d) * angle(d) + x(d) * angle(half + d));
    }
    const bool is_value = head >= shape.num_heads + shape.num_kv_heads;
    std::vector<double> result;
    for (size_t d = 0; d < size; ++d) result.push_back(is_value ? x(d) : rounded[d]);
    return result;
  }

  double logit(double score) const {
    const double scaled = score / std::sqrt(static_cast<double>(shape.head_size));
    const double cap = shape.softcap;
    return cap == 0 ? scaled : cap * std::tanh(scaled / cap);
  }

  std::vector<double> exact() const {
    const size_t size = shape.head_size;
    std::vector<std::vector<double>> heads;  // of all tokens, in the order of the fused rows
    const size_t per_token = shape.num_heads + 2 * shape.num_kv_heads;
    for (size_t i = 0; i < shape.seq_len * per_token; ++i) {
      heads.push_back(head_of(i / per_token, i % per_token));
    }
    std::vector<double> out;
    for (size_t t = 0; t < shape.seq_len; ++t) {
      for (size_t h = 0; h < shape.num_heads; ++h) {
        const size_t key = shape.num_heads + h / (shape.num_heads / shape.num_kv_heads);
        const size_t window = static_cast<size_t>(shape.window);
        const size_t first = window == 0 || t < window ? 0 : t - window + 1;
        std::vector<double> sum(size);
        double total = 0;
        for (size_t j = first; j <= t; ++j) {
          double score = 0;
          for (size_t d = 0; d < size; ++d) {
            score += heads[t * per_token + h][d] * heads[j * per_token + key][d];
          }
          const double weight = std::exp(logit(score));
          total += weight;
          for (size_t d = 0; d < size; ++d) {
            sum[d] += weight * heads[j * per_token + key + shape.num_kv_heads][d];
          }
        }
        for (size_t d = 0; d < size; ++d) out.push_back(sum[d] / total);
      }
    }
    return out;
  }
};

}  // namespace

void test_attention(const Kernels& kernels, Dtype dtype) {
  Workers three(3), one(1);
  for (const Shape& shape : kShapes) {
    const Case c{&kernels, dtype,
                 "attention over " + std::to_string(shape.seq_len) + ", head size " +
                     std::to_string(shape.head_size) + ", window " + std::to_string(shape.window) +
                     ", cap " + std::to_string(shape.softcap)};
    const Request request(dtype, shape);
    const Array whole = request.run(kernels, shape.seq_len, three);
    expect_close(c, whole, request.exact());
    const size_t short_chunk = shape.seq_len < 200 ? 7 : 70;
    const size_t long_chunk = shape.seq_len - shape.seq_len / 50;
    expect_same_bits(c, request.run(kernels, short_chunk, one), whole, "in short chunks, alone");
    expect_same_bits(c, request.run(kernels, long_chunk, three), whole, "in long chunks, shared");
    const size_t count = std::min<size_t>(shape.seq_len, 12);
    const size_t width = shape.num_heads * shape.head_size;
    const Array last(dtype, count * width);
    std::memcpy(last.data(), whole.at(whole.size() - count * width), last.bytes());
    expect_same_bits(c, request.run_last(kernels, count, one), last, "as requests of its own");
    expect_same_bits(c, request.run_last(kernels, count, three), last, "of three threads");
  }
}

}  // namespace lora_serve::tests
