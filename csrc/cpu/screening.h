// How large each logit of an LM head is at least and at most, without reading all of it.
//
//   y[t][n] = x[t] . weight[n], as linear.h computes it
//
// T rows, V tokens. A copy of the weight in bytes, half as large as bfloat16, gives approx[t][n],
// and how far off it may be: by Cauchy and Schwarz, with x = x' + lost, weight = weight' + error,
//
//   |y - approx| <= |weight[n]| |lost| + |error[n]| |x'| + what rounding adds
//
// screened_tokens.h computes those that may matter.

#pragma once

#include <cmath>

#include "integer_linear.h"
#include "sampling.h"

namespace lora_serve::LORA_SERVE_PATH {

// Beyond these, what vdpbf16ps does to denormals, and infinities, would have to be reckoned with.
constexpr double kLargestScreened = 1e15;
constexpr float kLargestHalf = 6e4f, kLargestOther = 1e38f;

// A bound for a float that may have been rounded down a few times.
SIMD_INLINE float raised(double x) { return static_cast<float>(x) * (1 + 0x1p-20f); }

// approx is off by at most weight * |weight[n]| + error * |error[n]|.
struct Reach {
  float weight, error;
};

template <class T>
static Reach reach_of(const T* x, const QuantizedRows& coded, size_t row,
                      const QuantizedShape& shape) {
  double all = 0, kept = 0, lost = 0;
  for (size_t g = 0; g < shape.groups(); ++g) {
    const size_t begin = g * shape.group;
    const size_t count =
        begin + shape.group < shape.in_features ? shape.group : shape.in_features - begin;
    float wide[kMaxGroup];
    for_each_vector(count, [&](size_t k, auto n) {
      store_lanes(wide + k, load_lanes(x + begin + k, n), n);
    });
    const double scale = coded.scales[row * coded.groups + g];
    const int8_t* codes = coded.codes + row * coded.stride + begin;
    for (size_t k = 0; k < count; ++k) {
      const double value = wide[k], near = codes[k] * scale;
      all += value * value;
      kept += near * near;
      lost += (value - near) * (value - near);
    }
  }
  // The error of n roundings to float, each to half an ulp: twice what they add up to.
  const double of_exact = static_cast<double>(shape.in_features) * 0x1p-23;
  const double of_coded = static_cast<double>(shape.groups() + 3) * 0x1p-23;
  const double norm = std::sqrt(all), near_norm = std::sqrt(kept);
  if (!(norm < kLargestScreened)) return {__builtin_nanf(""), __builtin_nanf("")};
  return {raised(std::sqrt(lost) + of_exact * norm + of_coded * near_norm),
          raised(near_norm * (1 + of_coded))};
}

// What one thread has seen of one row, lane by lane: the largest of what y is at least and at most;
// poison is NaN if anything was not finite.
struct alignas(64) RowScreen {
  float least[kLanes], most[kLanes], poison[kLanes];

  void clear() {
    store(least, broadcast(-kInfinity));
    store(most, broadcast(-kInfinity));
    store(poison, zero());
  }
  void add(F32x16 lower, F32x16 upper) {
    store(least, at_least(lower, load(least)));
    store(most, at_least(upper, load(most)));
    store(poison, fma(lower, zero(), load(poison)));
  }
};

struct LargestLogit {
  float least, size;
};

template <class T>
struct Screening {
  const ScreenedCall& call;
  size_t panels;
  QuantizedRows coded;
  Reach* reaches;      // (rows)
  float* lowers;       // (rows, panels): the least that the largest y of the panel can be
  float* uppers;       // (rows, panels): the most that any y of the panel can be
  RowScreen* screens;  // (threads, rows)
  size_t num_threads;

  // Which of a panel's lanes are tokens that the row allows, as bits.
  uint32_t allowed(size_t row, size_t panel) const {
    static_assert(kLanes == 16, "a panel is two bytes of a bitmask");
    const size_t left = call.linear.out_features - panel * kLanes;
    const uint32_t known = left < kLanes ? (1u << left) - 1 : 0xffff;
    if (call.bitmasks == nullptr || call.bitmasks[row].data == nullptr) return known;
    const Bitmask& mask = call.bitmasks[row];
    const size_t byte = panel * (kLanes / 8);
    const uint32_t low = byte < mask.size ? mask.data[byte] : 0;
    const uint32_t high = byte + 1 < mask.size ? mask.data[byte + 1] : 0;
    return (low | high << 8) & known;
  }

