// y[t][n] = bias[n] + sum over groups g of scale[n][g] * sum over k in g of x[t][k] * code[n][k]
//                                         + offset[n][g] * sum over k in g of x[t][k]
//
// T rows of full precision, codes, scales and offsets as in quantized_weight.h. Codes become words
// of the type that the path multiplies (codes.h), exactly. A group is summed in float over
// ascending k from 0; groups are added by fma over ascending g from 0, first the scale's product,
// then the offset's. Nothing depends on T.

#pragma once

#include "linear.h"
#include "quantized_product.h"
#include "quantized_tiles.h"

namespace lora_serve::LORA_SERVE_PATH {

// Few rows leave registers for more panels at once: several streams of codes hide the memory's
// latency, several chains of sums the multiplier's.
constexpr int kPanelsOfFewRows = 2 * kMaxVectors;
constexpr int kPanelsOfOneRow = 4;

// numbers: of group g alone. sums (kRows, kVectors, 16).
template <int kRows, int kVectors>
SIMD_INLINE void add_group(const GroupNumbers<kVectors>& numbers, size_t g, const RowSums& rows,
                           const F32x16 (&acc)[kRows][kVectors], float* sums) {
#pragma GCC unroll 16
  for (int v = 0; v < kVectors; ++v) {
    const F32x16 scale = numbers.scale(v, 0);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      float* sum = sums + (r * kVectors + v) * kLanes;
      store(sum, fma(scale, acc[r][v], load(sum)));
    }
  }
  if (rows.data == nullptr) return;
#pragma GCC unroll 16
  for (int v = 0; v < kVectors; ++v) {
    const F32x16 offset = numbers.offset(v, 0);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      float* sum = sums + (r * kVectors + v) * kLanes;
      store(sum, fma(offset, rows.of(r, g), load(sum)));
    }
  }
}

// What the codes of one group add to one or two rows' sums.
template <class Codes, class Dot, int kRows, int kVectors>
SIMD_INLINE void multiply_group(const typename Dot::Left* left, size_t stride, Range units,
                                const CodeView<kVectors>& view, F32x16 (&acc)[kRows][kVectors]) {
  using Word = typename Dot::Word;
  using Decode = Decoded<Codes, Word>;
  for (size_t u = units.begin; u < units.end; ++u) {
    view.template fetch_unit_ahead<Codes>(u);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const auto decoded = Decode::of(Codes::load(view.template unit_at<Codes>(v, u)));
#pragma GCC unroll 32
      for (int i = 0; i < Decode::kWords; ++i) {
        const auto b = Dot::right(Decode::word(decoded, i), 0);
        const auto* at = left + u * Codes::kPerUnit + i * kPerWord<Word>;
#pragma GCC unroll 2
        for (int r = 0; r < kRows; ++r) {
          acc[r][v] = Dot::multiply_add(Dot::left(at + r * stride, 0), b, acc[r][v]);
        }
      }
    }
  }
}

// One or two rows: codes are decoded into registers and multiplied there, and the sums of all
// groups are registers too.
template <class Codes, class Dot, int kRows, int kVectors>
static __attribute__((noinline)) void multiply_codes(const typename Dot::Left* left, size_t stride,
                                                     const CodeView<kVectors>& view,
                                                     const RowSums& rows, float* sums) {
  constexpr size_t kGroupsAtOnce = NextNumbers<kVectors>::kGroups;
  NextNumbers<kVectors> next;
  F32x16 total[kRows][kVectors];
  clear(total);
  for (size_t first = 0, all = view.shape.groups(); first < all; first += kGroupsAtOnce) {
    const size_t end = first + kGroupsAtOnce < all ? first + kGroupsAtOnce : all;
    const auto numbers = widen_numbers(view, {first, end}, next.scales, next.offsets);
    for (size_t g = first; g < end; ++g) {
      F32x16 acc[kRows][kVectors];
      clear(acc);
      multiply_group<Codes, Dot>(left, stride, units_of_group<Codes>(view.shape, g), view, acc);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const F32x16 scale = numbers.scale(v, g - first);
#pragma GCC unroll 2
        for (int r = 0; r < kRows; ++r) total[r][v] = fma(scale, acc[r][v], total[r][v]);
      }
      if (rows.data == nullptr) continue;
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const F32x16 offset = numbers.offset(v, g - first);
#pragma GCC unroll 2
        for (int r = 0; r < kRows; ++r) total[r][v] = fma(offset, rows.of(r, g), total[r][v]);
      }
    }
  }
