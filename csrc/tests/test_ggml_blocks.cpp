// What blocks hold is tested against the format's own package, in Python. Here: that nothing else
// is read or written, that floats are what codes and numbers give, and that threads change nothing.

#include <cmath>
#include <cstring>

#include "check.h"
#include "ggml_blocks.h"

namespace lora_serve::tests {
namespace {

struct Type {
  const char* name;
  size_t num_bytes, values, group;
  bool has_offsets;
  int bits;
};

constexpr Type kTypes[] = {
    {"Q4_0", 18, 32, 32, false, 4},   {"Q4_1", 20, 32, 32, true, 4},
    {"Q5_0", 22, 32, 32, false, 8},   {"Q5_1", 24, 32, 32, true, 8},
    {"Q8_0", 34, 32, 32, false, 8},   {"Q4_K", 144, 256, 32, true, 4},
    {"Q5_K", 176, 256, 32, true, 8},  {"Q6_K", 210, 256, 16, false, 8},
};

struct Unpacked {
  std::vector<int8_t> codes;
  std::vector<float> scales, offsets, weights;
};

Unpacked unpacked(const Type& type, const std::vector<uint8_t>& blocks, int num_threads) {
  Workers workers(num_threads);
  const size_t count = blocks.size() / type.num_bytes, values = count * type.values;
  const size_t groups = values / type.group;
  Unpacked to{std::vector<int8_t>(values), std::vector<float>(groups),
              std::vector<float>(type.has_offsets ? groups : 0), std::vector<float>(values)};
  const Team team = workers.team(true);
  float* offsets = type.has_offsets ? to.offsets.data() : nullptr;
  unpack_blocks(type.name, blocks.data(), count, {to.codes.data(), to.scales.data(), offsets},
                team);
  dequantize_blocks(type.name, blocks.data(), count, Dtype::kFloat32, to.weights.data(), team);
  return to;
}

}  // namespace

void test_ggml_blocks() {
  for (const Type& type : kTypes) {
    const Case c{nullptr, Dtype::kFloat32, std::string("blocks of ") + type.name};
    std::vector<uint8_t> blocks(600 * type.num_bytes);
    uint32_t state = 1;
    for (uint8_t& byte : blocks) {
      state = state * 1664525u + 1013904223u;
      byte = static_cast<uint8_t>(state >> 24 & 0x3b);  // no scale is infinite or NaN
    }
    const Unpacked one = unpacked(type, blocks, 1), three = unpacked(type, blocks, 3);
    expect(c, one.codes == three.codes && one.scales == three.scales &&
                  one.offsets == three.offsets && one.weights == three.weights,
           "threads change no bit");
    bool are_close = true, are_in_range = true;
    for (size_t i = 0; i < one.codes.size(); ++i) {
      const size_t g = i / type.group;
      const double offset = type.has_offsets ? one.offsets[g] : 0.0;
      const double weight = static_cast<double>(one.scales[g]) * one.codes[i] + offset;
      const double room = 1e-6 * (8.0 * std::fabs(one.scales[g]) + std::fabs(offset));
      are_close = are_close && std::fabs(weight - one.weights[i]) <= room;
      are_in_range = are_in_range && (type.bits == 8 || std::abs(2 * one.codes[i] + 1) <= 15);
    }
    expect(c, are_close, "codes and numbers give the weights");
    expect(c, are_in_range, "codes are in the range of their bits");
  }
}

}  // namespace lora_serve::tests
