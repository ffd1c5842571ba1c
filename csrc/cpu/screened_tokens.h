// The token of each row, greedy or drawn, without reading all of the LM head.
//
//   token[t] = what sampling.h chooses of y[t], as linear.h computes it, of those allowed
//
// Of a row that allows few, y is computed of their panels. Elsewhere bounds (screening.h) say which
// panels can hold a token that matters:
//
//   greedy   the largest y, or one that rounds to the same
//   drawn    what weighs a unit at least, and is not below min_p or the k-th largest
//
// Of these, usually a few hundred of thousands, y is computed by the loop that computes it always.
// What is left out would weigh nothing, and the order of what is left is kept: so the token is the
// one that all logits give, to the bit. A row that leaves too many or is not finite: kUndecided.

#pragma once

#include "sampling.h"
#include "screening.h"

namespace lora_serve::LORA_SERVE_PATH {

// At most one panel in so many: more would be read as fast in order.
constexpr size_t kMostPanelsShare = 8;

// A row that allows at most one panel in so many is not screened: these are computed sooner than
// the rest is screened.
constexpr size_t kMostComputedShare = 32;

// Panels that one task computes.
constexpr size_t kPanelsOfTask = 8;

// e^-27.75 is less than a unit, 2^-40; rounding in sampling.h is far below the slack in both.
constexpr double kExponentOfNothing = 27.75, kExponentSlack = 0.01;

// How far below the largest logit a token may lie and still be drawn.
static inline double reach_below(const TokenChoice& choice) {
  if (choice.scale == 0) return 0;
  const double of_min_p = choice.min_p > 0 ? kExponentSlack - std::log(choice.min_p)
                                           : kExponentOfNothing;
  return std::fmin(of_min_p, kExponentOfNothing) / choice.scale;
}

static inline TokenChoice choice_of(const ScreenedCall& call, size_t row) {
  return call.choices == nullptr ? TokenChoice{} : call.choices[row];
}

// What is computed of one row: panels, ascending, and 16 logits of each.
template <class T>
struct ComputedRow {
  uint32_t* panels;
  T* logits;
  size_t count;
  float least;  // none below it matters
};

template <class T>
struct ScreenedTokens {
  const Screening<T>& screening;
  PanelProduct<typename DotFor<T>::Type> product;
  ComputedRow<T>* rows;
  size_t most;  // panels of a row

  bool allows_few(size_t row) const {
    const size_t few = screening.panels / kMostComputedShare;
    size_t count = 0;
    for (size_t panel = 0; panel < screening.panels && count <= few; ++panel) {
      count += screening.allowed(row, panel) != 0;
    }
    return count <= few;
  }

  // None below it matters, once rounded to T. NaN if the row cannot be screened.
  float least_that_matters(size_t row) const {
    const LargestLogit largest = screening.largest(row);
    const TokenChoice choice = choice_of(screening.call, row);
    double least = largest.least - reach_below(choice);
    if (choice.scale != 0 && choice.top_k > 0 && !std::isnan(least) &&
        static_cast<uint64_t>(choice.top_k) < screening.panels) {
      // The k panels' largest are k tokens. The order of `lowers` is of no more use.
      float* lowers = screening.lowers + row * screening.panels;
      least = std::fmax(least, kth_largest(lowers, screening.panels,
                                           static_cast<size_t>(choice.top_k)));
    }
    // Two numbers that round to one of T lie within one ulp of bfloat16, or, below what float16
    // calls normal, within 2^-24.
    const double size = std::fmax(largest.size, std::fabs(least));
    return static_cast<float>(least - (size * 0x1.05p-7 + 0x1p-22));
  }

  // Leaves none where the row is undecided.
  void find_panels(size_t row) const {
    ComputedRow<T>& computed = rows[row];
    computed.count = 0;
    if (allows_few(row)) {
      computed.least = -kInfinity;
      for (size_t panel = 0; panel < screening.panels; ++panel) {
        if (screening.allowed(row, panel) != 0)
          computed.panels[computed.count++] = static_cast<uint32_t>(panel);
      }
      return;
    }
    computed.least = least_that_matters(row);
    const float* upper = screening.uppers + row * screening.panels;
    for (size_t panel = 0; panel < screening.panels; ++panel) {
      if (!(upper[panel] >= computed.least)) continue;
      if (computed.count == most) {
        computed.count = 0;
        return;
      }
      computed.panels[computed.count++] = static_cast<uint32_t>(panel);
    }
  }

  void compute(size_t row, Range part) const {
    const ComputedRow<T>& computed = rows[row];
    for (size_t i = part.begin; i < part.end; ++i) {
      const Range panel{computed.panels[i], computed.panels[i] + size_t{1}};
      product_of(product, {row, row + 1}, panel, [&](size_t, size_t, const float* sums) {
        store(computed.logits + i * kLanes, load(sums));
      });
    }
  }

