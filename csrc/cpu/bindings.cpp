// Python's view of the kernels: raw addresses and sizes, no tensors.
//
// The callers (the modules of lora_serve/ops/cpu, and lora_serve/sampling/native.py) vouch for
// every address, shape and dtype. The interpreter's lock is held while a kernel runs, which also
// keeps a Backend's scratch memory to one caller; packing an adapter releases it, because the
// thread that prepares adapters does so while the engine runs.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "embedding.h"
#include "ggml_blocks.h"
#include "huge_pages.h"
#include "lora_adapter.h"
#include "packing.h"
#include "paths.h"
#include "recording.h"
#include "thread_ids.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace nanobind::detail {

// The TokenChoice of lora_serve/ops/contract/screening.py, by the names of its fields.
template <>
struct type_caster<lora_serve::TokenChoice> {
  NB_TYPE_CASTER(lora_serve::TokenChoice, const_name("TokenChoice"))

  bool from_python(handle source, uint8_t flags, cleanup_list* cleanup) noexcept {
    const auto read = [&](const char* name, auto& field) {
      const object found = steal(PyObject_GetAttrString(source.ptr(), name));
      if (!found.is_valid()) {
        PyErr_Clear();
        return false;
      }
      make_caster<std::decay_t<decltype(field)>> caster;
      if (!caster.from_python(found, flags, cleanup)) return false;
      field = caster.value;
      return true;
    };
    return read("scale", value.scale) && read("min_p", value.min_p) &&
           read("top_p", value.top_p) && read("top_k", value.top_k) &&
           read("seed", value.seed) && read("position", value.position);
  }
};

}  // namespace nanobind::detail

namespace lora_serve {
namespace {

using Address = uintptr_t;

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

template <class T>
const T* pointer_to(Address address) {
  return reinterpret_cast<const T*>(address);
}

// Where memory lies, and its bytes.
using Part = std::tuple<Address, size_t>;

// What was packed before lies in memory that the caller keeps; of the size that it must have.
uint32_t* words_of(const Part& part, size_t num_words) {
  const auto& [address, num_bytes] = part;
  if (num_bytes != num_words * sizeof(uint32_t)) {
    throw std::invalid_argument("a packed weight of this shape has another size");
  }
  return reinterpret_cast<uint32_t*>(address);
}

SharedWords kept_by_caller(uint32_t* words) {
  return SharedWords(words, [](uint32_t*) {});
}

class PackedWeight {
 public:
  PackedWeight(Dtype dtype, const void* weight, size_t out_features, size_t in_features,
               WordArena& arena, Team team)
      : num_words_(packed_words(out_features, in_features, element_bytes(dtype))),
        words_(arena.take(num_words_)) {
    pack_weight(weight, out_features, in_features, dtype, words_.get(), team);
  }
  PackedWeight(int dtype, size_t out_features, size_t in_features, const Part& packed)
      : num_words_(packed_words(out_features, in_features, element_bytes(Dtype(dtype)))),
        words_(kept_by_caller(words_of(packed, num_words_))) {}
  Address address() const { return reinterpret_cast<Address>(words_.get()); }
  size_t num_bytes() const { return num_words_ * sizeof(uint32_t); }
  std::vector<Part> parts() const { return {{address(), num_bytes()}}; }

