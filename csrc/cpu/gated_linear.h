// y[t][i] = f(g[t][i]) * u[t][i]        f = silu or gelu_tanh
//
// g and u are the halves of what linear.h gives, T rows of I outputs each, rounded as it rounds
// them: the bits are those of `linear` and then of activation.h. I is of whole pairs of panels, so
// that the packed weights of u are a product's own, behind those of g.

#pragma once

#include "exponential.h"
#include "linear.h"

namespace lora_serve::LORA_SERVE_PATH {

template <class T>
SIMD_INLINE F32x16 rounded(F32x16 x) {
  T narrow[kLanes];
  store(narrow, x);
  return load(static_cast<const T*>(narrow));
}

// A panel of g lies in y until that of u is there; of a block, both come at once.
template <class T, class Activation>
struct FinishGated {
  static constexpr size_t kProducts = 2;
  const LinearCall& gate;
  const T* up_bias;  // or null
  Activation activation;

  void panel(size_t index, size_t row, size_t panel, const float* sums) const {
    if (index == 0) return finish_linear<T>(gate, row, panel, sums);
    T* y = static_cast<T*>(gate.y) + row * gate.out_features + panel * kLanes;
    F32x16 up = load(sums);
    if (up_bias != nullptr) up = add(up, load(up_bias + panel * kLanes));
    store(y, mul(activation(load(static_cast<const T*>(y))), rounded<T>(up)));
  }

#ifdef __AMX_BF16__
  void prepare(size_t row, size_t panel) const { FinishLinear<T>{gate}.prepare(row, panel); }

  void block(size_t row, size_t panel, const float* sums) const {
    if (up_bias == nullptr) return finish_block<false>(row, panel, sums);
    finish_block<true>(row, panel, sums);
  }

  template <bool kHasBias>
  void finish_block(size_t row, size_t panel, const float* sums) const {
    const size_t column = panel * kLanes;
    T* y = static_cast<T*>(gate.y) + row * gate.out_features + column;
    for (size_t r = 0; r < kRowsOfBlock; ++r, y += gate.out_features, sums += kSumsOfRow) {
#pragma GCC unroll 2
      for (size_t at = 0; at < kSumsOfRow; at += kLanes) {
        F32x16 g = load(sums + at), u = load(sums + kSumsOfBlock + at);
        if constexpr (kHasBias) {
          g = add(g, load(static_cast<const T*>(gate.bias) + column + at));
          u = add(u, load(up_bias + column + at));
        }
        store(y + at, mul(activation(rounded<T>(g)), rounded<T>(u)));
      }
    }
  }
#endif
};

template <class T, class Activation>
static void gated_linear_with(const LinearCall& both, Workers& workers,
                              const Activation& activation) {
  LinearCall gate = both;
  gate.out_features /= 2;
  const T* bias = static_cast<const T*>(both.bias);
  const T* up_bias = bias == nullptr ? nullptr : bias + gate.out_features;
  multiply_rows<T>(gate, workers, FinishGated<T, Activation>{gate, up_bias, activation});
}

template <class T>
static void gated_linear_of(const GatedLinearCall& call, Workers& workers) {
  switch (call.gate) {
    case Gate::kSilu:
      return gated_linear_with<T>(call.linear, workers, [](F32x16 x) { return silu(x); });
    case Gate::kGeluTanh:
      return gated_linear_with<T>(call.linear, workers, [](F32x16 x) { return gelu_tanh(x); });
  }
}

}  // namespace lora_serve::LORA_SERVE_PATH