  // tokens: (most * 16), work memory.
  int64_t choose(size_t row, const RowMemory& memory, uint32_t* tokens) const {
    const ComputedRow<T>& computed = rows[row];
    float poison = 0;
    size_t n = 0;
    for (size_t i = 0; i < computed.count; ++i) {
      float logits[kLanes];
      store(logits, load(static_cast<const T*>(computed.logits + i * kLanes)));
      const uint32_t lanes = screening.allowed(row, computed.panels[i]);
      for (uint32_t lane = 0; lane < kLanes; ++lane) {
        if (!(lanes >> lane & 1)) continue;
        poison += logits[lane] * 0;
        tokens[n] = computed.panels[i] * kLanes + lane;
        memory.row[n] = logits[lane];
        n += logits[lane] >= computed.least;
      }
    }
    if (poison != 0 || n == 0) return kUndecided;
    const TokenChoice choice = choice_of(screening.call, row);
    const float peak = highest(memory.row, n);
    return tokens[choice.scale == 0 ? first_equal(memory.row, peak)
                                    : draw(choice, n, peak, memory)];
  }
};

// Takes pieces of one memory after the other, each aligned to a cache line.
struct Pieces {
  char* next;

  template <class Element>
  Element* take(size_t count) {
    Element* const taken = reinterpret_cast<Element*>(next);
    next += bytes<Element>(count);
    return taken;
  }
  template <class Element>
  static size_t bytes(size_t count) {
    return round_up(count * sizeof(Element), 64);
  }
};

template <class T>
static void choose_screened(const ScreenedTokens<T>& screened, Team team, Pieces& pieces) {
  const ScreenedCall& call = screened.screening.call;
  const size_t rows = call.linear.rows, most_tokens = screened.most * kLanes;
  for_each_task(team, rows, [&](size_t row, int) { screened.find_panels(row); });
  size_t most_found = 0;
  for (size_t row = 0; row < rows; ++row) {
    most_found = most_found < screened.rows[row].count ? screened.rows[row].count : most_found;
  }
  const size_t parts = ceil_div(most_found, kPanelsOfTask);
  for_each_task(team, rows * parts, [&](size_t task, int) {
    screened.compute(task / parts, part_of(screened.rows[task / parts].count, parts, task % parts));
  });
  const size_t threads = static_cast<size_t>(team.num_threads);
  char* memories = pieces.take<char>(threads * RowMemory::bytes(most_tokens));
  uint32_t* tokens = pieces.take<uint32_t>(threads * most_tokens);
  for_each_task(team, rows, [&](size_t row, int thread) {
    const size_t mine = static_cast<size_t>(thread);
    const RowMemory memory(memories + mine * RowMemory::bytes(most_tokens), most_tokens);
    call.tokens[row] = screened.choose(row, memory, tokens + mine * most_tokens);
  });
}

template <class T>
static void screened_tokens_of(const ScreenedCall& call, Workers& workers) {
  using Dot = typename DotFor<T>::Type;
  const LinearCall& linear = call.linear;
  const QuantizedShape& shape = call.screen.codes.shape;
  const Team team = quantized_team(shape, linear.rows, workers);
  const size_t rows = linear.rows, panels = shape.panels();
  const size_t threads = static_cast<size_t>(team.num_threads);
  const size_t most = ceil_div(panels, kMostPanelsShare);

  const size_t left_size = left_bytes<Dot, T>(rows, linear.in_features);
  const size_t coded_size = quantized_rows_bytes(shape, rows);
  Pieces pieces{static_cast<char*>(workers.scratch.take(
      Pieces::bytes<char>(left_size) + Pieces::bytes<char>(coded_size) +
      Pieces::bytes<RowScreen>(threads * rows) + 2 * Pieces::bytes<float>(rows * panels) +
      Pieces::bytes<Reach>(rows) + Pieces::bytes<ComputedRow<T>>(rows) +
      Pieces::bytes<uint32_t>(rows * most) + Pieces::bytes<T>(rows * most * kLanes) +
      Pieces::bytes<char>(threads * RowMemory::bytes(most * kLanes)) +
      Pieces::bytes<uint32_t>(threads * most * kLanes)))};

  const T* x = static_cast<const T*>(linear.x);
  const LeftRows<Dot> left =
      left_rows<Dot>(x, rows, linear.in_features, pieces.take<char>(left_size), team);
  const QuantizedRows coded =
      quantize_rows<EightBits>(x, rows, shape, pieces.take<char>(coded_size), team);
  RowScreen* const screens = pieces.take<RowScreen>(threads * rows);
  float* const lowers = pieces.take<float>(rows * panels);
  float* const uppers = pieces.take<float>(rows * panels);
  const Screening<T> screening{call,   panels, coded,   pieces.take<Reach>(rows),
                               lowers, uppers, screens, threads};
  const ScreenedTokens<T> screened{screening,
                                   {left.data, left.stride, linear.weight, panels,
                                    words_along(linear.in_features, sizeof(T))},
                                   pieces.take<ComputedRow<T>>(rows),
                                   most};
  uint32_t* const panels_at = pieces.take<uint32_t>(rows * most);
  T* const logits_at = pieces.take<T>(rows * most * kLanes);
  bool all_allow_few = true;
  for (size_t row = 0; row < rows; ++row) {
    screened.rows[row] = {panels_at + row * most, logits_at + row * most * kLanes, 0, 0};
    all_allow_few = all_allow_few && screened.allows_few(row);
  }
  if (!all_allow_few) screen_all(screening, panels, team);
  choose_screened(screened, team, pieces);
}

}  // namespace lora_serve::LORA_SERVE_PATH
