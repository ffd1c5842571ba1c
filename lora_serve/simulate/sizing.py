"""The smallest number of replicas that keeps a promise, and what no smaller one can do.

Knows nothing of what runs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from lora_serve.bench.goodput import Limits
from lora_serve.bench.workload import TimedRequest
from lora_serve.errors import ConfigError
from lora_serve.simulate.costs import EngineSettings
from lora_serve.simulate.features import StepFeatures

ROUNDING = 1e-9  # 0.07 of 100 requests are 7, not 8


def smallest(is_enough: Callable[[int], bool], most: int, least: int = 1) -> int:
    """The smallest number from `least` to `most` for which is_enough holds, asked O(log n) times.

    More is taken to be never worse than less.

    Raises:
        ConfigError: `most` is not enough.
    """
    low, high = least, least  # all below low are too few
    while not is_enough(high):
        low = high + 1
        if high >= most:
            raise ConfigError(
                f"{most} replicas are not enough; a limit may be below what a lone request takes. "
                "Loosen --goodput or --attainment, or raise --max-replicas"
            )
        high = min(2 * high, most)
    while low < high:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle + 1
    return high


def least_replicas(
    requests: Iterable[TimedRequest],
    seconds_of: StepFeatures,
    engine: EngineSettings,
    limits: Limits,
    attainment: float,
) -> int:
    """So many replicas the workload's pace needs at least; fewer need not be tried.

    requests: each arrives at its time, however many are running. attainment: the share of them
    that is to be within the limits.

    Those that are must have drawn all tokens behind their first when the last of them may end.
    Such a token takes its own time, and at best its share of a step that is full. Prompts, which
    may be cached, and first tokens are not counted.
    """
    of_token = seconds_of.steps / engine.max_num_seqs + seconds_of.decode_tokens
    begin, end, work = math.inf, -math.inf, []
    for request in requests:
        num_tokens = request.max_tokens - 1
        begin = min(begin, request.at_seconds)
        end = max(end, request.at_seconds + _most_seconds(limits, num_tokens))
        context = seconds_of.decode_context * len(request.prompt_token_ids)
        work.append(num_tokens * (of_token + context))
    kept = sorted(work)[: math.ceil(attainment * len(work) - ROUNDING)]
    return max(1, math.ceil(sum(kept) / (end - begin))) if kept and end > begin else 1


def _most_seconds(limits: Limits, num_tokens: int) -> float:
    """What an answer with so many tokens behind its first may take; infinite without limits."""
    of_parts = of_all = math.inf
    if limits.ttft is not None and limits.tpot is not None:
        of_parts = limits.ttft + limits.tpot * num_tokens
    if limits.e2el is not None:
        of_all = limits.e2el
    return min(of_parts, of_all) / 1e3
