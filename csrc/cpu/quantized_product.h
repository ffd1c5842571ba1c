// What a product of quantised weights reads: codes and scales of several panels side by side, and
// the sums of the rows that offsets are multiplied with.

#pragma once

#include "codes.h"
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

// Several panels' codes and scales side by side; after them the next as many panels are due.
template <int kVectors>
struct CodeView {
  const uint32_t* codes[kVectors];
  const uint32_t* numbers[kVectors];
  bool has_halves;      // scales of two bytes
  size_t group_words;   // of scales and offsets
  size_t num_words;     // of each panel
  size_t to_following;  // from the end of a panel's codes to the codes that are due then

  CodeView(const QuantizedWeight& weight, size_t panel)
      : has_halves(weight.shape.scales == Scales::kBfloat16),
        group_words(weight.shape.group_words()),
        num_words(weight.shape.words()),
        to_following(kVectors * weight.shape.panel_words() - num_words * kLanes) {
    for (int v = 0; v < kVectors; ++v) {
      codes[v] = weight.codes(panel + v);
      numbers[v] = weight.numbers(panel + v);
    }
  }

  F32x16 scale(int v, size_t g) const {
    const uint32_t* at = numbers[v] + g * group_words;
    return has_halves ? load(reinterpret_cast<const Bfloat16*>(at))
                      : load(reinterpret_cast<const float*>(at));
  }

  // Where the weight has offsets.
  F32x16 offset(int v, size_t g) const {
    return load(reinterpret_cast<const float*>(numbers[v] + g * group_words + kLanes));
  }

  // Asks memory for what is due some time after word w. It may lie behind the end of what there is.
  void fetch_ahead(size_t w) const {
    const size_t due = w + kCodeWordsAhead / kVectors;
    const size_t at = due * kLanes + (due < num_words ? 0 : to_following);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) __builtin_prefetch(codes[v] + at);
  }
};

// Words [begin, end) of the codes are group g.
template <class Codes>
SIMD_INLINE Range words_of_group(const QuantizedShape& shape, size_t g) {
  const size_t each = shape.group / Codes::kPerWord, all = shape.words();
  return {g * each, (g + 1) * each < all ? (g + 1) * each : all};
}

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
  uint32_t* decoded;     // kMaxVectors panels of words for each thread
  const float* widened;  // the only row, where tiles would multiply it: see quantized_tiles.h
};

template <class Codes, class Dot>
static size_t decoded_panel_words(const QuantizedShape& shape) {
  return shape.words() * Decoded<Codes, typename Dot::Word>::kWords * kLanes;
}

// Decodes words [words.begin, words.end) of kVectors panels side by side: kVectors vectors to a
// word.
template <class Codes, class Word, int kVectors>
static void decode_words(const CodeView<kVectors>& view, Range words, uint32_t* to) {
  using Decode = Decoded<Codes, Word>;
  for (size_t w = words.begin; w < words.end; ++w) {
    view.fetch_ahead(w);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const Decode decoded = Decode::of(load_words(view.codes[v] + w * kLanes));
#pragma GCC unroll 8
      for (int i = 0; i < Decode::kWords; ++i) {
        store_words(to + (i * kVectors + v) * kLanes, Decode::word(decoded, i));
      }
    }
    to += Decode::kWords * kVectors * kLanes;
  }
}

}  // namespace lora_serve::LORA_SERVE_PATH
