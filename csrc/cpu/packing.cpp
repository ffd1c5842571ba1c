#include "packing.h"

#include <algorithm>
#include <cstring>
#include <vector>

#define LORA_SERVE_PATH baseline
#include "parallel.h"

namespace lora_serve {
namespace {

// One panel from up to 16 rows; a null row is all zeros.
void pack_panel(const char* const* rows, size_t row_bytes, uint32_t* panel) {
  const size_t whole = row_bytes / 4;
  for (size_t k = 0; k < whole; ++k) {
    for (int lane = 0; lane < kLanes; ++lane) {
      uint32_t word = 0;
      if (rows[lane] != nullptr) std::memcpy(&word, rows[lane] + 4 * k, 4);
      panel[k * kLanes + lane] = word;
    }
  }
  if (row_bytes % 4 == 0) return;
  for (int lane = 0; lane < kLanes; ++lane) {
    uint32_t word = 0;
    if (rows[lane] != nullptr) std::memcpy(&word, rows[lane] + 4 * whole, row_bytes % 4);
    panel[whole * kLanes + lane] = word;
  }
}

}  // namespace

void pack_weight(const void* weight, size_t out_features, size_t in_features, Dtype dtype,
                 uint32_t* packed, Team team) {
  const size_t row_bytes = in_features * element_bytes(dtype);
  const size_t panel_words = words_along(in_features, element_bytes(dtype)) * kLanes;
  baseline::for_each_task(team, ceil_div(out_features, kLanes), [&](size_t panel, int) {
    const char* rows[kLanes] = {};
    const size_t first = panel * kLanes;
    for (size_t lane = 0; lane < std::min<size_t>(kLanes, out_features - first); ++lane) {
      rows[lane] = static_cast<const char*>(weight) + (first + lane) * row_bytes;
    }
    pack_panel(rows, row_bytes, packed + panel * panel_words);
  });
}

void pack_rows(const void* const* rows, size_t num_rows, size_t in_features, Dtype dtype,
               uint32_t* packed) {
  const size_t row_bytes = in_features * element_bytes(dtype);
  const size_t panel_words = words_along(in_features, element_bytes(dtype)) * kLanes;
  for (size_t panel = 0; panel * kLanes < num_rows; ++panel) {
    const char* lanes[kLanes] = {};
    for (size_t lane = 0; lane < std::min<size_t>(kLanes, num_rows - panel * kLanes); ++lane) {
      lanes[lane] = static_cast<const char*>(rows[panel * kLanes + lane]);
    }
    pack_panel(lanes, row_bytes, packed + panel * panel_words);
  }
}

}  // namespace lora_serve
