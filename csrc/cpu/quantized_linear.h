// y[t][n] = bias[n] + sum over groups g of scale[n][g] * sum over k in g of x[t][k] * code[n][k]
//                                         + offset[n][g] * sum over k in g of x[t][k]
//
// T rows of full precision, codes, scales and offsets as in quantized_weight.h. Codes become words
// of the type that the path multiplies (codes.h), exactly. A group is summed in float over ascending
// k from 0; groups are added by fma over ascending g from 0, first the scale's product, then the
// offset's. Nothing depends on T.

#pragma once

#include "codes.h"
#include "kernels.h"
#include "left_rows.h"
#include "linear.h"

namespace lora_serve::LORA_SERVE_PATH {

// Few rows leave registers for more panels at once: several streams of codes hide the memory's
// latency, several chains of sums the multiplier's.
constexpr int kPanelsOfFewRows = 2 * kMaxVectors;
constexpr int kPanelsOfOneRow = 4;

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

// sums (kRows, kVectors, 16).
template <int kRows, int kVectors>
SIMD_INLINE void add_group(const CodeView<kVectors>& view, size_t g, const RowSums& rows,
                           const F32x16 (&acc)[kRows][kVectors], float* sums) {
#pragma GCC unroll 16
  for (int v = 0; v < kVectors; ++v) {
    const F32x16 scale = view.scale(v, g);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      float* sum = sums + (r * kVectors + v) * kLanes;
      store(sum, fma(scale, acc[r][v], load(sum)));
    }
  }
  if (rows.data == nullptr) return;
#pragma GCC unroll 16
  for (int v = 0; v < kVectors; ++v) {
    const F32x16 offset = view.offset(v, g);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      float* sum = sums + (r * kVectors + v) * kLanes;
      store(sum, fma(offset, rows.of(r, g), load(sum)));
    }
  }
}

// One or two rows: codes are decoded into registers and multiplied there, and the sums of all
// groups are registers too.
template <class Codes, class Dot, int kRows, int kVectors>
static __attribute__((noinline)) void multiply_codes(const typename Dot::Left* left, size_t stride,
                                                     const QuantizedShape& shape,
                                                     const CodeView<kVectors>& view,
                                                     const RowSums& rows, float* sums) {
  using Word = typename Dot::Word;
  using Decode = Decoded<Codes, Word>;
  F32x16 total[kRows][kVectors];
  clear(total);
  for (size_t g = 0; g < shape.groups(); ++g) {
    const Range words = words_of_group<Codes>(shape, g);
    F32x16 acc[kRows][kVectors];
    clear(acc);
    for (size_t w = words.begin; w < words.end; ++w) {
      view.fetch_ahead(w);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const auto decoded = Decode::of(load_words(view.codes[v] + w * kLanes));
#pragma GCC unroll 8
        for (int i = 0; i < Decode::kWords; ++i) {
          const auto b = Dot::right(Decode::word(decoded, i), 0);
          const auto* at = left + w * Codes::kPerWord + i * kPerWord<Word>;
#pragma GCC unroll 2
          for (int r = 0; r < kRows; ++r) {
            acc[r][v] = Dot::multiply_add(Dot::left(at + r * stride, 0), b, acc[r][v]);
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const F32x16 scale = view.scale(v, g);
#pragma GCC unroll 2
      for (int r = 0; r < kRows; ++r) total[r][v] = fma(scale, acc[r][v], total[r][v]);
    }
    if (rows.data == nullptr) continue;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const F32x16 offset = view.offset(v, g);
#pragma GCC unroll 2
      for (int r = 0; r < kRows; ++r) total[r][v] = fma(offset, rows.of(r, g), total[r][v]);
    }
  }
#pragma GCC unroll 2
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(sums + (r * kVectors + v) * kLanes, total[r][v]);
  }
}