#pragma GCC unroll 2
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(sums + (r * kVectors + v) * kLanes, total[r][v]);
  }
}

// One or two rows from `row` on.
template <class Codes, int kRows, int kVectors, class Dot>
static void multiply_few(const QuantizedProduct<Dot>& product, size_t row,
                         const CodeView<kVectors>& view, float* sums) {
  const size_t stride = product.left.stride;
  multiply_codes<Codes, Dot, kRows>(product.left.data + row * stride, stride, view,
                                    product.sums.from(row), sums);
}

template <class Dot, int kRows, int kVectors>
static __attribute__((noinline)) void multiply_decoded(const typename Dot::Left* left,
                                                       size_t stride, const uint32_t* decoded,
                                                       size_t num_words,
                                                       const GroupNumbers<kVectors>& numbers,
                                                       size_t g, const RowSums& rows,
                                                       float* sums) {
  RightView<kVectors> right{{}, kVectors * kLanes};
  for (int v = 0; v < kVectors; ++v) right.vectors[v] = decoded + v * kLanes;
  F32x16 acc[kRows][kVectors];
  clear(acc);
  multiply<Dot>(left, stride, right, num_words, FetchNothing{}, acc);
  add_group(numbers, g, rows, acc, sums);
}

// Groups whose sums are scaled and added before the next ones are multiplied.
template <class Codes, class Dot>
SIMD_INLINE size_t groups_at_once(const QuantizedProduct<Dot>&) {
  return 1;
}

// One group of a block of rows. sums (rows, kVectors, 16).
template <class Codes, class Dot, int kVectors>
static void multiply_groups(const QuantizedProduct<Dot>& product, Range block, Range groups,
                            const DecodedGroups<kVectors>& decoded, float* sums) {
  const size_t g = groups.begin;
  const Range units = units_of_group<Codes>(product.weight.shape, g);
  const auto* left = product.left.data + block.begin * product.left.stride;
  with_count<kMaxRows>(block.end - block.begin, [&](auto num_rows) {
    multiply_decoded<Dot, decltype(num_rows)::value>(
        left + units.begin * Codes::kPerUnit, product.left.stride, decoded.words,
        (units.end - units.begin) * Decoded<Codes, typename Dot::Word>::kWords, decoded.numbers, g,
        product.sums.from(block.begin), sums);
  });
}

// Rows that share one decoding of their panels, and whose sums are kept meanwhile. Tiles multiply
// so fast that more must share it: their sums of a pair of panels are 64 KiB.
template <class Dot>
constexpr size_t kRowsPerDecoding = kInTiles<Dot> ? 512 : 20 * kMaxRows;

// Rows that are multiplied at once where there are so many.
template <class Dot>
constexpr size_t kRowsAligned = 1;
#ifdef __AMX_BF16__
template <>
constexpr size_t kRowsAligned<Bfloat16Tiles> = kRowsOfBlock;
#endif

// Rows up to which a group is decoded for all of them and multiplied while it lies in L1. With more
// their left sides no longer do: then all groups are decoded first, and come from L2 each time.
constexpr size_t kRowsPerGroup = 4 * kMaxRows;

