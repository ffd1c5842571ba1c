// Units of a decode step that read the same blocks: what they share is read once for all of them.
//
// A span is shared among units of one kv head whose requests have one query each, see it whole, and
// find it in the same blocks. Its keys and values are then multiplied with the rows of all of them,
// while they lie in a cache. A row's own sums know nothing of other rows, and each unit merges its
// spans as ever, so no bit depends on what is shared.

#pragma once

#include <algorithm>

#include "attention_unit.h"

namespace lora_serve::LORA_SERVE_PATH {

// Units of kv head 0; those of the other heads follow each of them.
struct SharedSpan {
  size_t first_member, num_members;
  int64_t span;
};

struct SharedSpans {
  SharedSpan* spans;
  uint32_t* members;  // of all spans
  uint32_t* order;    // work memory: units that may share
  size_t num_spans, num_members;
};

template <class T>
static bool may_share(const AttentionSetup<T>& setup, size_t request) {
  const AttentionPlan& plan = *setup.call->plan;
  return setup.call->window == 0 && plan.seq_lens[request] >= kSpan &&
         plan.query_start[request + 1] - plan.query_start[request] == 1;
}

// How much there can be of what SharedSpans holds.
struct SharingBound {
  size_t units, members;

  size_t spans_bytes() const { return members * sizeof(SharedSpan); }
  size_t bytes() const { return spans_bytes() + (members + units) * sizeof(uint32_t); }
  SharedSpans in(char* memory) const {
    uint32_t* const lists = reinterpret_cast<uint32_t*>(memory + spans_bytes());
    return {reinterpret_cast<SharedSpan*>(memory), lists, lists + members, 0, 0};
  }
};

template <class T>
static SharingBound bound_of_sharing(const AttentionSetup<T>& setup) {
  SharingBound bound{};
  for (size_t r = 0; r < setup.call->plan->requests; ++r) {
    if (!may_share(setup, r)) continue;
    bound.units += 1;
    bound.members += static_cast<size_t>(setup.call->plan->seq_lens[r] / kSpan);
  }
  return bound;
}

// The blocks of one span.
template <class T>
static Range blocks_of_span(const AttentionSetup<T>& setup, int64_t span) {
  const size_t block_size = setup.call->shape.block_size;
  return {static_cast<size_t>(span * kSpan) / block_size,
          ceil_div(static_cast<size_t>((span + 1) * kSpan), block_size)};
}

template <class T>
static const int32_t* table_of(const AttentionSetup<T>& setup, const AttentionUnit& unit) {
  const AttentionPlan& plan = *setup.call->plan;
  return plan.block_tables + unit.request * plan.table_stride;
}

// Finds what units share whose tables begin alike, and moves those that share on to the front,
// group by group. Returns how many these are. most: units that one task takes at once, at least 2.
template <class T>
static size_t share_span(const AttentionSetup<T>& setup, AttentionUnit* units, uint32_t* begin,
                         uint32_t* end, int64_t span, size_t most, SharedSpans& shared) {
  const Range blocks = blocks_of_span(setup, span);
  const auto sees_whole = [&](uint32_t u) {
    return setup.call->plan->seq_lens[units[u].request] >= (span + 1) * kSpan;
  };
  uint32_t* kept = begin;
  for (uint32_t* group = begin; group != end;) {
    const uint32_t leader = *group;
    const int32_t* table = table_of(setup, units[leader]);
    uint32_t* const group_end = std::stable_partition(group, end, [&](uint32_t u) {
      return sees_whole(u) && sees_whole(leader) &&
             std::equal(table + blocks.begin, table + blocks.end,
                        table_of(setup, units[u]) + blocks.begin);
    });
    const size_t count = static_cast<size_t>(group_end - group);
    if (count < 2) {
      group = std::max(group_end, group + 1);
      continue;
    }
    const size_t parts = ceil_div(count, most);
    for (size_t i = 0; i < parts; ++i) {
      const Range part = part_of(count, parts, i);
      shared.spans[shared.num_spans++] = {shared.num_members + part.begin, part.end - part.begin,
                                          span};
    }
    std::copy(group, group_end, shared.members + shared.num_members);
    shared.num_members += count;
    kept = std::copy(group, group_end, kept);
    group = group_end;
  }
  return static_cast<size_t>(kept - begin);
}

// Says of each unit how many of its spans are shared.
template <class T>
static void find_shared_spans(const AttentionSetup<T>& setup, AttentionUnit* units,
                              size_t num_units, size_t most, SharedSpans& shared) {
  uint32_t* const order = shared.order;
  size_t count = 0;
  for (uint32_t u = 0; u < num_units; ++u) {
    if (units[u].kv_head == 0 && may_share(setup, units[u].request)) order[count++] = u;
  }
  const auto first_block = [&](uint32_t u) { return table_of(setup, units[u])[0]; };
  std::sort(order, order + count, [&](uint32_t a, uint32_t b) {
    return first_block(a) != first_block(b) ? first_block(a) < first_block(b) : a < b;
  });
  for (size_t begin = 0; begin < count;) {
    size_t end = begin + 1;
    while (end < count && first_block(order[end]) == first_block(order[begin])) ++end;
    size_t left = end - begin;
    for (int64_t span = 0; left >= 2; ++span) {
      left = share_span(setup, units, order + begin, order + begin + left, span, most, shared);
      for (size_t i = begin; i < begin + left; ++i) {
        for (size_t h = 0; h < setup.call->shape.num_kv_heads; ++h) {
          units[order[i] + h].shared_spans = static_cast<size_t>(span) + 1;
        }
      }
    }
    begin = end;
  }
}

}  // namespace lora_serve::LORA_SERVE_PATH
