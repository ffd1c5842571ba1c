// What a product of quantised weights reads: codes and numbers of several panels side by side, and
// the sums of the rows that offsets are multiplied with.

#pragma once

#include "codes.h"
#include "group_numbers.h"
#include "kernels.h"
#include "left_rows.h"

namespace lora_serve::LORA_SERVE_PATH {

// What this path multiplies activations of type T with.
template <class T>
struct DecodedWordFor {
  using Type = float;
};

#ifdef __AVX512BF16__
template <>
struct DecodedWordFor<Bfloat16> {
  using Type = Bfloat16;
};
#endif

// Words of all panels at once that are asked for before they are due: 8 KiB.
constexpr size_t kCodeWordsAhead = 128;

// Several panels' codes and numbers side by side; after them the next as many panels are due.
template <int kVectors>
struct CodeView {
  const QuantizedShape& shape;
  const uint32_t* codes[kVectors];
  const uint32_t* scales[kVectors];
  const uint32_t* offsets[kVectors];
  size_t num_words;     // of each panel
  size_t to_following;  // from the end of a panel's codes to the codes that are due then

  CodeView(const QuantizedWeight& weight, size_t panel)
      : shape(weight.shape),
        num_words(weight.shape.words()),
        to_following(kVectors * weight.shape.panel_words() - num_words * kLanes) {
    for (int v = 0; v < kVectors; ++v) {
      codes[v] = weight.codes(panel + v);
      scales[v] = weight.scales(panel + v);
      offsets[v] = weight.offsets(panel + v);
    }
  }

  // Where scales are stored so.
  F32x16 bfloat16_scale(int v, size_t g) const {
    return load(reinterpret_cast<const Bfloat16*>(scales[v]) + g * kLanes);
  }

  // Asks memory for what is due some time after word w. It may lie behind the end of what there is.
  void fetch_ahead(size_t w) const {
    const size_t due = w + kCodeWordsAhead / kVectors;
    const size_t at = due * kLanes + (due < num_words ? 0 : to_following);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) __builtin_prefetch(codes[v] + at);
  }

  template <class Codes>
  void fetch_unit_ahead(size_t unit) const {
#pragma GCC unroll 4
    for (int i = 0; i < Codes::kUnitWords; ++i) fetch_ahead(unit * Codes::kUnitWords + i);
  }

  template <class Codes>
  const uint32_t* unit_at(int v, size_t unit) const {
    return codes[v] + unit * (Codes::kUnitWords * kLanes);
  }
};

// Units [begin, end) of the codes are group g.
template <class Codes>
SIMD_INLINE Range units_of_group(const QuantizedShape& shape, size_t g) {
  const size_t each = shape.group / Codes::kPerUnit, all = shape.units();
  return {g * each, (g + 1) * each < all ? (g + 1) * each : all};
}

// Scales, and maybe offsets, of several panels' groups as floats: [group][panel][lane].
template <int kVectors>
struct GroupNumbers {
  static constexpr size_t kStride = kVectors * kLanes;
  const float* scales;
  const float* offsets;

  F32x16 scale(int v, size_t g) const { return load(scales + g * kStride + v * kLanes); }
  F32x16 offset(int v, size_t g) const { return load(offsets + g * kStride + v * kLanes); }
  GroupNumbers from(size_t g) const { return {scales + g * kStride, offsets + g * kStride}; }
};

// What lies in memory of some groups: their decoded words, and their numbers.
template <int kVectors>
struct DecodedGroups {
  const uint32_t* words;
  GroupNumbers<kVectors> numbers;
};

// Those of `groups`, the first of which is then group 0. scales and offsets have room for them.
template <int kVectors>
static GroupNumbers<kVectors> widen_numbers(const CodeView<kVectors>& view, Range groups,
                                            float* scales, float* offsets) {
  constexpr size_t kStride = GroupNumbers<kVectors>::kStride;
  for (int v = 0; v < kVectors; ++v) {
    float* const to = scales + v * kLanes;
    widen_scales(view.shape, view.scales[v], groups.begin, groups.end, to, kStride);
    widen_offsets(view.shape, view.offsets[v], groups.begin, groups.end, to, offsets + v * kLanes,
                  kStride);
  }
  return {scales, offsets};
}

// What one row asks for at once.
template <int kVectors>
struct NextNumbers {
  static constexpr size_t kGroups = 16;
  alignas(64) float scales[kGroups * GroupNumbers<kVectors>::kStride];
  alignas(64) float offsets[kGroups * GroupNumbers<kVectors>::kStride];
};

// What offsets are multiplied with: the sum of each group of each row.
struct RowSums {
  const float* data;  // (rows, groups); null where a weight has no offsets
  size_t groups;

  RowSums from(size_t row) const { return {data == nullptr ? data : data + row * groups, groups}; }
  F32x16 of(size_t row, size_t g) const { return broadcast(data[row * groups + g]); }
};

template <class T>
static RowSums sum_groups(const T* x, size_t rows, const QuantizedShape& shape, float* to,
                          Team team) {
  const size_t width = shape.in_features, groups = shape.groups();
  const size_t num_tasks = team.num_threads == 1 ? 1 : rows;
  for_each_task(team, num_tasks, [&](size_t task, int) {
    const Range part = part_of(rows, num_tasks, task);
    for (size_t r = part.begin; r < part.end; ++r) {
      for (size_t g = 0; g < groups; ++g) {
        const size_t begin = g * shape.group;
        F32x16 sum = zero();
        for_each_vector(begin + shape.group < width ? shape.group : width - begin,
                        [&](size_t k, auto n) {
                          sum = add(sum, load_lanes(x + r * width + begin + k, n));
                        });
        to[r * groups + g] = reduce_add(sum);
      }
    }
  });
  return {to, groups};
}

// Rows of one block of sums.
template <class Dot>
constexpr size_t kRowsAtOnce = kMaxRows;

template <class Dot>
struct QuantizedProduct {
  LeftRows<Dot> left;
  RowSums sums;
  const QuantizedWeight& weight;
  uint32_t* decoded;     // decoded_words for each thread
  const float* widened;  // the only row, where tiles would multiply it: see quantized_tiles.h
};

template <class Codes, class Dot>
static size_t decoded_panel_words(const QuantizedShape& shape) {
  return shape.units() * Decoded<Codes, typename Dot::Word>::kWords * kLanes;
}

// Of kMaxVectors panels: their words, and their scales and offsets.
template <class Codes, class Dot>
static size_t decoded_words(const QuantizedShape& shape) {
  return kMaxVectors * (decoded_panel_words<Codes, Dot>(shape) + 2 * shape.groups() * kLanes);
}

// Decodes units [units.begin, units.end) of kVectors panels side by side: kVectors vectors to a
// word.
template <class Codes, class Word, int kVectors>
static void decode_units(const CodeView<kVectors>& view, Range units, uint32_t* to) {
  using Decode = Decoded<Codes, Word>;
  for (size_t u = units.begin; u < units.end; ++u) {
    view.template fetch_unit_ahead<Codes>(u);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const Decode decoded = Decode::of(Codes::load(view.template unit_at<Codes>(v, u)));
#pragma GCC unroll 32
      for (int i = 0; i < Decode::kWords; ++i) {
        store_words(to + (i * kVectors + v) * kLanes, Decode::word(decoded, i));
      }
    }
    to += Decode::kWords * kVectors * kLanes;
  }
}

}  // namespace lora_serve::LORA_SERVE_PATH