 private:
  size_t num_words_;
  SharedWords words_;
};

QuantizedShape quantized_shape(int bits, size_t group, size_t out_features, size_t in_features) {
  if ((bits != 8 && bits != 4) || group % kLanes != 0 || group > kMaxGroup || group == 0) {
    throw std::invalid_argument("no kernels for this many bits, or groups of this size");
  }
  return {bits, group, out_features, in_features};
}

// What packing chose: the bits of codes, and how scales and offsets are stored.
using Layout = std::vector<int>;

Layout layout_of(const QuantizedShape& shape) {
  const auto number = [](NumberForm form) {
    return std::pair(static_cast<int>(form.stored), static_cast<int>(form.block));
  };
  const auto [scales, scale_block] = number(shape.scales);
  const auto [offsets, offset_block] = number(shape.offsets);
  return {shape.bits, scales, scale_block, offsets, offset_block};
}

QuantizedShape shape_of_layout(const Layout& layout, size_t group, size_t out_features,
                               size_t in_features) {
  if (layout.size() != 5) throw std::invalid_argument("a layout has five numbers");
  const bool is_narrower = layout[0] == 6 || layout[0] == 5;  // than the codes that were given
  QuantizedShape shape =
      quantized_shape(is_narrower ? 8 : layout[0], group, out_features, in_features);
  shape.bits = layout[0];
  shape.scales = {Stored(layout[1]), static_cast<size_t>(layout[2])};
  shape.offsets = {Stored(layout[3]), static_cast<size_t>(layout[4])};
  return shape;
}

class PackedQuantized {
 public:
  explicit PackedQuantized(const QuantizedShape& shape)
      : words_(allocate_words(shape.packed_words())), weight_{shape, words_.get()} {}
  PackedQuantized(const QuantizedShape& shape, const Part& packed)
      : words_(kept_by_caller(words_of(packed, shape.packed_words()))),
        weight_{shape, words_.get()} {}
  uint32_t* words() { return words_.get(); }
  const QuantizedWeight& weight() const { return weight_; }
  size_t num_bytes() const { return weight_.shape.packed_words() * sizeof(uint32_t); }
  Layout layout() const { return layout_of(weight_.shape); }
  std::vector<Part> parts() const {
    return {{reinterpret_cast<Address>(words_.get()), num_bytes()}};
  }

 private:
  SharedWords words_;
  QuantizedWeight weight_;
};

class PackedScreen {
 public:
  explicit PackedScreen(const QuantizedShape& shape)
      : codes_(shape),
        weight_norms_(shape.panels() * kLanes),
        error_norms_(shape.panels() * kLanes) {}
  // The norms are copied.
  PackedScreen(const QuantizedShape& shape, const std::vector<Part>& packed)
      : codes_(shape, packed.at(0)),
        weight_norms_(norms_of(packed.at(1), shape)),
        error_norms_(norms_of(packed.at(2), shape)) {}

  void fill(Dtype dtype, const void* weight, const Kernels& kernels, Workers& workers) {
    const QuantizedWeight& codes = codes_.weight();
    kernels.quantize({dtype, weight, codes.shape, codes_.words()}, workers);
    kernels.screen_norms({dtype, weight, codes, weight_norms_.data(), error_norms_.data()},
                         workers);
  }
  bool is_usable() const {
    return std::all_of(weight_norms_.begin(), weight_norms_.end(),
                       [](float norm) { return std::isfinite(norm); });
  }
  Screen screen() const { return {codes_.weight(), weight_norms_.data(), error_norms_.data()}; }
  size_t num_bytes() const {
    return codes_.num_bytes() + 2 * weight_norms_.size() * sizeof(float);
  }
  std::vector<Part> parts() const {
    return {codes_.parts().at(0), part_of(weight_norms_), part_of(error_norms_)};
  }

 private:
  static Part part_of(const std::vector<float>& norms) {
    return {reinterpret_cast<Address>(norms.data()), norms.size() * sizeof(float)};
  }
  static std::vector<float> norms_of(const Part& part, const QuantizedShape& shape) {
    const size_t count = shape.panels() * kLanes;
    const float* norms = reinterpret_cast<const float*>(words_of(part, count));
    return {norms, norms + count};
  }

