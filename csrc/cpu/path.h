// One path's table of kernels, from headers that all paths share.
//
// The file that includes this one has set LORA_SERVE_PATH, the namespace, and LORA_SERVE_SIMD, the
// vector it is written in; its compiler flags say which instructions may be used. Everything here
// is static or in that namespace: no function compiled with one path's flags may serve another.

#pragma once

#include LORA_SERVE_SIMD

#include "activation.h"
#include "attention.h"
#include "elementwise.h"
#include "experts.h"
#include "gated_linear.h"
#include "integer_linear.h"
#include "kernels.h"
#include "layer_norm.h"
#include "linear.h"
#include "lora.h"
#include "machine_limits.h"
#include "norm.h"
#include "quantize.h"
#include "rotary.h"
#include "sampling.h"
#include "screened_tokens.h"
#include "screening.h"

namespace lora_serve::LORA_SERVE_PATH {

#define LORA_SERVE_BY_DTYPE(name, Call)                  \
  static void name(const Call& call, Workers& workers) { \
    switch (call.dtype) {                                \
      case Dtype::kFloat32:                              \
        return name##_of<float>(call, workers);          \
      case Dtype::kFloat16:                              \
        return name##_of<Float16>(call, workers);        \
      case Dtype::kBfloat16:                             \
        return name##_of<Bfloat16>(call, workers);       \
    }                                                    \
  }

LORA_SERVE_BY_DTYPE(linear, LinearCall)
LORA_SERVE_BY_DTYPE(quantize, QuantizeCall)
LORA_SERVE_BY_DTYPE(lora, LoraCall)
LORA_SERVE_BY_DTYPE(norm, NormCall)
LORA_SERVE_BY_DTYPE(silu_and_mul, ActivationCall)
LORA_SERVE_BY_DTYPE(gelu_tanh_and_mul, ActivationCall)
LORA_SERVE_BY_DTYPE(scale, ElementwiseCall)
LORA_SERVE_BY_DTYPE(soft_cap, ElementwiseCall)
LORA_SERVE_BY_DTYPE(gelu_tanh, ElementwiseCall)
LORA_SERVE_BY_DTYPE(add, AddCall)
LORA_SERVE_BY_DTYPE(layer_norm, LayerNormCall)
LORA_SERVE_BY_DTYPE(choose, ChooseCall)
LORA_SERVE_BY_DTYPE(combine, CombineCall)
LORA_SERVE_BY_DTYPE(add_gated, GatedCall)
LORA_SERVE_BY_DTYPE(rotary_and_write_kv, RotaryCall)
LORA_SERVE_BY_DTYPE(attention, AttentionCall)
LORA_SERVE_BY_DTYPE(sample, SampleCall)
LORA_SERVE_BY_DTYPE(screen_norms, ScreenNormsCall)

#undef LORA_SERVE_BY_DTYPE

static void gated_linear(const GatedLinearCall& call, Workers& workers) {
  switch (call.linear.dtype) {
    case Dtype::kFloat32:
      return gated_linear_of<float>(call, workers);
    case Dtype::kFloat16:
      return gated_linear_of<Float16>(call, workers);
    case Dtype::kBfloat16:
      return gated_linear_of<Bfloat16>(call, workers);
  }
}

static void quantized_linear(const QuantizedLinearCall& call, Workers& workers) {
  switch (call.linear.dtype) {
    case Dtype::kFloat32:
      return quantized_linear_of<float>(call, workers);
    case Dtype::kFloat16:
      return quantized_linear_of<Float16>(call, workers);
    case Dtype::kBfloat16:
      return quantized_linear_of<Bfloat16>(call, workers);
  }
}

static void experts(const ExpertsCall& call, Workers& workers) {
  multiply_experts(call, workers, [&](const Expert& expert, const LinearCall& product) {
    if (expert.weight != nullptr) return linear(product, workers);
    quantized_linear({product, expert.quantized, call.quantize_activations}, workers);
  });
}

static void screened_tokens(const ScreenedCall& call, Workers& workers) {
  switch (call.linear.dtype) {
    case Dtype::kFloat32:
      return screened_tokens_of<float>(call, workers);
    case Dtype::kFloat16:
      return screened_tokens_of<Float16>(call, workers);
    case Dtype::kBfloat16:
      return screened_tokens_of<Bfloat16>(call, workers);
  }
}

static constexpr Kernels table(const char* path) {
  return {path,
          linear,
          gated_linear,
          quantize,
          exact_numbers,
          pack_codes,
          quantized_linear,
          screen_norms,
          screened_tokens,
          lora,
          norm,
          silu_and_mul,
          gelu_tanh_and_mul,
          scale,
          soft_cap,
          gelu_tanh,
          add,
          layer_norm,
          choose,
          experts,
          combine,
          add_gated,
          rotary_and_write_kv,
          attention,
          sample,
          multiply_only,
          read_only};
}

}  // namespace lora_serve::LORA_SERVE_PATH
