// Kernel calls noted down instead of made, to be made later in the same order.
//
// What a call points to must live as long as the recording. Between two replays its owner changes
// what lies there: tokens, plans.

#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "workers.h"

namespace lora_serve {

class Recording {
 public:
  using Call = std::function<void(Workers&)>;

  void add(Call call) { calls_.push_back(std::move(call)); }
  size_t num_calls() const { return calls_.size(); }
  void replay(Workers& workers) const {
    for (const Call& call : calls_) call(workers);
  }

 private:
  std::vector<Call> calls_;
};

}  // namespace lora_serve