  PackedQuantized codes_;
  std::vector<float> weight_norms_, error_norms_;
};

std::unique_ptr<PackedQuantized> quantized_of_parts(const Layout& layout, size_t group,
                                                    size_t out_features, size_t in_features,
                                                    const Part& packed) {
  return std::make_unique<PackedQuantized>(
      shape_of_layout(layout, group, out_features, in_features), packed);
}

std::unique_ptr<PackedScreen> screen_of_parts(size_t group, size_t out_features,
                                              size_t in_features,
                                              const std::vector<Part>& packed) {
  if (packed.size() != 3) throw std::invalid_argument("a screen has three parts");
  return std::make_unique<PackedScreen>(quantized_shape(8, group, out_features, in_features),
                                        packed);
}

// The experts of one layer; the caller keeps their weights and biases alive.
class PackedExperts {
 public:
  // Addresses of packed weights and of biases.
  explicit PackedExperts(const std::vector<std::tuple<Address, Address>>& experts) {
    for (const auto& [weight, bias] : experts) {
      experts_.push_back({pointer_to<uint32_t>(weight), {}, pointer(bias)});
    }
  }
  explicit PackedExperts(const std::vector<std::tuple<const PackedQuantized*, Address>>& experts) {
    for (const auto& [packed, bias] : experts) {
      experts_.push_back({nullptr, packed->weight(), pointer(bias)});
    }
  }
  PackedExperts(const PackedExperts&) = delete;
  const Expert* data() const { return experts_.data(); }
  size_t size() const { return experts_.size(); }

 private:
  std::vector<Expert> experts_;
};

std::shared_ptr<LoraAdapter> make_adapter(
    int dtype, const std::vector<std::vector<
                   std::tuple<Address, Address, size_t, size_t, size_t, size_t, float>>>& linears) {
  std::vector<std::vector<LoraPartSource>> parts(linears.size());
  for (size_t i = 0; i < linears.size(); ++i) {
    for (const auto& [a, b, rank, in_features, out_features, out_start, scale] : linears[i]) {
      parts[i].push_back(
          {pointer(a), pointer(b), rank, in_features, out_features, out_start, scale});
    }
  }
  nb::gil_scoped_release release;
  return std::make_shared<LoraAdapter>(Dtype(dtype), parts);
}

// Keeps the adapters alive that it is made with.
class StepLora {
 public:
  using Segments = std::vector<std::tuple<size_t, size_t, std::shared_ptr<LoraAdapter>>>;
  explicit StepLora(const Segments& segments) {
    fill(segments);
    for (const auto& segment : segments) adapters_.push_back(std::get<2>(segment));
  }
  StepLora(const StepLora&) = delete;

  // The plan's address stays; the caller keeps these adapters alive.
  void fill(const Segments& segments) {
    segments_.clear();
    for (const auto& [begin, end, adapter] : segments) {
      segments_.push_back({begin, end, adapter->linears()});
    }
    plan_ = {segments_.data(), segments_.size()};
  }
  const LoraPlan& plan() const { return plan_; }

 private:
  std::vector<LoraSegment> segments_;
  std::vector<std::shared_ptr<LoraAdapter>> adapters_;
  LoraPlan plan_;
};

struct StepAttention {
  AttentionPlan plan;
  StepAttention(Address query_start, Address seq_lens, Address block_tables, size_t requests,
                size_t table_stride)
      : plan{pointer_to<int32_t>(query_start), pointer_to<int32_t>(seq_lens),
             pointer_to<int32_t>(block_tables), requests, table_stride} {}
};

// What a row's request changes in its logits; the caller keeps the memory alive.
class StepEdits {
 public:
  using Ids = std::tuple<Address, size_t>;
  StepEdits(Ids banned, Ids biased, Address biases, Ids prompt, Ids output,
            std::optional<std::tuple<float, float, float>> penalties,
            std::optional<Ids> bitmask) {
    const auto [repetition, frequency, presence] = penalties.value_or(std::tuple(1.0f, 0.0f, 0.0f));
    const auto [mask, mask_size] = bitmask.value_or(Ids{0, 0});
    edits_ = {ids(banned),
              ids(biased),
              ids(prompt),
              ids(output),
              pointer_to<float>(biases),
              repetition,
              frequency,
              presence,
              penalties.has_value(),
              pointer_to<uint8_t>(mask),
              mask_size};
  }
  const RowEdits& edits() const { return edits_; }

