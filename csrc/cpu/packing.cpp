#include "packing.h"

#include <algorithm>
#include <cstring>
#include <vector>

#define LORA_SERVE_PATH baseline
#include "parallel.h"

namespace lora_serve {
namespace {

struct Panels {
  uint32_t* packed;
  size_t num_rows, row_bytes;
};

// Words [k, k + kLanes) of 16 rows, turned: a cache line of each row is read at once.
void pack_tile(const char* const* rows, size_t k, uint32_t* to, size_t step) {
  alignas(64) uint32_t tile[kLanes][kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    if (rows[lane] != nullptr) {
      std::memcpy(tile[lane], rows[lane] + 4 * k, sizeof tile[lane]);
    } else {
      std::memset(tile[lane], 0, sizeof tile[lane]);
    }
  }
  for (int word = 0; word < kLanes; ++word, to += step) {
    for (int lane = 0; lane < kLanes; ++lane) to[lane] = tile[lane][word];
  }
}

// The panel of up to 16 rows; a null row is all zeros.
void pack_panel(const Panels& panels, size_t panel, const char* const* rows) {
  const size_t num_words = ceil_div(panels.row_bytes, 4);
  const PanelWords words =
      panel_words(panels.packed, panel, ceil_div(panels.num_rows, kLanes), num_words);
  uint32_t* to = const_cast<uint32_t*>(words.first);
  size_t k = 0;
  for (; 4 * (k + kLanes) <= panels.row_bytes; k += kLanes, to += kLanes * words.step) {
    pack_tile(rows, k, to, words.step);
  }
  for (; k < num_words; ++k, to += words.step) {
    const size_t left = panels.row_bytes - 4 * k;
    for (int lane = 0; lane < kLanes; ++lane) {
      uint32_t word = 0;
      if (rows[lane] != nullptr) std::memcpy(&word, rows[lane] + 4 * k, left < 4 ? left : 4);
      to[lane] = word;
    }
  }
}

}  // namespace

void pack_weight(const void* weight, size_t out_features, size_t in_features, Dtype dtype,
                 uint32_t* packed, Team team) {
  const size_t row_bytes = in_features * element_bytes(dtype);
  const Panels panels{packed, out_features, row_bytes};
  baseline::for_each_task(team, ceil_div(out_features, kLanes), [&](size_t panel, int) {
    const char* rows[kLanes] = {};
    const size_t first = panel * kLanes;
    for (size_t lane = 0; lane < std::min<size_t>(kLanes, out_features - first); ++lane) {
      rows[lane] = static_cast<const char*>(weight) + (first + lane) * row_bytes;
    }
    pack_panel(panels, panel, rows);
  });
}

void pack_rows(const void* const* rows, size_t num_rows, size_t in_features, Dtype dtype,
               uint32_t* packed) {
  const size_t row_bytes = in_features * element_bytes(dtype);
  const Panels panels{packed, num_rows, row_bytes};
  for (size_t panel = 0; panel * kLanes < num_rows; ++panel) {
    const char* lanes[kLanes] = {};
    for (size_t lane = 0; lane < std::min<size_t>(kLanes, num_rows - panel * kLanes); ++lane) {
      lanes[lane] = static_cast<const char*>(rows[panel * kLanes + lane]);
    }
    pack_panel(panels, panel, lanes);
  }
}

}  // namespace lora_serve
