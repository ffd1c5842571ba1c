// What every path offers: one table of plain functions, filled once per path, chosen at start.
//
// Sizes are in elements unless a name says bytes. Pointers are to row-major memory that the caller
// keeps alive during the call. No function here knows torch or Python.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dtype.h"
#include "lora_tables.h"
#include "quantized_weight.h"
#include "sampling_call.h"
#include "workers.h"

namespace lora_serve {

// y = x @ weight.T + bias.   x (rows, in), y (rows, out), contiguous; bias (out) or null.
struct LinearCall {
  Dtype dtype;
  const void* x;
  const uint32_t* weight;  // packed, see packing.h
  const void* bias;
  void* y;
  size_t rows, in_features, out_features;
};

enum class Gate { kSilu, kGeluTanh };

// y = f(g) * u, where g and u are the halves of what `linear` gives, to its bits; see
// gated_linear.h.   y (rows, out / 2); out / 2 is of whole pairs of panels.
struct GatedLinearCall {
  LinearCall linear;
  Gate gate;
};

// `linear` with a quantised weight. `linear.weight` is not looked at.
struct QuantizedLinearCall {
  LinearCall linear;
  QuantizedWeight weight;
  bool quantize_activations;
};

// One expert's weight, as it is or quantised, and its bias or null.
struct Expert {
  const uint32_t* weight;  // packed, see packing.h; null for a quantised one
  QuantizedWeight quantized;
  const void* bias;
};

// y[p] = x[p / pairs_per_row] through the linear layer of expert expert_ids[p], see experts.h.
// `linear.rows` counts pairs; its weight and bias are not looked at.
struct ExpertsCall {
  LinearCall linear;
  const Expert* experts;
  size_t num_experts;
  const int32_t* expert_ids;  // (pairs), each in [0, num_experts)
  size_t pairs_per_row;
  bool quantize_activations;
};

// The num_chosen largest of each row's logits (rows, num_experts), and their shares of the softmax
// of all of them, or of those chosen.
struct ChooseCall {
  Dtype dtype;
  const void* logits;
  int32_t* expert_ids;  // (rows, num_chosen)
  float* weights;       // (rows, num_chosen)
  size_t rows, num_experts, num_chosen;
  bool among_chosen;
};

// y[t] = sum over j of weights[t][j] * x[t][j].   x (rows, pairs_per_row, width), y (rows, width).
struct CombineCall {
  Dtype dtype;
  const void* x;
  const float* weights;
  void* y;
  size_t rows, pairs_per_row, width;
};

// y[t] += sigmoid(gate[t]) * x[t].   x, y (rows, width), gate (rows).
struct GatedCall {
  Dtype dtype;
  const void* x;
  const void* gate;
  void* y;
  size_t rows, width;
};

// weight (out, in), contiguous, into codes and scales; see quantize.h.
struct QuantizeCall {
  Dtype dtype;
  const void* weight;
  QuantizedShape shape;
  uint32_t* packed;  // shape.packed_words()
};

// Codes (out, in), contiguous, in the range of quantized_weight.h, and the numbers of their groups,
// (out, groups): scales, and offsets or null.
struct PackCodesCall {
  const int8_t* codes;
  const float* scales;
  const float* offsets;
  QuantizedShape shape;  // of 8 or 4 bits
};

// How a weight is packed, and its panels' numbers so: scale_words() and offset_words() of each.
struct ExactNumbers {
  QuantizedShape shape;
  std::vector<uint32_t> scales, offsets;
};

// An LM head's copy in bytes, see screening.h. Norms are those of whole panels' rows, rounded up.
struct Screen {
  QuantizedWeight codes;      // of 8 bits
  const float* weight_norms;  // |weight[n]|
  const float* error_norms;   // |weight[n] - codes[n]|
};

// The norms of a screen whose codes are there. weight (out, in), contiguous. A weight norm is
// infinite where nothing can be screened.
struct ScreenNormsCall {
  Dtype dtype;
  const void* weight;
  QuantizedWeight codes;
  float* weight_norms;
  float* error_norms;
};

constexpr int64_t kUndecided = -1;

// Allows token i by bit i % 8 of byte i / 8, and none behind its last byte; null allows all.
struct Bitmask {
  const uint8_t* data;
  size_t size;
};

// What is chosen of each row's outputs of `linear`, of those that its bitmask allows. The linear
// has no bias, and its y is not looked at.
struct ScreenedCall {
  LinearCall linear;
  Screen screen;
  const Bitmask* bitmasks;     // (rows), or null: all tokens are allowed
  const TokenChoice* choices;  // (rows), or null: greedy
  int64_t* tokens;             // (rows), or kUndecided
};

// y[segment rows] += delta of each segment's adapter.   x (rows, in), y (rows, out), contiguous.
struct LoraCall {
  Dtype dtype;
  const void* x;
  void* y;
  const LoraPlan* plan;
  size_t linear_index;
  size_t in_features, out_features;
};

// Heads are contiguous inside a token; tokens lie `stride` elements apart.
struct TokenRows {
  void* data;
  size_t stride;
};

// y[n] = x[n] * weight / sqrt(mean(x[n]^2) + eps); with a residual, x[n] is residual[n] += x[n].
// Row n of x is head n % heads of token n / heads; the others' rows lie side by side.
struct NormCall {
  Dtype dtype;
  TokenRows x;
  size_t heads;
  void* residual;      // or null
  Dtype weight_dtype;  // dtype, or kFloat32
  const void* weight;
  void* y;
  size_t rows, width;
  float eps;
};

// y[n] = (x[n] - mean(x[n])) / sqrt(variance(x[n]) + eps) * weight + bias.   x, y (rows, width),
// contiguous; weight (width), bias (width) or null.
struct LayerNormCall {
  Dtype dtype;
  const void* x;
  const void* weight;
  const void* bias;
  void* y;
  size_t rows, width;
  float eps;
};

// residual[i] += x[i].
struct AddCall {
  Dtype dtype;
  const void* x;
  void* residual;
  size_t size;
};

// x[i] = f(x[i], factor); gelu_tanh looks at no factor.
struct ElementwiseCall {
  Dtype dtype;
  void* x;
  size_t size;
  float factor;
};

// y[t] = activation(x[t][:width]) * x[t][width:].   x (rows, 2 width), y (rows, width).
struct ActivationCall {
  Dtype dtype;
  const void* x;
  void* y;
  size_t rows, width;
};

// The shape of one layer's KV cache, see kv_layout.h.
struct KvShape {
  size_t block_size, num_kv_heads, head_size;
};

// Rotates q in place; writes rotated k, and v, to the cache. A negative slot is not written.
struct RotaryCall {
  Dtype dtype;
  TokenRows q, k, v;
  const float* cos_sin;      // (positions, head_size): cosines of each half, then sines
  const int64_t* positions;  // (tokens)
  const int64_t* slots;      // (tokens): block_id * block_size + offset
  void* cache;
  KvShape shape;
  size_t tokens, num_heads;
};

// Which queries attend to which blocks; the plan's maker keeps what it points to alive.
struct AttentionPlan {
  const int32_t* query_start;   // (requests + 1)
  const int32_t* seq_lens;      // (requests)
  const int32_t* block_tables;  // (requests, table_stride)
  size_t requests, table_stride;
};

struct AttentionCall {
  Dtype dtype;
  TokenRows q;
  void* out;  // (tokens, num_heads, head_size), contiguous
  const void* cache;
  KvShape shape;
  const AttentionPlan* plan;
  size_t num_heads;
  float scale;
  int64_t window;      // 0: no window
  float softcap;       // 0: none
  const float* sinks;  // (num_heads), or null: see write_out
};

struct Kernels {
  const char* path;
  void (*linear)(const LinearCall&, Workers&);
  void (*gated_linear)(const GatedLinearCall&, Workers&);
  void (*quantize)(const QuantizeCall&, Workers&);
  ExactNumbers (*exact_numbers)(const PackCodesCall&, Workers&);
  // packed: numbers.shape.packed_words().
  void (*pack_codes)(const PackCodesCall&, const ExactNumbers& numbers, uint32_t* packed, Workers&);
  void (*quantized_linear)(const QuantizedLinearCall&, Workers&);
  void (*screen_norms)(const ScreenNormsCall&, Workers&);
  void (*screened_tokens)(const ScreenedCall&, Workers&);
  void (*lora)(const LoraCall&, Workers&);
  void (*norm)(const NormCall&, Workers&);
  void (*silu_and_mul)(const ActivationCall&, Workers&);
  void (*gelu_tanh_and_mul)(const ActivationCall&, Workers&);
  void (*scale)(const ElementwiseCall&, Workers&);
  void (*soft_cap)(const ElementwiseCall&, Workers&);
  void (*gelu_tanh)(const ElementwiseCall&, Workers&);
  void (*add)(const AddCall&, Workers&);
  void (*layer_norm)(const LayerNormCall&, Workers&);
  void (*choose)(const ChooseCall&, Workers&);
  void (*experts)(const ExpertsCall&, Workers&);
  void (*combine)(const CombineCall&, Workers&);
  void (*add_gated)(const GatedCall&, Workers&);
  void (*rotary_and_write_kv)(const RotaryCall&, Workers&);
  void (*attention)(const AttentionCall&, Workers&);
  void (*sample)(const SampleCall&, Workers&);
  size_t (*multiply_only)(Dtype, size_t rounds, Workers&);
  void (*read_only)(const void* memory, size_t bytes, Workers&);
};

}  // namespace lora_serve
