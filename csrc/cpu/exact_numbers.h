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

// rows: (out, groups), or null.
static inline PanelNumbers numbers_of_panel(const QuantizedShape& shape, const float* rows,
                                            size_t panel) {
  const size_t groups = shape.groups(), first = panel * kLanes;
  PanelNumbers numbers(rows == nullptr ? 0 : groups * kLanes);
  if (rows == nullptr) return numbers;
  const size_t left = shape.out_features - first, lanes = left < kLanes ? left : kLanes;
  for (size_t lane = 0; lane < lanes; ++lane) {
    for (size_t g = 0; g < groups; ++g)
      numbers[g * kLanes + lane] = rows[(first + lane) * groups + g];
  }
  return numbers;
}

static inline bool same_bits(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0; }

// Some groups' numbers of one lane as whole numbers times one float16.
struct SharedUnit {
  Float16 unit;
  int8_t counts[kMaxGroup / kLanes];
};

// Whether gives(i, unit, counts[i]) holds for all of them. Most writers make the largest number
// -128 or 63 units.
template <class Gives>
static bool find_unit(const double* values, size_t count, const Gives& gives, SharedUnit& found) {
  size_t largest = 0;
  for (size_t i = 1; i < count; ++i) {
    if (std::fabs(values[i]) > std::fabs(values[largest])) largest = i;
  }
  const auto try_unit = [&](double exact) {
    Float16 halves[kLanes];
    store(halves, broadcast(static_cast<float>(exact)));
    float unit;
    store_first(&unit, load(halves), 1);
    const double inverse = unit == 0.0f ? 0.0 : 1.0 / unit;
    if (!std::isfinite(unit)) return false;
    const auto fits = [&](size_t i) {
      const double near = values[i] * inverse;
      if (!(near > -128.5 && near < 127.5)) return false;
      found.counts[i] = static_cast<int8_t>(static_cast<int>(near + (near < 0 ? -0.5 : 0.5)));
      return gives(i, unit, found.counts[i]);
    };
    found.unit = halves[0];
    if (!fits(largest)) return false;
    for (size_t i = 0; i < count; ++i) {
      if (!fits(i)) return false;
    }
    return true;
  };
  const double most = values[largest];
  if (!(std::fabs(most) < 0x1p100)) return false;  // a NaN, too
  if (most == 0.0) return try_unit(0.0) || try_unit(-0.0);
  if (try_unit(most / -128) || try_unit(most / 63)) return true;
  for (int k = 127; k > 0; --k) {
    if (try_unit(most / k) || try_unit(most / -k)) return true;
  }
  return false;
}

constexpr uint32_t kAllLanes = (1u << kLanes) - 1;

// Bit i: whether lane i of all groups is the same to the bit.
static inline uint32_t same_lanes(const PanelNumbers& a, const PanelNumbers& b) {
  uint32_t same = kAllLanes;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!same_bits(a[i], b[i])) same &= ~(1u << i % kLanes);
  }
  return same;
}

// values: what the units' products are, or are near. gives(i, unit, count): whether values[i] is
// had so. Lanes for which there is no unit are left.
template <class Gives>
static void pack_units(const QuantizedShape& shape, NumberForm form,
                       const std::vector<double>& values, const Gives& gives, uint32_t* to) {
  const size_t per_block = form.block / shape.group, groups = shape.groups();
  Float16* units = reinterpret_cast<Float16*>(to);
  int8_t* counts = reinterpret_cast<int8_t*>(to + shape.blocks(form) * (kLanes / 2));
  uint32_t left = kAllLanes;
  for (size_t block = 0; block < shape.blocks(form); ++block) {
    const size_t first = block * per_block;
    const size_t count = first + per_block < groups ? per_block : groups - first;
    for (size_t lane = 0; lane < kLanes; ++lane) {
      if ((left >> lane & 1) == 0) continue;
      double of_lane[kMaxGroup / kLanes];
      for (size_t i = 0; i < count; ++i) of_lane[i] = values[(first + i) * kLanes + lane];
      SharedUnit found;
      const bool is_found =
          find_unit(of_lane, count,
                    [&](size_t i, float unit, int8_t whole) {
                      return gives((first + i) * kLanes + lane, unit, whole);
                    },
                    found);
      if (!is_found) {
        left &= ~(1u << lane);
        continue;
      }
      units[block * kLanes + lane] = found.unit;
      for (size_t i = 0; i < count; ++i) counts[(first + i) * kLanes + lane] = found.counts[i];
    }
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
    const std::vector<double> values(scales.begin(), scales.end());
    pack_units(shape, shape.scales, values,
               [&](size_t i, float unit, int8_t whole) {
                 return same_bits(unit * static_cast<float>(whole), scales[i]);
               },
               to);
  } else {
    pack_each(shape.scales.stored, scales, to);
  }
  PanelNumbers widened(scales.size());
  widen_scales(shape, to, 0, shape.groups(), widened.data(), kLanes);
  return same_lanes(widened, scales) == kAllLanes;
}