 private:
  static RowEdits::Ids ids(Ids ids) {
    return {pointer_to<int64_t>(std::get<0>(ids)), std::get<1>(ids)};
  }
  RowEdits edits_;
};

// given, choice, num_top, edits; see sampling_call.h.
using Choice = std::tuple<int64_t, TokenChoice, int64_t, const StepEdits*>;
// token, logit, peak, total, rank, top
using Sampled =
    std::tuple<int64_t, float, float, int64_t, int64_t, std::vector<std::tuple<uint32_t, float>>>;

const Kernels& path_named(const std::string& name) {
  const Kernels* paths[kMaxPaths];
  const int count = usable_paths(paths);
  std::string names;
  for (int i = 0; i < count; ++i) {
    if (name == paths[i]->path) return *paths[i];
    names += std::string(i == 0 ? "" : ", ") + paths[i]->path;
  }
  throw std::invalid_argument("no kernel path '" + name + "' on this machine; have " + names);
}

class Backend {
 public:
  Backend(const std::string& path, int num_threads) : kernels_(path_named(path)) {
    set_num_threads(num_threads);
  }
  const char* path() const { return kernels_.path; }
  int num_threads() const { return workers_->pool.num_threads(); }
  void set_num_threads(int count) {
    if (count < 1) throw std::invalid_argument("num_threads must be at least 1");
    workers_ = std::make_unique<Workers>(count);
  }

  // From here on kernels are noted down instead of run.
  void start_recording() { recording_ = std::make_unique<Recording>(); }
  std::unique_ptr<Recording> finish_recording() { return std::move(recording_); }
  void replay(const Recording& recording) { recording.replay(workers()); }

  void embed(Address weight, Address ids, Address y, size_t rows, size_t row_bytes,
             size_t vocab_size) {
    submit<EmbedCall>(lora_serve::embed, {pointer(weight), pointer_to<int64_t>(ids), pointer(y),
                                          rows, row_bytes, vocab_size});
  }

  std::unique_ptr<PackedWeight> pack_weight(int dtype, Address weight, size_t out_features,
                                            size_t in_features) {
    return std::make_unique<PackedWeight>(Dtype(dtype), pointer(weight), out_features, in_features,
                                          weights_, workers().team(true));
  }

  void linear(int dtype, Address x, Address weight, Address bias, Address y, size_t rows,
              size_t in_features, size_t out_features) {
    submit<LinearCall>(kernels_.linear,
                       {Dtype(dtype), pointer(x), pointer_to<uint32_t>(weight), pointer(bias),
                        pointer(y), rows, in_features, out_features});
  }

  // y has half of out_features.
  void gated_linear(int dtype, Address x, Address weight, Address bias, Address y, size_t rows,
                    size_t in_features, size_t out_features, int gate) {
    submit<GatedLinearCall>(
        kernels_.gated_linear,
        {{Dtype(dtype), pointer(x), pointer_to<uint32_t>(weight), pointer(bias), pointer(y), rows,
          in_features, out_features},
         Gate(gate)});
  }

  std::unique_ptr<PackedQuantized> pack_quantized(int dtype, Address weight, int bits, size_t group,
                                                  size_t out_features, size_t in_features) {
    const QuantizedShape shape = quantized_shape(bits, group, out_features, in_features);
    auto packed = std::make_unique<PackedQuantized>(shape);
    kernels_.quantize({Dtype(dtype), pointer(weight), shape, packed->words()}, workers());
    return packed;
  }

  std::unique_ptr<PackedQuantized> pack_codes(Address codes, Address scales, Address offsets,
                                              int bits, size_t group, size_t out_features,
                                              size_t in_features) {
    const PackCodesCall call{pointer_to<int8_t>(codes), pointer_to<float>(scales),
                             pointer_to<float>(offsets),
                             quantized_shape(bits, group, out_features, in_features)};
    const ExactNumbers numbers = kernels_.exact_numbers(call, workers());
    auto packed = std::make_unique<PackedQuantized>(numbers.shape);
    kernels_.pack_codes(call, numbers, packed->words(), workers());
    return packed;
  }

