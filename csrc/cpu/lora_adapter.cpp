#include "lora_adapter.h"

#include "packing.h"

namespace lora_serve {
namespace {

// Hidden elements that a part takes: whole words.
size_t padded_rank(const LoraPartSource& part, size_t element) {
  return words_along(part.rank, element) * 4 / element;
}

size_t hidden_of(const std::vector<LoraPartSource>& parts, size_t element) {
  size_t hidden = 0;
  for (const LoraPartSource& part : parts) hidden += padded_rank(part, element);
  return round_up(hidden, kLanes);
}

// The rows of all parts' A, null where a part's rank ends inside a word.
std::vector<const void*> shrink_rows(const std::vector<LoraPartSource>& parts, size_t element) {
  std::vector<const void*> rows;
  for (const LoraPartSource& part : parts) {
    const char* a = static_cast<const char*>(part.a);
    for (size_t r = 0; r < padded_rank(part, element); ++r) {
      rows.push_back(r < part.rank ? a + r * part.in_features * element : nullptr);
    }
  }
  return rows;
}

}  // namespace

LoraAdapter::LoraAdapter(Dtype dtype, const std::vector<std::vector<LoraPartSource>>& parts) {
  const size_t element = element_bytes(dtype);
  size_t num_parts = 0;
  for (const auto& layer : parts) {
    num_parts += layer.size();
    if (layer.empty()) continue;
    num_words_ += packed_words(hidden_of(layer, element), layer[0].in_features, element);
    for (const LoraPartSource& part : layer) {
      num_words_ += packed_words(part.out_features, part.rank, element);
    }
  }
  words_ = allocate_words(num_words_);
  parts_.reserve(num_parts);  // linears_ point into it

  const Team alone{nullptr, 1};  // loaders run beside the engine
  uint32_t* next = words_.get();
  for (const auto& layer : parts) {
    LoraLinear linear{next, hidden_of(layer, element), parts_.data() + parts_.size(), layer.size()};
    if (!layer.empty()) {
      const std::vector<const void*> rows = shrink_rows(layer, element);
      pack_rows(rows.data(), rows.size(), layer[0].in_features, dtype, next);
      next += packed_words(linear.hidden, layer[0].in_features, element);
    }
    size_t hidden_start = 0;
    for (const LoraPartSource& part : layer) {
      pack_weight(part.b, part.out_features, part.rank, dtype, next, alone);
      parts_.push_back(
          {next, hidden_start, part.rank, part.out_start, part.out_features, part.scale});
      hidden_start += padded_rank(part, element);
      next += packed_words(part.out_features, part.rank, element);
    }
    linears_.push_back(linear);
  }
}

}  // namespace lora_serve