  // 16 approximate ones. Lanes that are not allowed cannot win.
  void see(size_t row, size_t panel, const float* sums, RowScreen& screen) const {
    const uint32_t lanes = allowed(row, panel);
    if (lanes == 0) {
      lowers[row * panels + panel] = uppers[row * panels + panel] = -kInfinity;
      return;
    }
    const F32x16 approx = load(sums);
    const F32x16 of_error =
        mul(broadcast(reaches[row].error), load(call.screen.error_norms + panel * kLanes));
    const F32x16 off = fma(broadcast(reaches[row].weight),
                           load(call.screen.weight_norms + panel * kLanes), of_error);
    F32x16 lower = sub(approx, off), upper = add(approx, off);
    if (lanes != 0xffff) {
      const int first = __builtin_ctz(lanes);
      float low[kLanes], high[kLanes];
      store(low, lower);
      store(high, upper);
      for (size_t i = 0; i < kLanes; ++i) {
        low[i] = lanes >> i & 1 ? low[i] : low[first];
        high[i] = lanes >> i & 1 ? high[i] : high[first];
      }
      lower = load(low);
      upper = load(high);
    }
    lowers[row * panels + panel] = reduce_max(lower);
    uppers[row * panels + panel] = reduce_max(upper);
    screen.add(lower, upper);
  }

  // How large the largest y is at least, and how far any of its kind is from 0 at most. NaN if the
  // row cannot be screened.
  LargestLogit largest(size_t row) const {
    float least = -kInfinity, most = -kInfinity, poison = 0;
    for (size_t thread = 0; thread < num_threads; ++thread) {
      const RowScreen& screen = screens[thread * call.linear.rows + row];
      const float low = reduce_max(load(screen.least)), high = reduce_max(load(screen.most));
      least = low > least ? low : least;
      most = high > most ? high : most;
      poison += reduce_add(load(screen.poison));
    }
    const float size = std::fmax(std::fabs(least), std::fabs(most));
    const float limit = call.linear.dtype == Dtype::kFloat16 ? kLargestHalf : kLargestOther;
    if (poison != 0 || !(size < limit)) return {__builtin_nanf(""), __builtin_nanf("")};
    return {least, size};
  }
};

// Bounds of every row's panels, into what `screening` points to.
template <class T>
static void screen_all(const Screening<T>& screening, size_t panels, Team team) {
  const LinearCall& linear = screening.call.linear;
  const QuantizedWeight& codes = screening.call.screen.codes;
  const T* x = static_cast<const T*>(linear.x);
  for (size_t i = 0; i < screening.num_threads * linear.rows; ++i) screening.screens[i].clear();
  for_each_task(team, linear.rows, [&](size_t row, int) {
    screening.reaches[row] =
        reach_of(x + row * linear.in_features, screening.coded, row, codes.shape);
  });

  const IntegerProduct product{screening.coded, codes};
  const size_t rows_at_once = round_up(kChunkBytes / product.rows.stride + 1, kMaxRows);
  const auto screen = [&](Range rows, Range part, int thread) {
    RowScreen* const screens = screening.screens + static_cast<size_t>(thread) * linear.rows;
    multiply_integers<EightBits>(product, rows, part,
                                 [&](size_t row, size_t panel, const float* sums) {
                                   screening.see(row, panel, sums, screens[row]);
                                 });
  };
  share_quantized(team, linear.rows, rows_at_once, 1, panels, screen);
}

// Norms of one row of the weight and of what its codes leave out; infinity: it is not screened.
template <class T>
static void norms_of_row(const ScreenNormsCall& call, size_t n) {
  const QuantizedShape& shape = call.codes.shape;
  const size_t panel = n / kLanes, lane = n % kLanes;
  const T* weight = static_cast<const T*>(call.weight) + n * shape.in_features;
  double all = 0, lost = 0;
  for (size_t g = 0; g < shape.groups(); ++g) {
    const size_t begin = g * shape.group;
    const size_t count =
        begin + shape.group < shape.in_features ? shape.group : shape.in_features - begin;
    float wide[kMaxGroup];
    for_each_vector(count, [&](size_t k, auto lanes) {
      store_lanes(wide + k, load_lanes(weight + begin + k, lanes), lanes);
    });
    const double scale = widened(call.codes.bfloat16_scales(panel)[g * kLanes + lane]);
    for (size_t k = 0; k < count; ++k) {
      const uint32_t word = call.codes.codes(panel)[(begin + k) / 4 * kLanes + lane];
      const double value = wide[k];
      const double error = value - static_cast<int8_t>(word >> 8 * (k % 4)) * scale;
      all += value * value;
      lost += error * error;
    }
  }
  const double norm = std::sqrt(all);
  call.weight_norms[n] = norm < kLargestScreened ? raised(norm) : kInfinity;
  call.error_norms[n] = raised(std::sqrt(lost));
}

template <class T>
static void screen_norms_of(const ScreenNormsCall& call, Workers& workers) {
  const QuantizedShape& shape = call.codes.shape;
  for_each_task(workers.team(true), shape.panels(), [&](size_t panel, int) {
    for (size_t n = panel * kLanes; n < (panel + 1) * kLanes; ++n) {
      if (n < shape.out_features) {
        norms_of_row<T>(call, n);
      } else {
        call.weight_norms[n] = call.error_norms[n] = 0;
      }
    }
  });
}

}  // namespace lora_serve::LORA_SERVE_PATH