  void quantized_linear(int dtype, Address x, const PackedQuantized& packed, Address bias,
                        Address y, size_t rows, bool quantize_activations) {
    const QuantizedShape& shape = packed.weight().shape;
    submit<QuantizedLinearCall>(kernels_.quantized_linear,
                                {{Dtype(dtype), pointer(x), nullptr, pointer(bias), pointer(y),
                                  rows, shape.in_features, shape.out_features},
                                 packed.weight(),
                                 quantize_activations});
  }

  // Null where the weight's numbers are too large to be screened, or not finite.
  std::unique_ptr<PackedScreen> pack_screen(int dtype, Address weight, size_t group,
                                            size_t out_features, size_t in_features) {
    auto packed = std::make_unique<PackedScreen>(
        QuantizedShape{8, group, out_features, in_features});
    packed->fill(Dtype(dtype), pointer(weight), kernels_, workers());
    return packed->is_usable() ? std::move(packed) : nullptr;
  }

  // bitmasks: of each row, None if all tokens are allowed; empty if they are in all rows.
  // choices: of each row; empty if all are greedy.
  std::vector<int64_t> screened_tokens(int dtype, Address x, Address weight,
                                       const PackedScreen& packed, size_t rows,
                                       const std::vector<std::optional<nb::bytes>>& bitmasks,
                                       const std::vector<TokenChoice>& choices) {
    const Screen screen = packed.screen();
    std::vector<Bitmask> masks;
    for (const auto& mask : bitmasks) {
      masks.push_back(mask ? Bitmask{static_cast<const uint8_t*>(mask->data()), mask->size()}
                           : Bitmask{nullptr, 0});
    }
    const QuantizedShape& shape = screen.codes.shape;
    std::vector<int64_t> tokens(rows);
    kernels_.screened_tokens(
        {{Dtype(dtype), pointer(x), pointer_to<uint32_t>(weight), nullptr, nullptr, rows,
          shape.in_features, shape.out_features},
         screen,
         masks.empty() ? nullptr : masks.data(),
         choices.empty() ? nullptr : choices.data(),
         tokens.data()},
        workers());
    return tokens;
  }

  void lora(int dtype, Address x, Address y, const StepLora& step, size_t linear_index,
            size_t in_features, size_t out_features) {
    submit<LoraCall>(kernels_.lora, {Dtype(dtype), pointer(x), pointer(y), &step.plan(),
                                     linear_index, in_features, out_features});
  }

  void norm(int dtype, Address x, size_t x_stride, size_t heads, Address residual,
            int weight_dtype, Address weight, Address y, size_t rows, size_t width, float eps) {
    submit<NormCall>(kernels_.norm, {Dtype(dtype),
                                     {pointer(x), x_stride},
                                     heads,
                                     pointer(residual),
                                     Dtype(weight_dtype),
                                     pointer(weight),
                                     pointer(y),
                                     rows,
                                     width,
                                     eps});
  }

  void silu_and_mul(int dtype, Address x, Address y, size_t rows, size_t width) {
    submit<ActivationCall>(kernels_.silu_and_mul,
                           {Dtype(dtype), pointer(x), pointer(y), rows, width});
  }

  void gelu_tanh_and_mul(int dtype, Address x, Address y, size_t rows, size_t width) {
    submit<ActivationCall>(kernels_.gelu_tanh_and_mul,
                           {Dtype(dtype), pointer(x), pointer(y), rows, width});
  }

  void scale(int dtype, Address x, size_t size, float factor) {
    submit<ElementwiseCall>(kernels_.scale, {Dtype(dtype), pointer(x), size, factor});
  }

  void soft_cap(int dtype, Address x, size_t size, float cap) {
    submit<ElementwiseCall>(kernels_.soft_cap, {Dtype(dtype), pointer(x), size, cap});
  }

  void gelu_tanh(int dtype, Address x, size_t size) {
    submit<ElementwiseCall>(kernels_.gelu_tanh, {Dtype(dtype), pointer(x), size, 0.0f});
  }

  void add(int dtype, Address x, Address residual, size_t size) {
    submit<AddCall>(kernels_.add, {Dtype(dtype), pointer(x), pointer(residual), size});
  }