template <class Dot>
struct QuantizedProduct {
  LeftRows<Dot> left;
  RowSums sums;
  const QuantizedWeight& weight;
  uint32_t* decoded;  // kMaxVectors panels of words for each thread
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

template <class Dot, int kRows, int kVectors>
static __attribute__((noinline)) void multiply_decoded_rows(const typename Dot::Left* left,
                                                       size_t stride, const uint32_t* decoded,
                                                       size_t num_words,
                                                       const CodeView<kVectors>& view, size_t g,
                                                       const RowSums& rows, float* sums) {
  RightView<kVectors> right{{}, kVectors * kLanes};
  for (int v = 0; v < kVectors; ++v) right.vectors[v] = decoded + v * kLanes;
  F32x16 acc[kRows][kVectors];
  clear(acc);
  multiply<Dot>(left, stride, right, num_words, FetchNothing{}, acc);
  add_group(view, g, rows, acc, sums);
}

// One group of a block of rows, whose left side begins at `left`. sums (rows, kVectors, 16).
template <class Dot, int kVectors>
static void multiply_decoded(const QuantizedProduct<Dot>& product, Range block,
                             const typename Dot::Left* left, const uint32_t* decoded,
                             size_t num_words, const CodeView<kVectors>& view, size_t g,
                             float* sums) {
  with_count<kMaxRows>(block.end - block.begin, [&](auto num_rows) {
    multiply_decoded_rows<Dot, decltype(num_rows)::value>(left, product.left.stride, decoded,
                                                          num_words, view, g,
                                                          product.sums.from(block.begin), sums);
  });
}

#ifdef __AMX_BF16__

template <int kVectors>
static void multiply_decoded(const QuantizedProduct<Bfloat16Tiles>& product, Range block,
                             const Bfloat16* left, const uint32_t* decoded, size_t num_words,
                             const CodeView<kVectors>& view, size_t g, float* sums) {
  RightView<kVectors> right{{}, kVectors * kLanes};
  for (int v = 0; v < kVectors; ++v) right.vectors[v] = decoded + v * kLanes;
  const size_t num_rows = block.end - block.begin;
  alignas(64) float group[kRowsOfTile][kVectors * kLanes];
  configure_tiles(num_rows);
  clear_tiles<kVectors>();
  multiply_tiles<kVectors>({left, product.left.stride * sizeof(Bfloat16)}, num_rows, right,
                           num_words, FetchNothing{});
  store_sums<kVectors>(group[0], kVectors * kLanes);
  const RowSums rows = product.sums.from(block.begin);
  for (int v = 0; v < kVectors; ++v) {
    const F32x16 scale = view.scale(v, g);
    for (size_t r = 0; r < num_rows; ++r) {
      float* sum = sums + (r * kVectors + v) * kLanes;
      store(sum, fma(scale, load(group[r] + v * kLanes), load(sum)));
    }
    if (rows.data == nullptr) continue;
    const F32x16 offset = view.offset(v, g);
    for (size_t r = 0; r < num_rows; ++r) {
      float* sum = sums + (r * kVectors + v) * kLanes;
      store(sum, fma(offset, rows.of(r, g), load(sum)));
    }
  }
}

#endif

// Rows of one block of sums.
template <class Dot>
constexpr size_t kRowsAtOnce = kInTiles<Dot> ? kLanes : kMaxRows;

// Rows that share one decoding of their panels, and whose sums are kept meanwhile.
constexpr int kRowsPerDecoding = 20 * kMaxRows;

// Rows up to which a group is decoded for all of them and multiplied while it lies in L1. With more
// their left sides no longer do: then all groups are decoded first, and come from L2 again and again.
constexpr size_t kRowsPerGroup = 4 * kMaxRows;

// More than two rows, at most kRowsPerDecoding, times kVectors panels.
template <class Codes, int kVectors, class Dot>
static void multiply_blocks(const QuantizedProduct<Dot>& product, Range rows,
                            const CodeView<kVectors>& view, uint32_t* decoded, float* sums) {
  using Word = typename Dot::Word;
  constexpr size_t kWords = Decoded<Codes, Word>::kWords, kDecodedLanes = kWords * kVectors * kLanes;
  const QuantizedShape& shape = product.weight.shape;
  const auto multiply_group = [&](Range block, size_t g, const uint32_t* from) {
    const Range words = words_of_group<Codes>(shape, g);
    const auto* left = product.left.data + block.begin * product.left.stride;
    multiply_decoded(product, block, left + words.begin * Codes::kPerWord, from,
                     (words.end - words.begin) * kWords, view, g,
                     sums + (block.begin - rows.begin) * kVectors * kLanes);
  };
  if (rows.end - rows.begin <= kRowsPerGroup) {
    for (size_t g = 0; g < shape.groups(); ++g) {
      decode_words<Codes, Word>(view, words_of_group<Codes>(shape, g), decoded);
      for_each_block(rows, kRowsAtOnce<Dot>,
                     [&](Range block) { multiply_group(block, g, decoded); });
    }
    return;
  }
  decode_words<Codes, Word>(view, {0, shape.words()}, decoded);
  for_each_block(rows, kRowsAtOnce<Dot>, [&](Range block) {
    for (size_t g = 0; g < shape.groups(); ++g) {
      multiply_group(block, g, decoded + words_of_group<Codes>(shape, g).begin * kDecodedLanes);
    }
  });
}

// All rows times panels [panel, panel + kVectors). finish(row, panel, sums) takes 16 sums.
template <class Codes, int kVectors, class Dot, class Finish>
static void multiply_panels(const QuantizedProduct<Dot>& product, Range rows, size_t panel,
                            int thread, const Finish& finish) {
  const CodeView<kVectors> view(product.weight, panel);
  const QuantizedShape& shape = product.weight.shape;
  for_each_block(rows, kRowsPerDecoding, [&](Range block) {
    alignas(64) float sums[kRowsPerDecoding * kVectors * kLanes];
    const size_t count = block.end - block.begin;
    constexpr size_t kMostInRegisters = kVectors > kPanelsOfFewRows ? 1 : kFewRows;
    const bool is_in_registers = !kInTiles<Dot> && count <= kMostInRegisters;
    if constexpr (!kInTiles<Dot>) {
      if (is_in_registers) {
        with_count<kMostInRegisters>(count, [&](auto num_rows) {
          multiply_codes<Codes, Dot, decltype(num_rows)::value>(
              product.left.data + block.begin * product.left.stride, product.left.stride, shape,
              view, product.sums.from(block.begin), sums);
        });
      }
    }
    if constexpr (kVectors <= kMaxVectors) {
      if (!is_in_registers) {
        std::memset(sums, 0, count * kVectors * kLanes * sizeof(float));
        const size_t panel_words = decoded_panel_words<Codes, Dot>(shape);
        multiply_blocks<Codes>(product, block, view,
                               product.decoded + thread * kMaxVectors * panel_words, sums);
      }
    }
    for (size_t r = 0; r < count; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        finish(block.begin + r, panel + v,
               static_cast<const float*>(sums + (r * kVectors + v) * kLanes));
      }
    }
  });
}