// More than two rows, at most kRowsPerDecoding<Dot>, times kVectors panels. decoded: decoded_words.
template <class Codes, int kVectors, class Dot>
static void multiply_blocks(const QuantizedProduct<Dot>& product, Range rows,
                            const CodeView<kVectors>& view, uint32_t* decoded, float* sums) {
  using Word = typename Dot::Word;
  constexpr size_t kWords = Decoded<Codes, Word>::kWords,
                   kDecodedLanes = kWords * kVectors * kLanes;
  const QuantizedShape& shape = product.weight.shape;
  const size_t all = shape.groups(), at_once = groups_at_once<Codes>(product);
  float* scales = reinterpret_cast<float*>(decoded + shape.units() * kDecodedLanes);
  float* offsets = scales + all * kVectors * kLanes;
  const auto multiply = [&](Range block, Range groups, const DecodedGroups<kVectors>& from) {
    multiply_groups<Codes>(product, block, groups, from,
                           sums + (block.begin - rows.begin) * kVectors * kLanes);
  };
  const auto from = [&](size_t g) {
    return Range{g, g + at_once < all ? g + at_once : all};
  };
  const auto decode = [&](Range groups) {
    const Range units{units_of_group<Codes>(shape, groups.begin).begin,
                      units_of_group<Codes>(shape, groups.end - 1).end};
    decode_units<Codes, Word>(view, units, decoded);
    return DecodedGroups<kVectors>{decoded, widen_numbers(view, groups, scales, offsets)};
  };
#ifdef __AMX_BF16__
  if constexpr (kInTiles<Dot> && kVectors == kPair) {
    if (multiplied_while_decoding<Codes>(product, rows, view, sums)) return;
    const bool has_blocks = rows.end - rows.begin >= kRowsOfBlock;
    if (has_blocks && has_whole_steps(shape, shape.units() * Codes::kPerUnit, kTileWords)) {
      const size_t most = at_once < kMostGroupsOfBlock ? at_once : kMostGroupsOfBlock;
      const size_t whole = rows.begin + (rows.end - rows.begin) / kRowsOfBlock * kRowsOfBlock;
      for (size_t g = 0; g < all; g += most) {
        const Range groups{g, g + most < all ? g + most : all};
        const DecodedGroups<kVectors> next = decode(groups);
        multiply_groups_in_blocks<Codes>(product, {rows.begin, whole}, groups, next, sums);
        for_each_block({whole, rows.end}, kRowsAtOnce<Dot>,
                       [&](Range block) { multiply(block, groups, next); });
      }
      return;
    }
  }
#endif
  if (rows.end - rows.begin <= kRowsPerGroup) {
    for (size_t g = 0; g < all; g += at_once) {
      const Range groups = from(g);
      const DecodedGroups<kVectors> next = decode(groups);
      for_each_block(rows, kRowsAtOnce<Dot>, [&](Range block) { multiply(block, groups, next); });
    }
    return;
  }
  decode_units<Codes, Word>(view, {0, shape.units()}, decoded);
  const auto numbers = widen_numbers(view, {0, all}, scales, offsets);
  for_each_block(rows, kRowsAtOnce<Dot>, [&](Range block) {
    for (size_t g = 0; g < all; g += at_once) {
      const size_t first_unit = units_of_group<Codes>(shape, g).begin;
      multiply(block, from(g), {decoded + first_unit * kDecodedLanes, numbers.from(g)});
    }
  });
}