  void layer_norm(int dtype, Address x, Address weight, Address bias, Address y, size_t rows,
                  size_t width, float eps) {
    submit<LayerNormCall>(kernels_.layer_norm, {Dtype(dtype), pointer(x), pointer(weight),
                                                pointer(bias), pointer(y), rows, width, eps});
  }

  void choose(int dtype, Address logits, Address expert_ids, Address weights, size_t rows,
              size_t num_experts, size_t num_chosen, bool among_chosen) {
    submit<ChooseCall>(kernels_.choose,
                       {Dtype(dtype), pointer(logits), static_cast<int32_t*>(pointer(expert_ids)),
                        static_cast<float*>(pointer(weights)), rows, num_experts, num_chosen,
                        among_chosen});
  }

  void experts(int dtype, Address x, const PackedExperts& packed, Address expert_ids, Address y,
               size_t pairs, size_t pairs_per_row, size_t in_features, size_t out_features,
               bool quantize_activations) {
    submit<ExpertsCall>(kernels_.experts,
                        {{Dtype(dtype), pointer(x), nullptr, nullptr, pointer(y), pairs,
                          in_features, out_features},
                         packed.data(),
                         packed.size(),
                         pointer_to<int32_t>(expert_ids),
                         pairs_per_row,
                         quantize_activations});
  }

  void combine(int dtype, Address x, Address weights, Address y, size_t rows, size_t pairs_per_row,
               size_t width) {
    submit<CombineCall>(kernels_.combine, {Dtype(dtype), pointer(x), pointer_to<float>(weights),
                                           pointer(y), rows, pairs_per_row, width});
  }

  void add_gated(int dtype, Address x, Address gate, Address y, size_t rows, size_t width) {
    submit<GatedCall>(kernels_.add_gated,
                      {Dtype(dtype), pointer(x), pointer(gate), pointer(y), rows, width});
  }

  void rotary_and_write_kv(int dtype, Address q, size_t q_stride, Address k, size_t k_stride,
                           Address v, size_t v_stride, Address cos_sin, Address positions,
                           Address slots, Address cache, size_t block_size, size_t num_kv_heads,
                           size_t head_size, size_t tokens, size_t num_heads) {
    submit<RotaryCall>(kernels_.rotary_and_write_kv, {Dtype(dtype),
                                                      {pointer(q), q_stride},
                                                      {pointer(k), k_stride},
                                                      {pointer(v), v_stride},
                                                      pointer_to<float>(cos_sin),
                                                      pointer_to<int64_t>(positions),
                                                      pointer_to<int64_t>(slots),
                                                      pointer(cache),
                                                      {block_size, num_kv_heads, head_size},
                                                      tokens,
                                                      num_heads});
  }

  void attention(int dtype, Address q, size_t q_stride, Address out, Address cache,
                 size_t block_size, size_t num_kv_heads, size_t head_size,
                 const StepAttention& step, size_t num_heads, float scale, int64_t window,
                 float softcap) {
    attention_with_sinks(dtype, q, q_stride, out, cache, block_size, num_kv_heads, head_size, step,
                         num_heads, scale, window, softcap, 0);
  }

  void attention_with_sinks(int dtype, Address q, size_t q_stride, Address out, Address cache,
                            size_t block_size, size_t num_kv_heads, size_t head_size,
                            const StepAttention& step, size_t num_heads, float scale,
                            int64_t window, float softcap, Address sinks) {
    submit<AttentionCall>(kernels_.attention, {Dtype(dtype),
                                               {pointer(q), q_stride},
                                               pointer(out),
                                               pointer(cache),
                                               {block_size, num_kv_heads, head_size},
                                               &step.plan,
                                               num_heads,
                                               scale,
                                               window,
                                               softcap,
                                               pointer_to<float>(sinks)});
  }

