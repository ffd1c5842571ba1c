#include "embedding.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace lora_serve {

void embed(const EmbedCall& call, Workers&) {
  for (size_t t = 0; t < call.rows; ++t) {
    const size_t id = static_cast<size_t>(call.ids[t]);
    if (id >= call.vocab_size) {
      throw std::out_of_range("token id " + std::to_string(call.ids[t]) + " in a vocabulary of " +
                              std::to_string(call.vocab_size));
    }
    std::memcpy(static_cast<char*>(call.y) + t * call.row_bytes,
                static_cast<const char*>(call.weight) + id * call.row_bytes, call.row_bytes);
  }
}

}  // namespace lora_serve
