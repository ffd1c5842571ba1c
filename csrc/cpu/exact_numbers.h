// How a checkpoint's scales and offsets are stored (group_numbers.h): in the fewest bytes that give
// back every float, to the bit.
//
// The one rule: nothing is taken for exact. What is packed is widened by the kernels' own code and
// compared with what was given, and the smallest form that holds all of a weight is its form;
// kFloat holds everything.

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "group_numbers.h"
#include "kernels.h"
#include "parallel.h"

namespace lora_serve::LORA_SERVE_PATH {

// Numbers of one panel's groups: [group][lane].
using PanelNumbers = std::vector<float>;

// rows: (out, groups).
static inline PanelNumbers numbers_of_panel(const QuantizedShape& shape, const float* rows,
                                            size_t panel) {
  const size_t groups = shape.groups(), first = panel * kLanes;
  PanelNumbers numbers(groups * kLanes);
  const size_t left = shape.out_features - first, lanes = left < kLanes ? left : kLanes;
  for (size_t lane = 0; lane < lanes; ++lane) {
    const float* row = rows + (first + lane) * groups;
    for (size_t g = 0; g < groups; ++g) numbers[g * kLanes + lane] = row[g];
  }
  return numbers;
}

constexpr uint32_t kAllLanes = (1u << kLanes) - 1;

// Bit i: whether lane i of all groups is the same to the bit.
static inline uint32_t same_lanes(const PanelNumbers& a, const PanelNumbers& b) {
  uint32_t same = kAllLanes;
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::memcmp(&a[i], &b[i], sizeof a[i]) != 0) same &= ~(1u << i % kLanes);
  }
  return same;
}

constexpr size_t kMostOfBlock = kMaxGroup / kLanes;

// The groups of a block: number = base + unit * count, [group][lane].
struct BlockOfLanes {
  size_t num_groups;
  float numbers[kMostOfBlock][kLanes];
  float bases[kMostOfBlock][kLanes];
};

struct BlockOfUnits {
  Float16 units[kLanes];
  int8_t counts[kMostOfBlock][kLanes];
};

// Of each lane the product that is farthest from 0.
static inline void farthest_products(const BlockOfLanes& block, float (&farthest)[kLanes]) {
  std::memset(farthest, 0, sizeof farthest);
  for (size_t i = 0; i < block.num_groups; ++i) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const float product = block.numbers[i][lane] - block.bases[i][lane];
      farthest[lane] = std::fabs(product) > std::fabs(farthest[lane]) ? product : farthest[lane];
    }
  }
}

// Takes the farthest product of each lane for `most` units. Bit i: whether that gives all numbers
// of lane i, to the bit.
static inline uint32_t try_units(const BlockOfLanes& block, const float (&farthest)[kLanes],
                                 float most, BlockOfUnits& found) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23, where floats are whole numbers
  float units[kLanes], inverses[kLanes];
  store(found.units, div(load(farthest), broadcast(most)));
  store(units, load(static_cast<const Float16*>(found.units)));
  uint32_t differ[kLanes] = {};
  for (size_t lane = 0; lane < kLanes; ++lane) {
    inverses[lane] = units[lane] == 0.0f ? 0.0f : 1.0f / units[lane];
  }
  for (size_t i = 0; i < block.num_groups; ++i) {
    float made[kLanes];
    uint32_t made_bits[kLanes], bits[kLanes];
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const float product = block.numbers[i][lane] - block.bases[i][lane];
      const float near = product * inverses[lane];
      float count = (near + kShift) - kShift;
      count = count >= -128.0f && count <= 127.0f ? count : 0.0f;
      found.counts[i][lane] = static_cast<int8_t>(static_cast<int>(count));
      made[lane] = block.bases[i][lane] + units[lane] * count;
    }
    std::memcpy(made_bits, made, sizeof made);
    std::memcpy(bits, block.numbers[i], sizeof bits);
    for (size_t lane = 0; lane < kLanes; ++lane) differ[lane] |= made_bits[lane] ^ bits[lane];
  }
  uint32_t held = 0;
  for (size_t lane = 0; lane < kLanes; ++lane) held |= (differ[lane] == 0 ? 1u : 0u) << lane;
  return held;
}

// Finds the units of the lanes that `wanted` has, and gives those for which there are any. Most
// writers make the largest number -128 or 63 units.
static inline uint32_t find_units(const BlockOfLanes& block, uint32_t wanted, BlockOfUnits& found) {
  float farthest[kLanes];
  farthest_products(block, farthest);
  uint32_t held = 0;
  const auto try_most = [&](float most) {
    BlockOfUnits tried;
    const uint32_t now = try_units(block, farthest, most, tried) & wanted & ~held;
    for (size_t lane = 0; lane < kLanes; ++lane) {
      if ((now >> lane & 1) == 0) continue;
      found.units[lane] = tried.units[lane];
      for (size_t i = 0; i < block.num_groups; ++i) found.counts[i][lane] = tried.counts[i][lane];
    }
    held |= now;
    return held == wanted;
  };
  if (try_most(63.0f) || try_most(-128.0f)) return held;
  for (int most = 127; most > 0; --most) {
    if (try_most(static_cast<float>(most)) || try_most(static_cast<float>(-most))) break;
  }
  return held;
}