  std::vector<Sampled> sample(int dtype, Address logits, size_t vocab_size,
                              const std::vector<Choice>& asked) {
    std::vector<RowChoice> choices;
    int64_t most_top = 0;
    for (const auto& [given, choice, num_top, edits] : asked) {
      choices.push_back({choice, given, num_top, edits == nullptr ? nullptr : &edits->edits()});
      most_top = std::max(most_top, num_top);
    }
    std::vector<RowResult> results(asked.size());
    std::vector<TopEntry> top(asked.size() * static_cast<size_t>(most_top));
    kernels_.sample({Dtype(dtype), pointer(logits), asked.size(), vocab_size, choices.data(),
                     results.data(), top.data(), static_cast<size_t>(most_top)},
                    workers());
    std::vector<Sampled> sampled;
    const TopEntry* entry = top.data();
    for (const RowResult& row : results) {
      std::vector<std::tuple<uint32_t, float>> listed;
      for (size_t i = 0; i < row.num_top; ++i) listed.emplace_back(entry[i].token, entry[i].logit);
      sampled.emplace_back(row.token, row.logit, row.peak, row.total, row.rank, std::move(listed));
      entry += most_top;
    }
    return sampled;
  }

  std::vector<int> thread_ids() { return lora_serve::thread_ids(workers_->pool); }

  size_t multiply_only(int dtype, size_t rounds) {
    return kernels_.multiply_only(Dtype(dtype), rounds, workers());
  }
  void read_only(Address memory, size_t bytes) {
    kernels_.read_only(pointer(memory), bytes, workers());
  }

 private:
  // Every kernel of a forward comes through here, or a replay would leave it out.
  template <class Call>
  void submit(void (*kernel)(const Call&, Workers&), const Call& call) {
    if (recording_ != nullptr) {
      recording_->add([kernel, call](Workers& workers) { kernel(call, workers); });
    } else {
      kernel(call, workers());
    }
  }

  Workers& workers() {
    if (recording_ != nullptr) throw std::logic_error("a kernel ran that was to be recorded");
    return *workers_;
  }

  const Kernels& kernels_;
  std::unique_ptr<Workers> workers_;      // see workers()
  std::unique_ptr<Recording> recording_;  // null while kernels run
  WordArena weights_;
};

// Threads that take the blocks of GGUF files apart. One caller at a time.
class BlockReader {
 public:
  explicit BlockReader(int num_threads) : workers_(num_threads) {}

  void unpack(const std::string& type, Address blocks, size_t num_blocks, Address codes,
              Address scales, Address offsets) {
    nb::gil_scoped_release release;
    unpack_blocks(type, pointer_to<uint8_t>(blocks), num_blocks,
                  {static_cast<int8_t*>(pointer(codes)), static_cast<float*>(pointer(scales)),
                   static_cast<float*>(pointer(offsets))},
                  workers_.team(true));
  }
  void dequantize(const std::string& type, Address blocks, size_t num_blocks, int dtype,
                  Address to) {
    nb::gil_scoped_release release;
    dequantize_blocks(type, pointer_to<uint8_t>(blocks), num_blocks, Dtype(dtype), pointer(to),
                      workers_.team(true));
  }

 private:
  Workers workers_;
};

std::vector<std::string> path_names() {
  const Kernels* paths[kMaxPaths];
  const int count = usable_paths(paths);
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) names.emplace_back(paths[i]->path);
  return names;
}

}  // namespace

