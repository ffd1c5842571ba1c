// out[t][h] = softmax over seen positions j of (q[t][h] . k[j] scale) times v[j]
//
// With soft-capping, cap tanh(q . k scale / cap) stands in the place of q . k scale. With sinks,
// one more position, whose logit is the head's sink, takes part in the softmax, and has no value.
//
// T tokens of R requests, D head size. Token t of a request with seq_len L and n queries is at
// position p = L - n + t and sees [0, p], or the last `window` of it.
//
// Positions are walked in tiles of 64 (attention_tile.h), tiles in spans of 512, all at absolute
// positions; spans are merged in ascending order (attention_unit.h). This file shares units among
// threads: whole where they are many, span by span where one is too big for its share, or where
// several requests have the span in the same blocks (attention_sharing.h).

#pragma once

#include "attention_sharing.h"
#include "attention_unit.h"

namespace lora_serve::LORA_SERVE_PATH {

// Rows of a unit. 64 rows of q, scores, weights and out are 64 KiB for D = 64: with a tile's keys
// and values they stay in L2.
constexpr size_t kUnitRows = 64;

// Rows times positions times D below which one thread is done first. Zen 4, 2 cores, November
// 2026: 256 K of it take 2 us.
constexpr size_t kParallelAttention = 256 << 10;

// What spans leave is kept until all are walked: where that could be more, none are shared.
constexpr size_t kMostSharedBytes = 64 << 20;

// One of SharedSpans, for kv head `span`, where is_shared.
struct AttentionTask {
  uint32_t unit;
  int32_t span;  // -1: all of them
  bool is_shared;
};

// Units and tasks of one call, and the memory they need.
struct AttentionWork {
  AttentionUnit* units;
  size_t num_units;
  SharedSpans shared;
  AttentionTask* tasks;
  size_t num_tasks;
  size_t partial_floats;
  Team team;
};

template <class T>
static size_t count_units(const AttentionSetup<T>& setup, size_t tokens_per_unit) {
  const AttentionPlan& plan = *setup.call->plan;
  size_t count = 0;
  for (size_t r = 0; r < plan.requests; ++r) {
    const size_t tokens = static_cast<size_t>(plan.query_start[r + 1] - plan.query_start[r]);
    count += ceil_div(tokens, tokens_per_unit) * setup.call->shape.num_kv_heads;
  }
  return count;
}

// The longest units, those of the latest positions, come first.
template <class T>
static size_t list_units(const AttentionSetup<T>& setup, size_t tokens_per_unit,
                         AttentionUnit* units) {
  const AttentionPlan& plan = *setup.call->plan;
  size_t count = 0;
  for (size_t r = 0; r < plan.requests; ++r) {
    const size_t first = static_cast<size_t>(plan.query_start[r]);
    const size_t tokens = static_cast<size_t>(plan.query_start[r + 1]) - first;
    const int64_t start = plan.seq_lens[r] - static_cast<int64_t>(tokens);
    for (size_t block = ceil_div(tokens, tokens_per_unit); block-- > 0;) {
      const size_t from = block * tokens_per_unit;
      const size_t here = tokens - from < tokens_per_unit ? tokens - from : tokens_per_unit;
      for (size_t h = 0; h < setup.call->shape.num_kv_heads; ++h) {
        units[count++] = {r, h, first + from, here, start + static_cast<int64_t>(from),
                          0, 0, false};
      }
    }
  }
  return count;
}

template <class T>
static size_t cost_of(const AttentionSetup<T>& setup, const AttentionUnit& unit) {
  const Visible seen = setup.visible_to(unit);
  return unit.num_tokens * setup.heads * static_cast<size_t>(seen.end - seen.begin);
}

// A unit is split when it alone is more than half of a thread's fair share, or shares spans.
template <class T>
static void mark_split_units(const AttentionSetup<T>& setup, const SharingBound& bound,
                             Workers& workers, AttentionWork& work) {
  size_t total = 0;
  for (size_t u = 0; u < work.num_units; ++u) total += cost_of(setup, work.units[u]);
  work.team = workers.team(total * setup.layout.head_size >= kParallelAttention);
  const size_t share = total / (2 * static_cast<size_t>(work.team.num_threads));
  const size_t fit = setup.max_rows / setup.heads, fair = share / (setup.heads * kSpan);
  const size_t most = fit < fair ? fit : fair;  // a task of them is not too big, either
  const size_t bytes = bound.members * setup.call->num_heads * (setup.layout.head_size + 2) * 4;
  if (most >= 2 && bytes <= kMostSharedBytes) {
    find_shared_spans(setup, work.units, work.num_units, most, work.shared);
  }
  work.num_tasks = work.shared.num_spans * setup.call->shape.num_kv_heads;
  work.partial_floats = 0;
  for (size_t u = 0; u < work.num_units; ++u) {
    AttentionUnit& unit = work.units[u];
    const size_t spans = static_cast<size_t>(setup.num_spans(unit));
    unit.split = unit.shared_spans > 0 ||
                 (work.team.num_threads > 1 && spans > 1 && cost_of(setup, unit) > share);
    unit.first_partial = work.partial_floats;
    const size_t rows = unit.num_tokens * setup.heads;
    work.partial_floats += unit.split ? spans * setup.partial_floats(rows) : 0;
    work.num_tasks += unit.split ? spans - unit.shared_spans : 1;
  }
}

template <class T>
static void list_tasks(const AttentionSetup<T>& setup, AttentionWork& work) {
  AttentionTask* next = work.tasks;
  for (uint32_t s = 0; s < work.shared.num_spans; ++s) {
    for (size_t h = 0; h < setup.call->shape.num_kv_heads; ++h) {
      *next++ = {s, static_cast<int32_t>(h), true};
    }
  }
  for (uint32_t u = 0; u < work.num_units; ++u) {
    const AttentionUnit& unit = work.units[u];
    if (!unit.split) {
      *next++ = {u, -1, false};
      continue;
    }
    const int32_t spans = static_cast<int32_t>(setup.num_spans(unit));
    for (int32_t span = static_cast<int32_t>(unit.shared_spans); span < spans; ++span) {
      *next++ = {u, span, false};
    }
  }
}

template <class T>
static void run_whole_unit(const AttentionSetup<T>& setup, const AttentionUnit& unit,
                           const AttentionMemory<T>& memory) {
  const size_t head_size = setup.layout.head_size;
  load_queries(setup, unit, memory);
  clear_partial(memory.merged, unit.num_tokens * setup.heads, head_size);
  const int64_t first = setup.first_span(unit);
  for (int64_t span = first; span < first + setup.num_spans(unit); ++span) {
    const Range rows = walk_span(setup, unit, span, memory);
    const AttentionPartial partial = span_result(memory, rows);
    for (size_t r = rows.begin; r < rows.end; ++r) fold_row(memory.merged, partial, r, head_size);
  }
  write_out(setup, unit, memory.merged);
}

template <class T>
static void run_one_span(const AttentionSetup<T>& setup, const AttentionUnit& unit, int64_t span,
                         const AttentionMemory<T>& memory, const AttentionPartial& to) {
  const size_t head_size = setup.layout.head_size;
  load_queries(setup, unit, memory);
  const Range rows = walk_span(setup, unit, span, memory);
  const AttentionPartial partial = span_result(memory, rows);
  for (size_t r = rows.begin; r < rows.end; ++r) {
    to.max[r] = partial.max[r];
    to.sum[r] = partial.sum[r];
    std::memcpy(to.out + r * head_size, partial.out + r * head_size, head_size * sizeof(float));
  }
}

// Rows of `from` from `first` on become all rows of `to`.
static inline void copy_partial(const AttentionPartial& from, size_t first, size_t num_rows,
                                size_t head_size, const AttentionPartial& to) {
  std::memcpy(to.max, from.max + first, num_rows * sizeof(float));
  std::memcpy(to.sum, from.sum + first, num_rows * sizeof(float));
  std::memcpy(to.out, from.out + first * head_size, num_rows * head_size * sizeof(float));
}

template <class T>
static void run_shared_span(const AttentionSetup<T>& setup, const AttentionWork& work,
                            const SharedSpan& shared, size_t kv_head, float* partials,
                            const AttentionMemory<T>& memory) {
  const auto unit_of = [&](size_t i) -> const AttentionUnit& {
    return work.units[work.shared.members[shared.first_member + i] + kv_head];
  };
  for (size_t i = 0; i < shared.num_members; ++i) {
    load_queries(setup, unit_of(i), memory, i * setup.heads);
  }
  const size_t rows = shared.num_members * setup.heads;
  walk_shared_span(setup, unit_of(0), shared.span, rows, memory);
  const AttentionPartial found = span_result(memory, {0, rows});
  for (size_t i = 0; i < shared.num_members; ++i) {
    copy_partial(found, i * setup.heads, setup.heads, setup.layout.head_size,
                 setup.partial_of(unit_of(i), static_cast<size_t>(shared.span), partials));
  }
}

template <class T>
static void merge_split_unit(const AttentionSetup<T>& setup, const AttentionUnit& unit,
                             float* partials, const AttentionMemory<T>& memory) {
  clear_partial(memory.merged, unit.num_tokens * setup.heads, setup.layout.head_size);
  const int64_t first = setup.first_span(unit);
  for (int64_t i = 0; i < setup.num_spans(unit); ++i) {
    const Range rows = rows_that_see(setup, unit, (first + i) * kSpan, (first + i + 1) * kSpan);
    const AttentionPartial partial = setup.partial_of(unit, static_cast<size_t>(i), partials);
    for (size_t r = rows.begin; r < rows.end; ++r) {
      fold_row(memory.merged, partial, r, setup.layout.head_size);
    }
  }
  write_out(setup, unit, memory.merged);
}

template <class T>
static void run_tasks(const AttentionSetup<T>& setup, const AttentionWork& work, char* memories,
                      float* partials) {
  const auto memory_of = [&](int thread) {
    const size_t at = static_cast<size_t>(thread) * AttentionMemory<T>::bytes(setup);
    return AttentionMemory<T>(setup, memories + at);
  };
  for_each_task(work.team, work.num_tasks, [&](size_t task, int thread) {
    const int32_t span = work.tasks[task].span;
    if (work.tasks[task].is_shared) {
      return run_shared_span(setup, work, work.shared.spans[work.tasks[task].unit],
                             static_cast<size_t>(span), partials, memory_of(thread));
    }
    const AttentionUnit& unit = work.units[work.tasks[task].unit];
    if (span < 0) return run_whole_unit(setup, unit, memory_of(thread));
    run_one_span(setup, unit, setup.first_span(unit) + span, memory_of(thread),
                 setup.partial_of(unit, static_cast<size_t>(span), partials));
  });
  if (work.partial_floats == 0) return;
  for_each_task(work.team, work.num_units, [&](size_t u, int thread) {
    if (work.units[u].split) {
      merge_split_unit(setup, work.units[u], partials, memory_of(thread));
    }
  });
}

static inline LogitScale logit_scale(const AttentionCall& call) {
  if (call.softcap == 0) return {0, call.scale * kLog2E};
  return {call.scale / call.softcap, call.softcap * kLog2E};
}

template <class T>
static void attention_of(const AttentionCall& call, Workers& workers) {
  const size_t heads = call.num_heads / call.shape.num_kv_heads;
  const size_t tokens_per_unit = heads < kUnitRows ? kUnitRows / heads : 1;
  const AttentionSetup<T> setup{&call, KvLayout(call.shape), heads, tokens_per_unit * heads,
                                logit_scale(call)};
  AttentionWork work{};
  const size_t num_units = count_units(setup, tokens_per_unit);
  const size_t units_bytes = round_up(num_units * sizeof(AttentionUnit), 64);
  const SharingBound bound = bound_of_sharing(setup);
  char* plan_memory = static_cast<char*>(workers.plan.take(units_bytes + bound.bytes()));
  work.units = reinterpret_cast<AttentionUnit*>(plan_memory);
  work.num_units = list_units(setup, tokens_per_unit, work.units);
  work.shared = bound.in(plan_memory + units_bytes);
  mark_split_units(setup, bound, workers, work);

  const size_t tasks_bytes = round_up(work.num_tasks * sizeof(AttentionTask), 64);
  const size_t memories_bytes =
      static_cast<size_t>(work.team.num_threads) * AttentionMemory<T>::bytes(setup);
  const size_t partials_bytes = work.partial_floats * sizeof(float);
  char* memory =
      static_cast<char*>(workers.scratch.take(tasks_bytes + memories_bytes + partials_bytes));
  work.tasks = reinterpret_cast<AttentionTask*>(memory);
  list_tasks(setup, work);
  run_tasks(setup, work, memory + tasks_bytes,
            reinterpret_cast<float*>(memory + tasks_bytes + memories_bytes));
}

}  // namespace lora_serve::LORA_SERVE_PATH