// Packs numbers that are larger by `bases` than what is stored of them. Lanes for which there are
// no units are left.
static inline void pack_units(const QuantizedShape& shape, NumberForm form,
                              const PanelNumbers& numbers, const PanelNumbers& bases,
                              uint32_t* to) {
  const size_t per_block = form.block / shape.group, groups = shape.groups();
  Float16* units = reinterpret_cast<Float16*>(to);
  int8_t* counts = reinterpret_cast<int8_t*>(to + shape.blocks(form) * (kLanes / 2));
  uint32_t left = kAllLanes;
  for (size_t first = 0; first < groups && left != 0; first += per_block, units += kLanes) {
    BlockOfLanes block;
    block.num_groups = first + per_block < groups ? per_block : groups - first;
    const size_t bytes = block.num_groups * kLanes * sizeof(float);
    std::memcpy(block.numbers, numbers.data() + first * kLanes, bytes);
    std::memcpy(block.bases, bases.data() + first * kLanes, bytes);
    BlockOfUnits found{};
    left = find_units(block, left, found);
    std::memcpy(units, found.units, sizeof found.units);
    std::memcpy(counts + first * kLanes, found.counts, block.num_groups * kLanes);
  }
}

// Numbers that are stored one by one, each rounded to what is stored.
static inline void pack_each(Stored stored, const PanelNumbers& numbers, uint32_t* to) {
  for (size_t i = 0; i < numbers.size(); i += kLanes) {
    const F32x16 sixteen = load(numbers.data() + i);
    switch (stored) {
      case Stored::kBytes:
        for (size_t lane = 0; lane < kLanes; ++lane) {
          const float whole = numbers[i + lane];
          const bool fits = whole >= -128.0f && whole <= 127.0f;
          reinterpret_cast<int8_t*>(to)[i + lane] = static_cast<int8_t>(fits ? whole : 0);
        }
        break;
      case Stored::kBfloat16:
        store(reinterpret_cast<Bfloat16*>(to) + i, sixteen);
        break;
      case Stored::kFloat16:
        store(reinterpret_cast<Float16*>(to) + i, sixteen);
        break;
      default:
        store(reinterpret_cast<float*>(to) + i, sixteen);
    }
  }
}

// Packs a panel's scales in the form of the shape. False if it does not hold them.
static inline bool pack_scales(const QuantizedShape& shape, const PanelNumbers& scales,
                               uint32_t* to) {
  if (shape.scales.stored == Stored::kUnits) {
    pack_units(shape, shape.scales, scales, PanelNumbers(scales.size(), -0.0f), to);
  } else {
    pack_each(shape.scales.stored, scales, to);
  }
  PanelNumbers widened(scales.size());
  widen_scales(shape, to, 0, shape.groups(), widened.data(), kLanes);
  return same_lanes(widened, scales) == kAllLanes;
}

// What is stored of offsets that are less by `shifts` scales, one for each lane. Products with a
// shift are exact, as those with a unit are.
static inline void pack_shifted(const QuantizedShape& shape, const PanelNumbers& scales,
                                const PanelNumbers& offsets, const float* shifts, uint32_t* to) {
  std::memcpy(to, shifts, kLanes * sizeof(float));
  to += kLanes;
  PanelNumbers bases(offsets.size()), stored(offsets.size());
  for (size_t i = 0; i < bases.size(); ++i) {
    bases[i] = shifts[i % kLanes] * scales[i];
    stored[i] = offsets[i] - bases[i];
    if (stored[i] == 0.0f) stored[i] = std::copysign(0.0f, offsets[i]);
  }
  if (shape.offsets.stored == Stored::kFloat16) return pack_each(Stored::kFloat16, stored, to);
  pack_units(shape, shape.offsets, offsets, bases, to);
}

// By how many scales offsets may be more than what is stored, the most frequent first. Codes of 4
// bits were from 0 to 15, and have become -8 to 7; a product of -0 leaves a zero the sign it has.
struct Shifts {
  float tried[3];
};

static constexpr Shifts shifts_of(int bits) {
  return bits == 4 ? Shifts{{8.0f, -0.0f, 0.0f}} : Shifts{{-0.0f, 8.0f, 0.0f}};
}

// Likewise of offsets, whose scales are given.
static inline bool pack_offsets(const QuantizedShape& shape, const PanelNumbers& scales,
                                const PanelNumbers& offsets, uint32_t* to) {
  PanelNumbers widened(offsets.size());
  const auto held_lanes = [&] {
    widen_offsets(shape, to, 0, shape.groups(), scales.data(), widened.data(), kLanes);
    return same_lanes(widened, offsets);
  };
  if (QuantizedShape::is_shifted(shape.offsets)) {
    float shifts[kLanes];
    uint32_t held = 0;
    for (const float shift : shifts_of(shape.bits).tried) {
      for (size_t lane = 0; lane < kLanes; ++lane) {
        if ((held >> lane & 1) == 0) shifts[lane] = shift;
      }
      pack_shifted(shape, scales, offsets, shifts, to);
      held = held_lanes();
      if (held == kAllLanes) return true;
    }
    return false;
  }
  PanelNumbers stored = offsets;
  if (shape.offsets.stored == Stored::kBytes) {
    for (size_t i = 0; i < stored.size(); ++i) {
      stored[i] = scales[i] == 0.0f ? 0.0f : std::nearbyint(offsets[i] / scales[i]);
    }
  }
  pack_each(shape.offsets.stored, stored, to);
  return held_lanes() == kAllLanes;
}