NB_MODULE(_cpu, m) {
  // Kernels live as long as the process: what is left at its end is no leak.
  nb::set_leak_warnings(false);

  m.def("usable_paths", &path_names);
  m.def("use_huge_pages",
        [](Address address, size_t bytes) { use_huge_pages(pointer(address), bytes); });

  nb::class_<BlockReader>(m, "BlockReader")
      .def(nb::init<int>())
      .def("unpack", &BlockReader::unpack)
      .def("dequantize", &BlockReader::dequantize);

  nb::class_<PackedWeight>(m, "PackedWeight")
      .def(nb::init<int, size_t, size_t, const Part&>())
      .def_prop_ro("address", &PackedWeight::address)
      .def_prop_ro("num_bytes", &PackedWeight::num_bytes)
      .def_prop_ro("parts", &PackedWeight::parts);

  nb::class_<PackedQuantized>(m, "PackedQuantized")
      .def(nb::new_(&quantized_of_parts))
      .def_prop_ro("num_bytes", &PackedQuantized::num_bytes)
      .def_prop_ro("layout", &PackedQuantized::layout)
      .def_prop_ro("parts", &PackedQuantized::parts);

  nb::class_<PackedScreen>(m, "PackedScreen")
      .def(nb::new_(&screen_of_parts))
      .def_prop_ro("num_bytes", &PackedScreen::num_bytes)
      .def_prop_ro("parts", &PackedScreen::parts);

  nb::class_<PackedExperts>(m, "PackedExperts")
      .def(nb::init<const std::vector<std::tuple<Address, Address>>&>())
      .def(nb::init<const std::vector<std::tuple<const PackedQuantized*, Address>>&>());

  nb::class_<LoraAdapter>(m, "LoraAdapter")
      .def(nb::new_(&make_adapter))
      .def_prop_ro("num_bytes", &LoraAdapter::num_bytes)
      .def_prop_ro("num_linears", &LoraAdapter::num_linears);

  nb::class_<StepLora>(m, "StepLora")
      .def(nb::init<StepLora::Segments>())
      .def("fill", &StepLora::fill);

  nb::class_<StepAttention>(m, "StepAttention")
      .def(nb::init<Address, Address, Address, size_t, size_t>());

  nb::class_<StepEdits>(m, "StepEdits")
      .def(nb::init<StepEdits::Ids, StepEdits::Ids, Address, StepEdits::Ids, StepEdits::Ids,
                    std::optional<std::tuple<float, float, float>>,
                    std::optional<StepEdits::Ids>>(),
           nb::kw_only(), "banned"_a, "biased"_a, "biases"_a, "prompt"_a, "output"_a,
           "penalties"_a, "bitmask"_a);

  nb::class_<Recording>(m, "Recording").def_prop_ro("num_calls", &Recording::num_calls);

  nb::class_<Backend>(m, "Backend")
      .def(nb::init<const std::string&, int>())
      .def_prop_ro("path", &Backend::path)
      .def_prop_rw("num_threads", &Backend::num_threads, &Backend::set_num_threads)
      .def("start_recording", &Backend::start_recording)
      .def("finish_recording", &Backend::finish_recording)
      .def("replay", &Backend::replay)
      .def("embed", &Backend::embed)
      .def("pack_weight", &Backend::pack_weight)
      .def("linear", &Backend::linear)
      .def("gated_linear", &Backend::gated_linear)
      .def("pack_quantized", &Backend::pack_quantized)
      .def("pack_codes", &Backend::pack_codes)
      .def("quantized_linear", &Backend::quantized_linear)
      .def("pack_screen", &Backend::pack_screen)
      .def("screened_tokens", &Backend::screened_tokens)
      .def("lora", &Backend::lora)
      .def("norm", &Backend::norm)
      .def("silu_and_mul", &Backend::silu_and_mul)
      .def("gelu_tanh_and_mul", &Backend::gelu_tanh_and_mul)
      .def("scale", &Backend::scale)
      .def("soft_cap", &Backend::soft_cap)
      .def("gelu_tanh", &Backend::gelu_tanh)
      .def("add", &Backend::add)
      .def("layer_norm", &Backend::layer_norm)
      .def("choose", &Backend::choose)
      .def("experts", &Backend::experts)
      .def("combine", &Backend::combine)
      .def("add_gated", &Backend::add_gated)
      .def("rotary_and_write_kv", &Backend::rotary_and_write_kv)
      .def("attention", &Backend::attention)
      .def("attention_with_sinks", &Backend::attention_with_sinks)
      .def("sample", &Backend::sample)
      .def("thread_ids", &Backend::thread_ids)
      .def("multiply_only", &Backend::multiply_only)
      .def("read_only", &Backend::read_only);
}

}  // namespace lora_serve