template <class Codes, class Dot, class Finish>
static void multiply_quantized(const QuantizedProduct<Dot>& product, Range rows, Range panels,
                               int thread, const Finish& finish) {
  size_t panel = panels.begin;
  if (!kInTiles<Dot> && rows.end - rows.begin == 1) {
    for (; panel + kPanelsOfOneRow <= panels.end; panel += kPanelsOfOneRow) {
      multiply_panels<Codes, kPanelsOfOneRow>(product, rows, panel, thread, finish);
    }
  }
  if (!kInTiles<Dot> && rows.end - rows.begin <= kFewRows) {
    for (; panel + kPanelsOfFewRows <= panels.end; panel += kPanelsOfFewRows) {
      multiply_panels<Codes, kPanelsOfFewRows>(product, rows, panel, thread, finish);
    }
  }
  for (; panel + kMaxVectors <= panels.end; panel += kMaxVectors) {
    multiply_panels<Codes, kMaxVectors>(product, rows, panel, thread, finish);
  }
  for (; panel < panels.end; ++panel) {
    multiply_panels<Codes, 1>(product, rows, panel, thread, finish);
  }
}

// Runs multiply(rows, panels, thread) over all of both, shared by the team.
template <class Multiply>
static void share_quantized(Team team, size_t num_rows, size_t rows_at_once, size_t panels,
                            const Multiply& multiply) {
  const size_t num_chunks = ceil_div(num_rows, rows_at_once);
  const size_t wanted = team.num_threads == 1 ? 1 : static_cast<size_t>(team.num_threads) * 8;
  const size_t fours = ceil_div(panels, kPanelsOfOneRow);
  const size_t ranges = wanted < fours ? wanted : fours;
  for_each_task(team, num_chunks * ranges, [&](size_t task, int thread) {
    const Range part = part_of(fours, ranges, task % ranges);
    const size_t end = part.end * kPanelsOfOneRow;
    multiply(part_of(num_rows, num_chunks, task / ranges),
             Range{part.begin * kPanelsOfOneRow, end < panels ? end : panels}, thread);
  });
}

static inline Team quantized_team(const QuantizedShape& shape, size_t rows, Workers& workers) {
  const size_t bytes = shape.packed_words() * 4 * ceil_div(rows, kMaxRows);
  return workers.team(bytes >= kParallelBytes);
}

template <class Codes, class T>
static void quantized_linear_by(const QuantizedLinearCall& call, Workers& workers) {
  using Dot = typename DotFor<typename DecodedWordFor<T>::Type>::Type;
  const QuantizedShape& shape = call.weight.shape;
  const LinearCall& linear = call.linear;
  const Team team = quantized_team(shape, linear.rows, workers);
  const size_t width = shape.words() * Codes::kPerWord;
  const size_t left_size = left_bytes<Dot, T>(linear.rows, linear.in_features, width);
  const size_t panel_bytes = decoded_panel_words<Codes, Dot>(shape) * sizeof(uint32_t);
  const size_t decoded_size =
      !kInTiles<Dot> && linear.rows <= kFewRows ? 0 : team.num_threads * kMaxVectors * panel_bytes;
  const size_t sums_size = shape.has_offsets() ? linear.rows * shape.groups() * sizeof(float) : 0;
  char* memory = static_cast<char*>(workers.scratch.take(left_size + decoded_size + sums_size));
  const T* x = static_cast<const T*>(linear.x);
  float* sums_at = reinterpret_cast<float*>(memory + left_size + decoded_size);
  const QuantizedProduct<Dot> product{
      left_rows<Dot>(x, linear.rows, linear.in_features, width, memory, team),
      shape.has_offsets() ? sum_groups(x, linear.rows, shape, sums_at, team) : RowSums{nullptr, 0},
      call.weight, reinterpret_cast<uint32_t*>(memory + left_size)};
  const auto finish = [&](size_t row, size_t panel, const float* sums) {
    finish_linear<T>(linear, row, panel, sums);
  };
  share_quantized(team, linear.rows, rows_per_chunk<Dot>(width), shape.panels(),
                  [&](Range rows, Range panels, int thread) {
                    multiply_quantized<Codes>(product, rows, panels, thread, finish);
                  });
}

}  // namespace lora_serve::LORA_SERVE_PATH