// Whether holds(panel) for all of them.
template <class Holds>
static bool all_panels(const QuantizedShape& shape, Workers& workers, const Holds& holds) {
  std::atomic<bool> all{true};
  for_each_task(workers.team(true), shape.panels(), [&](size_t panel, int) {
    if (all.load(std::memory_order_relaxed) && !holds(panel)) all = false;
  });
  return all;
}

// The ways to store numbers, the smallest first, as far as they are smaller than floats; then
// kFloat.
// words_in(form): of all numbers of a panel.
template <class WordsIn>
static std::vector<NumberForm> forms_by_size(const QuantizedShape& shape,
                                             std::initializer_list<Stored> ways,
                                             const WordsIn& words_in) {
  const NumberForm floats{Stored::kFloat};
  std::vector<NumberForm> forms;
  for (const Stored stored : ways) {
    if (stored != Stored::kUnits) {
      forms.push_back({stored});
      continue;
    }
    for (const size_t block : {256, 128, 64}) {
      if (block % shape.group == 0 && block > shape.group) forms.push_back({stored, block});
    }
  }
  std::stable_sort(forms.begin(), forms.end(), [&](NumberForm a, NumberForm b) {
    return words_in(a) < words_in(b);
  });
  while (!forms.empty() && words_in(forms.back()) >= words_in(floats)) forms.pop_back();
  forms.push_back(floats);
  return forms;
}

// Whether codes of 8 bits are all of so many bits, and groups whole units of them.
static inline bool are_of_bits(const PackCodesCall& call, int bits, Workers& workers) {
  const size_t width = call.shape.in_features;
  QuantizedShape fewer = call.shape;
  fewer.bits = bits;
  if (width % fewer.per_unit() != 0 || fewer.group % fewer.per_unit() != 0) return false;
  const int half = 1 << (bits - 1);
  return all_panels(call.shape, workers, [&](size_t panel) {
    const size_t left = call.shape.out_features - panel * kLanes;
    const int8_t* codes = call.codes + panel * kLanes * width;
    uint8_t beyond = 0;
    for (size_t i = 0; i < (left < kLanes ? left : kLanes) * width; ++i) {
      beyond |= static_cast<uint8_t>(codes[i] + half);
    }
    return beyond < 2 * half;
  });
}

// The smallest of the forms that holds all panels' numbers, into `words`, words_in(form) for each.
// packs(form, panel, to): whether it holds one's.
template <class WordsIn, class Packs>
static NumberForm smallest_form(const QuantizedShape& shape, std::initializer_list<Stored> ways,
                                Workers& workers, std::vector<uint32_t>& words,
                                const WordsIn& words_in, const Packs& packs) {
  for (const NumberForm form : forms_by_size(shape, ways, words_in)) {
    const size_t each = words_in(form);
    words.assign(shape.panels() * each, 0);
    if (all_panels(shape, workers, [&](size_t panel) {
          return packs(form, panel, words.data() + panel * each);
        })) {
      return form;
    }
  }
  return {Stored::kFloat};
}

// Of call.shape the ways to store are not looked at.
static inline ExactNumbers exact_numbers(const PackCodesCall& call, Workers& workers) {
  ExactNumbers found{call.shape, {}, {}};
  QuantizedShape& shape = found.shape;
  for (const int bits : {5, 6}) {
    if (shape.bits == 8 && are_of_bits(call, bits, workers)) shape.bits = bits;
  }
  shape.scales = smallest_form(
      shape, {Stored::kBfloat16, Stored::kFloat16, Stored::kUnits}, workers, found.scales,
      [&](NumberForm form) { return shape.scale_words_in(form); },
      [&](NumberForm form, size_t panel, uint32_t* to) {
        QuantizedShape tried = shape;
        tried.scales = form;
        return pack_scales(tried, numbers_of_panel(tried, call.scales, panel), to);
      });
  if (call.offsets == nullptr) return found;
  shape.offsets = smallest_form(
      shape, {Stored::kBytes, Stored::kFloat16, Stored::kUnits}, workers, found.offsets,
      [&](NumberForm form) { return shape.offset_words_in(form); },
      [&](NumberForm form, size_t panel, uint32_t* to) {
        QuantizedShape tried = shape;
        tried.offsets = form;
        return pack_offsets(tried, numbers_of_panel(tried, call.scales, panel),
                            numbers_of_panel(tried, call.offsets, panel), to);
      });
  return found;
}

}  // namespace lora_serve::LORA_SERVE_PATH