// What is stored of offsets that are less by `shifts` scales, one for each lane.
static inline void pack_shifted(const QuantizedShape& shape, const PanelNumbers& scales,
                                const PanelNumbers& offsets, const float* shifts, uint32_t* to) {
  std::memcpy(to, shifts, kLanes * sizeof(float));
  to += kLanes;
  std::vector<double> values(offsets.size());
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = offsets[i] - static_cast<double>(shifts[i % kLanes]) * scales[i];
    if (values[i] == 0.0) values[i] = std::copysign(0.0, offsets[i]);
  }
  if (shape.offsets.stored == Stored::kFloat16) {
    return pack_each(Stored::kFloat16, PanelNumbers(values.begin(), values.end()), to);
  }
  pack_units(shape, shape.offsets, values,
             [&](size_t i, float unit, int8_t whole) {
               const double product = static_cast<double>(unit) * whole;
               const double shifted = static_cast<double>(shifts[i % kLanes]) * scales[i] + product;
               return same_bits(static_cast<float>(shifted), offsets[i]);
             },
             to);
}

// By how many scales offsets may be more than what is stored. Codes from 0 to 15 have become -8 to
// 7; a product of -0 leaves a zero the sign that it has.
constexpr float kShifts[] = {8.0f, -0.0f, 0.0f};

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
    for (const float shift : kShifts) {
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
// kFloat. words_in(form): of all numbers of a panel.
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

// The smallest of the forms that holds(form, panel) for all panels.
template <class Holds>
static NumberForm smallest_that_holds(const QuantizedShape& shape,
                                      const std::vector<NumberForm>& forms, Workers& workers,
                                      const Holds& holds) {
  for (const NumberForm form : forms) {
    if (all_panels(shape, workers, [&](size_t panel) { return holds(form, panel); })) return form;
  }
  return {Stored::kFloat};
}

// The shape that the weight is packed in. Of call.shape the ways to store are not looked at.
static inline QuantizedShape exact_shape(const PackCodesCall& call, Workers& workers) {
  QuantizedShape shape = call.shape;
  for (const int bits : {5, 6}) {
    if (shape.bits == 8 && are_of_bits(call, bits, workers)) shape.bits = bits;
  }
  const auto scale_forms = forms_by_size(
      shape, {Stored::kBfloat16, Stored::kFloat16, Stored::kUnits},
      [&](NumberForm form) { return shape.scale_words_in(form); });
  shape.scales = smallest_that_holds(
      shape, scale_forms, workers, [&](NumberForm form, size_t panel) {
        QuantizedShape tried = shape;
        tried.scales = form;
        std::vector<uint32_t> words(tried.scale_words());
        return pack_scales(tried, numbers_of_panel(tried, call.scales, panel), words.data());
      });
  if (call.offsets == nullptr) return shape;
  const auto offset_forms = forms_by_size(
      shape, {Stored::kBytes, Stored::kFloat16, Stored::kUnits},
      [&](NumberForm form) { return shape.offset_words_in(form); });
  shape.offsets = smallest_that_holds(
      shape, offset_forms, workers, [&](NumberForm form, size_t panel) {
        QuantizedShape tried = shape;
        tried.offsets = form;
        std::vector<uint32_t> words(tried.offset_words());
        return pack_offsets(tried, numbers_of_panel(tried, call.scales, panel),
                            numbers_of_panel(tried, call.offsets, panel), words.data());
      });
  return shape;
}

}  // namespace lora_serve::LORA_SERVE_PATH
