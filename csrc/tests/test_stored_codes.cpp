// Codes, scales and offsets that a checkpoint has: in which bytes they are packed, read here from
// where the heads of quantized_weight.h and group_numbers.h say that they lie; and their products.

#include <cmath>
#include <cstring>
#include <iterator>
#include <vector>

#include "check.h"
#include "huge_pages.h"
#include "quantized_weight.h"

namespace lora_serve::tests {
namespace {

struct Shape {
  size_t rows, in_features, out_features, group;
};

constexpr Shape kShapes[] = {{1, 1, 1, 32},       {2, 7, 5, 32},      {3, 64, 33, 32},
                             {13, 130, 100, 128}, {30, 600, 37, 128}, {250, 48, 20, 16},
                             {14, 544, 35, 32}};

// What scales and offsets are made of.
enum class Made { kOfFloats, kOfHalves, kOfUnits, kOfPoints };

struct Kind {
  const char* name;
  int bits, most;  // of the codes
  Made made;
  bool has_offsets;
};

constexpr Kind kKinds[] = {
    {"int8 of floats", 8, 127, Made::kOfFloats, false},
    {"int4 with minima of floats", 4, 7, Made::kOfFloats, true},
    {"Q8_0", 8, 127, Made::kOfHalves, false},
    {"Q5_1", 8, 31, Made::kOfHalves, true},
    {"Q4_1", 4, 7, Made::kOfHalves, true},
    {"Q6_K", 8, 31, Made::kOfUnits, false},
    {"Q4_K", 4, 7, Made::kOfUnits, true},
    {"Q5_K", 8, 31, Made::kOfUnits, true},
    {"AWQ", 4, 7, Made::kOfPoints, true},
    {"Q5_0", 8, 15, Made::kOfHalves, false},
};

// A float16 that is neither a bfloat16 nor a few units of another.
float half(size_t i) { return std::ldexp(static_cast<float>(1025 + 2 * (i * 389 % 511)), -17); }

struct StoredCodes {
  std::vector<int8_t> codes;
  std::vector<float> scales, offsets;
};

StoredCodes made(const Kind& kind, const QuantizedShape& shape) {
  StoredCodes weight;
  const int num_codes = kind.most == 127 ? 255 : 2 * kind.most + 2;
  for (size_t i = 0; i < shape.out_features * shape.in_features; ++i) {
    weight.codes.push_back(static_cast<int8_t>(kind.most - static_cast<int>(i * 7 % num_codes)));
  }
  const size_t groups = shape.groups(), per_block = 256 / shape.group;
  const float shift = kind.bits == 4 ? 8.0f : 0.0f;
  for (size_t i = 0; i < shape.out_features * groups; ++i) {
    const size_t g = i % groups, block = i / groups * groups + g / per_block;
    const float count = g % per_block == 0 ? 63.0f : static_cast<float>(i * 7 % 63);
    switch (kind.made) {
      case Made::kOfFloats:
        weight.scales.push_back(static_cast<float>(i % 11) * 0.00317f - 0.0107f);
        weight.offsets.push_back(static_cast<float>(i % 7) * 0.0517f - 0.0911f);
        break;
      case Made::kOfHalves:
        weight.scales.push_back(half(i));
        weight.offsets.push_back(-half(i + 5) + shift * half(i));
        break;
      case Made::kOfUnits:
        weight.scales.push_back(half(block) * count);
        weight.offsets.push_back(-(half(block + 3) * count) + shift * weight.scales.back());
        break;
      case Made::kOfPoints:
        weight.scales.push_back(half(i));
        weight.offsets.push_back(half(i) * static_cast<float>(8 - static_cast<int>(i % 16)));
    }
  }
  return weight;
}

// ── read as the heads say ───────────────────────────────────────────────────────────────────────

double value_of_half(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const double size = exponent == 0 ? std::ldexp(mantissa, -24)
                                    : std::ldexp(mantissa + 1024, exponent - 25);
  return bits >> 15 ? -size : size;
}

template <class T>
T element(const uint32_t* at, size_t index) {
  T value;
  std::memcpy(&value, reinterpret_cast<const char*>(at) + index * sizeof(T), sizeof(T));
  return value;
}

double stored_number(const QuantizedShape& shape, NumberForm form, const uint32_t* at, size_t g,
                     size_t lane) {
  const size_t index = g * kLanes + lane;
  switch (form.stored) {
    case Stored::kFloat:
      return element<float>(at, index);
    case Stored::kBytes:
      return element<int8_t>(at, index);
    case Stored::kFloat16:
      return value_of_half(element<uint16_t>(at, index));
    case Stored::kUnits: {
      const size_t block = g * shape.group / form.block;
      const uint32_t* counts = at + shape.blocks(form) * kLanes / 2;
      return value_of_half(element<uint16_t>(at, block * kLanes + lane)) *
             element<int8_t>(counts, index);
    }
    default:
      return std::nan("");
  }
}

float stored_scale(const QuantizedWeight& packed, size_t n, size_t g) {
  const uint32_t* at = packed.scales(n / kLanes);
  return static_cast<float>(
      stored_number(packed.shape, packed.shape.scales, at, g, n % kLanes));
}

float stored_offset(const QuantizedWeight& packed, size_t n, size_t g) {
  const NumberForm form = packed.shape.offsets;
  const uint32_t* at = packed.offsets(n / kLanes);
  const size_t lane = n % kLanes;
  const double scale = stored_scale(packed, n, g);
  const auto number = [&](const uint32_t* from) {
    return stored_number(packed.shape, form, from, g, lane);
  };
  if (form.stored == Stored::kFloat) return static_cast<float>(number(at));
  if (form.stored == Stored::kBytes) return static_cast<float>(number(at) * scale);
  return static_cast<float>(number(at + kLanes) + element<float>(at, lane) * scale);
}

// Bits [first, first + count) of byte `byte` of a lane's word `word`.
int bits_of(const uint32_t* unit, size_t word, size_t byte, int first, int count) {
  return static_cast<int>(unit[word * kLanes] >> (8 * byte + first)) & ((1 << count) - 1);
}

constexpr size_t kByteOf[4] = {0, 2, 1, 3};

int code_of_six_bits(const uint32_t* unit, size_t k) {
  const size_t word = k / 4, byte = kByteOf[k % 4];
  if (word < 3) return bits_of(unit, word, byte, 0, 6) - 32;
  return (bits_of(unit, 0, byte, 6, 2) | bits_of(unit, 1, byte, 6, 2) << 2 |
          bits_of(unit, 2, byte, 6, 2) << 4) -
         32;
}

int code_of_five_bits(const uint32_t* unit, size_t k) {
  const size_t four = k / 4, byte = kByteOf[k % 4];
  switch (four) {
    case 5:
      return (bits_of(unit, 0, byte, 5, 3) | bits_of(unit, 1, byte, 5, 2) << 3) - 16;
    case 6:
      return (bits_of(unit, 2, byte, 5, 3) | bits_of(unit, 3, byte, 5, 2) << 3) - 16;
    case 7:
      return (bits_of(unit, 4, byte, 5, 3) | bits_of(unit, 1, byte, 7, 1) << 3 |
              bits_of(unit, 3, byte, 7, 1) << 4) -
             16;
    default:
      return bits_of(unit, four, byte, 0, 5) - 16;
  }
}

int stored_code(const QuantizedWeight& packed, size_t n, size_t k) {
  constexpr size_t kNibbleOf[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  const uint32_t* lane = packed.codes(n / kLanes) + n % kLanes;
  if (packed.shape.bits == 8) return static_cast<int8_t>(lane[k / 4 * kLanes] >> 8 * (k % 4));
  if (packed.shape.bits == 4) {
    return static_cast<int>(lane[k / 8 * kLanes] >> 4 * kNibbleOf[k % 8] & 15) - 8;
  }
  return packed.shape.bits == 6 ? code_of_six_bits(lane + k / 16 * 3 * kLanes, k % 16)
                                : code_of_five_bits(lane + k / 32 * 5 * kLanes, k % 32);
}

bool is_packed_exactly(const QuantizedWeight& packed, const StoredCodes& weight) {
  const QuantizedShape& shape = packed.shape;
  for (size_t n = 0; n < shape.out_features; ++n) {
    for (size_t k = 0; k < shape.in_features; ++k) {
      if (stored_code(packed, n, k) != weight.codes[n * shape.in_features + k]) return false;
    }
    for (size_t g = 0; g < shape.groups(); ++g) {
      const size_t i = n * shape.groups() + g;
      if (stored_scale(packed, n, g) != weight.scales[i]) return false;
      if (shape.has_offsets() && stored_offset(packed, n, g) != weight.offsets[i]) return false;
    }
  }
  return true;
}

// ── packed and multiplied ───────────────────────────────────────────────────────────────────────

struct PackedCodes {
  QuantizedShape shape;
  WordBuffer words;

  QuantizedWeight weight() const { return {shape, words.get()}; }
};

PackedCodes pack(const Kernels& kernels, const Kind& kind, const QuantizedShape& shape,
                 const StoredCodes& weight, Workers& workers) {
  const PackCodesCall call{weight.codes.data(), weight.scales.data(),
                           kind.has_offsets ? weight.offsets.data() : nullptr, shape};
  const ExactNumbers numbers = kernels.exact_numbers(call, workers);
  PackedCodes packed{numbers.shape, allocate_words(numbers.shape.packed_words())};
  kernels.pack_codes(call, numbers, packed.words.get(), workers);
  return packed;
}

std::vector<double> exact(const Array& x, const Kind& kind, const QuantizedShape& shape,
                          const StoredCodes& weight, const Array& bias) {
  std::vector<double> y;
  for (size_t t = 0; t < x.size() / shape.in_features; ++t) {
    for (size_t n = 0; n < shape.out_features; ++n) {
      double sum = bias[n];
      for (size_t k = 0; k < shape.in_features; ++k) {
        const size_t g = n * shape.groups() + k / shape.group;
        sum += x[t * shape.in_features + k] *
               (static_cast<double>(weight.scales[g]) * weight.codes[n * shape.in_features + k] +
                (kind.has_offsets ? weight.offsets[g] : 0.0f));
      }
      y.push_back(sum);
    }
  }
  return y;
}

void test_kind(const Kernels& kernels, Dtype dtype, const Kind& kind, const Shape& s) {
  const QuantizedShape shape{kind.bits, s.group, s.out_features, s.in_features};
  const Case c{&kernels, dtype,
               std::string(kind.name) + ", " + std::to_string(s.rows) + " x " +
                   std::to_string(s.in_features) + " -> " + std::to_string(s.out_features)};
  Workers three(3), one(1);
  const StoredCodes weight = made(kind, shape);
  const PackedCodes packed = pack(kernels, kind, shape, weight, three);
  expect(c, is_packed_exactly(packed.weight(), weight), "what is packed is what was stored");
  const Array x = Array::random(dtype, s.rows * s.in_features, 1);
  const Array bias = Array::random(dtype, s.out_features, 3);
  const Array y = Array::nans(dtype, s.rows * s.out_features), alone = Array::nans(dtype, y.size());
  const auto run = [&](size_t first, size_t rows, Workers& workers, const Array& to) {
    kernels.quantized_linear(
        {{dtype, x.at(first * s.in_features), nullptr, bias.data(), to.at(first * s.out_features),
          rows, s.in_features, s.out_features},
         packed.weight(),
         false},
        workers);
  };
  run(0, s.rows, three, y);
  expect_close(c, y, exact(x, kind, shape, weight, bias));
  for (size_t t = 0; t < s.rows; ++t) run(t, 1, one, alone);
  expect_same_bits(c, alone, y, "a row alone has the same bits");
}

// ── which bytes ─────────────────────────────────────────────────────────────────────────────────

struct Expected {
  int bits;
  Stored scales, offsets;
};

// In the order of kKinds.
constexpr Expected kExpected[] = {
    {8, Stored::kFloat, Stored::kNothing},  {4, Stored::kFloat, Stored::kFloat},
    {8, Stored::kFloat16, Stored::kNothing}, {6, Stored::kFloat16, Stored::kFloat16},
    {4, Stored::kFloat16, Stored::kFloat16}, {6, Stored::kUnits, Stored::kNothing},
    {4, Stored::kUnits, Stored::kUnits},     {6, Stored::kUnits, Stored::kUnits},
    {4, Stored::kFloat16, Stored::kBytes},   {5, Stored::kFloat16, Stored::kNothing},
};

void test_forms(const Kernels& kernels) {
  constexpr size_t kOut = 37, kIn = 544, kGroup = 32;
  Workers three(3);
  for (size_t i = 0; i < std::size(kKinds); ++i) {
    const Kind& kind = kKinds[i];
    const Case c{&kernels, Dtype::kFloat32, kind.name};
    const QuantizedShape shape{kind.bits, kGroup, kOut, kIn};
    const auto form_of = [&](const StoredCodes& weight) {
      const PackedCodes packed = pack(kernels, kind, shape, weight, three);
      expect(c, is_packed_exactly(packed.weight(), weight), "what is packed is what was stored");
      return Expected{packed.shape.bits, packed.shape.scales.stored, packed.shape.offsets.stored};
    };
    const Expected& expected = kExpected[i];
    const StoredCodes weight = made(kind, shape);
    const Expected found = form_of(weight);
    expect(c, found.bits == expected.bits && found.scales == expected.scales &&
                  found.offsets == expected.offsets, "it is packed in the fewest bytes");
    // The last of all numbers is another: by as little as a float can be.
    StoredCodes odd = weight;
    odd.scales.back() = std::nextafter(odd.scales.back(), 1.0f);
    expect(c, form_of(odd).scales == Stored::kFloat, "one scale leaves all of them floats");
    odd = weight;
    odd.offsets.back() = std::nextafter(odd.offsets.back(), 1.0f);
    const Stored offsets = kind.has_offsets ? Stored::kFloat : Stored::kNothing;
    expect(c, form_of(odd).offsets == offsets, "one offset leaves all of them floats");
    odd = weight;
    odd.codes.back() = kind.bits == 8 ? 32 : 7;
    expect(c, form_of(odd).bits == kind.bits, "one code leaves all of them bytes");
  }
}

// Rows are read with the shift that they were packed with: another one is another product.
void test_shifts_are_read(const Kernels& kernels) {
  const Kind& kind = kKinds[6];
  const QuantizedShape shape{kind.bits, 32, 16, 256};
  const Case c{&kernels, Dtype::kFloat32, "shifts"};
  Workers one(1);
  const StoredCodes weight = made(kind, shape);
  const PackedCodes packed = pack(kernels, kind, shape, weight, one);
  const Array x = Array::random(Dtype::kFloat32, 256, 1);
  const auto product = [&] {
    const Array y = Array::nans(Dtype::kFloat32, 16);
    kernels.quantized_linear({{Dtype::kFloat32, x.data(), nullptr, nullptr, y.data(), 1, 256, 16},
                              packed.weight(),
                              false},
                             one);
    return y;
  };
  const Array before = product();
  uint32_t* shifts = packed.words.get() + packed.shape.scale_words();
  std::memset(shifts, 0, kLanes * sizeof(float));
  expect(c, !is_packed_exactly(packed.weight(), weight), "the mutant is seen in memory");
  const Array after = product();
  for (size_t n = 0; n < 16; ++n) expect(c, before[n] != after[n], "the mutant is seen in sums");
}

}  // namespace

void test_stored_codes(const Kernels& kernels, Dtype dtype) {
  if (dtype == Dtype::kFloat32) {
    test_forms(kernels);
    test_shifts_are_read(kernels);
  }
  for (const Shape& shape : kShapes) {
    for (const Kind& kind : kKinds) test_kind(kernels, dtype, kind, shape);
  }
}

}  // namespace lora_serve::tests