// All rows times panels [panel, panel + kVectors). finish(row, panel, sums) takes 16 sums.
template <class Codes, int kVectors, class Dot, class Finish>
static void multiply_panels(const QuantizedProduct<Dot>& product, Range rows, size_t panel,
                            int thread, const Finish& finish) {
  const CodeView<kVectors> view(product.weight, panel);
  const QuantizedShape& shape = product.weight.shape;
  for_each_block(rows, kRowsPerDecoding<Dot>, [&](Range block) {
    alignas(64) float sums[kRowsPerDecoding<Dot> * kVectors * kLanes];
    const size_t count = block.end - block.begin;
    constexpr size_t kMostInRegisters =
        kInTiles<Dot> || kVectors > kPanelsOfFewRows ? 1 : kFewRows;
    const bool is_in_registers = count <= kMostInRegisters;
    if (is_in_registers) {
      with_count<kMostInRegisters>(count, [&](auto num_rows) {
        multiply_few<Codes, decltype(num_rows)::value>(product, block.begin, view, sums);
      });
    }
    if constexpr (kVectors <= kMaxVectors) {
      if (!is_in_registers) {
        std::memset(sums, 0, count * kVectors * kLanes * sizeof(float));
        uint32_t* decoded = product.decoded + thread * decoded_words<Codes, Dot>(shape);
        multiply_blocks<Codes>(product, block, view, decoded, sums);
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
  if (rows.end - rows.begin == 1) {
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

// Runs multiply(rows, panels, thread) over all of both, shared by the team. Ranges of rows are
// whole multiples of `aligned`; the last has what is left over, too, and never a row alone.
template <class Multiply>
static void share_quantized(Team team, size_t num_rows, size_t rows_at_once, size_t aligned,
                            size_t panels, const Multiply& multiply) {
  const size_t most = rows_at_once < 2 * aligned ? 2 * aligned : rows_at_once;
  const size_t num_chunks = ceil_div(num_rows, most);
  const size_t wanted = team.num_threads == 1 ? 1 : static_cast<size_t>(team.num_threads) * 8;
  const size_t fours = ceil_div(panels, kPanelsOfOneRow);
  const size_t ranges = wanted < fours ? wanted : fours;
  for_each_task(team, num_chunks * ranges, [&](size_t task, int thread) {
    const Range part = part_of(fours, ranges, task % ranges);
    const size_t end = part.end * kPanelsOfOneRow;
    const Range blocks = part_of(ceil_div(num_rows, aligned), num_chunks, task / ranges);
    const size_t rows_end = blocks.end * aligned;
    multiply(Range{blocks.begin * aligned, rows_end < num_rows ? rows_end : num_rows},
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
  const size_t width = shape.units() * Codes::kPerUnit;
  const size_t left_size = left_bytes<Dot, T>(linear.rows, linear.in_features, width);
  const size_t decoded_bytes = decoded_words<Codes, Dot>(shape) * sizeof(uint32_t);
  const bool is_few = linear.rows <= (kInTiles<Dot> ? 1 : kFewRows);
  const size_t decoded_size = is_few ? 0 : team.num_threads * decoded_bytes;
  const size_t widened_size =
      kInTiles<Dot> && is_few ? round_up(width * sizeof(float), 64) : 0;
  const size_t sums_size = shape.has_offsets() ? linear.rows * shape.groups() * sizeof(float) : 0;
  const size_t before_sums = left_size + widened_size + decoded_size;
  char* memory = static_cast<char*>(workers.scratch.take(before_sums + sums_size));
  const T* x = static_cast<const T*>(linear.x);
  float* sums_at = reinterpret_cast<float*>(memory + before_sums);
  float* widened = reinterpret_cast<float*>(memory + left_size);
  const QuantizedProduct<Dot> product{
      left_rows<Dot>(x, linear.rows, linear.in_features, width, memory, team),
      shape.has_offsets() ? sum_groups(x, linear.rows, shape, sums_at, team) : RowSums{nullptr, 0},
      call.weight, reinterpret_cast<uint32_t*>(memory + left_size + widened_size), widened};
  if (widened_size != 0) {
    for_each_vector(linear.rows * width, [&](size_t k, auto n) {
      store_lanes(widened + k, load_lanes(product.left.data + k, n), n);
    });
  }
  const auto finish = [&](size_t row, size_t panel, const float* sums) {
    finish_linear<T>(linear, row, panel, sums);
  };
  share_quantized(team, linear.rows, rows_per_chunk<Dot>(width), kRowsAligned<Dot>,
                  shape.panels(), [&](Range rows, Range panels, int thread) {
                    multiply_quantized<Codes>(product, rows, panels, thread, finish);
                  });
}

}  // namespace lora_serve::LORA_SERVE_PATH
