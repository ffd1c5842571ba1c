"""A workload: a frozen list of timed requests, the same from the same seed on every machine.

Prompts are token ids, so that every server sees the same tokens. Each property draws from its own
stream of the seed: asking for more adapters leaves the prompts as they were. Knows no server.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Literal, get_args

from lora_serve.errors import ConfigError

Popularity = Literal["uniform", "zipf", "round-robin"]
POPULARITIES: tuple[str, ...] = get_args(Popularity)
CLOSED_LOOP_CONCURRENCY = 8  # requests at once, where nothing says when they come
MOST_REQUESTS = 100_000_000  # lists of them must fit into memory
FEWEST_TOKENS = 256  # a vocabulary that can spell any bytes has as many
FIRST_TOKEN_ID = 10  # the first few ids are special tokens in many vocabularies


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """at_seconds: not to be sent earlier, counted from the start; adapter None is the base."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    adapter: str | None = None
    at_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """What a workload is made from. Lengths are in tokens.

    input_tokens: each prompt's own tokens, after the prefix it shares with others.
    shared_prefix_tokens, num_prefixes: length of a shared prefix, and how many different ones.
    prefix_seed: another seed for the shared prefixes; workloads of one prefix_seed share them.
    length_spread: 0.5 draws own and output lengths from 50 to 150 % of what was asked, uniformly.
    adapters: names to draw from, most popular first under zipf; none asks the base model only.
    zipf_exponent: s in P(k-th adapter) ∝ k^-s.
    request_rate: requests a second of a Poisson process; None lets the driver pace them.
    vocab_size: prompt tokens are drawn from FIRST_TOKEN_ID to below it.
    """

    seed: int = 0
    num_requests: int = 16
    input_tokens: int = 128
    output_tokens: int = 64
    shared_prefix_tokens: int = 0
    num_prefixes: int = 1
    prefix_seed: int | None = None
    length_spread: float = 0.0
    adapters: tuple[str, ...] = ()
    popularity: Popularity = "uniform"
    zipf_exponent: float = 1.0
    request_rate: float | None = None
    vocab_size: int = FEWEST_TOKENS

    def __post_init__(self) -> None:
        _require_at_least("num_requests", self.num_requests, 1)
        if self.num_requests > MOST_REQUESTS:
            raise ConfigError(f"num_requests {self.num_requests} must be at most {MOST_REQUESTS}")
        _require_at_least("input_tokens", self.input_tokens, 1)
        _require_at_least("output_tokens", self.output_tokens, 1)
        _require_at_least("shared_prefix_tokens", self.shared_prefix_tokens, 0)
        _require_at_least("num_prefixes", self.num_prefixes, 1)
        _require_at_least("vocab_size", self.vocab_size, FIRST_TOKEN_ID + 1)
        if not 0 <= self.length_spread < 1:
            raise ConfigError(f"length_spread {self.length_spread} must be in [0, 1)")
        if not self.zipf_exponent > 0:  # as NaN is not
            raise ConfigError(f"zipf_exponent {self.zipf_exponent} must be above 0")
        if self.request_rate is not None and not self.request_rate > 0:
            raise ConfigError(f"request_rate {self.request_rate} must be above 0")


def make_workload(spec: WorkloadSpec) -> tuple[TimedRequest, ...]:
    """Draw the requests, in the order of their times."""
    return tuple(draw_requests(spec))


def draw_requests(spec: WorkloadSpec) -> Iterator[TimedRequest]:
    """Draw the requests one after another, for workloads with too many prompts to keep."""
    arrivals = _arrivals(spec)
    adapters = draw_adapters(spec, _stream(spec, "adapters"))
    prompts = _prompts(spec)
    lengths = _lengths(spec.output_tokens, spec, _stream(spec, "output lengths"))
    for at, adapter, prompt, length in zip(arrivals, adapters, prompts, lengths, strict=True):
        yield TimedRequest(prompt, length, adapter, at)


def draw_adapters(spec: WorkloadSpec, random: Random) -> list[str | None]:
    """One name a request: in turn, uniformly, or by Zipf's law over the order of the names."""
    names, count = spec.adapters, spec.num_requests
    if not names:
        return [None] * count
    if spec.popularity == "round-robin":
        return [names[i % len(names)] for i in range(count)]
    exponent = spec.zipf_exponent if spec.popularity == "zipf" else 0.0
    cumulative = list(accumulate(k**-exponent for k in range(1, len(names) + 1)))
    draws = (random.random() * cumulative[-1] for _ in range(count))
    return [names[bisect_left(cumulative, draw)] for draw in draws]


def _arrivals(spec: WorkloadSpec) -> list[float]:
    if spec.request_rate is None:
        return [0.0] * spec.num_requests
    random = _stream(spec, "arrivals")
    gaps = (random.expovariate(spec.request_rate) for _ in range(spec.num_requests - 1))
    return list(accumulate(gaps, initial=0.0))


def _prompts(spec: WorkloadSpec) -> Iterator[tuple[int, ...]]:
    own = _stream(spec, "prompts")
    shared = Random(f"{spec.seed if spec.prefix_seed is None else spec.prefix_seed}/prefixes")
    prefixes = [_tokens(spec, spec.shared_prefix_tokens, shared) for _ in range(spec.num_prefixes)]
    choice = _stream(spec, "prefix choice")
    lengths = _lengths(spec.input_tokens, spec, _stream(spec, "input lengths"))
    return (choice.choice(prefixes) + _tokens(spec, length, own) for length in lengths)


def _lengths(mean: int, spec: WorkloadSpec, random: Random) -> list[int]:
    spread = int(mean * spec.length_spread)
    return [random.randint(max(1, mean - spread), mean + spread) for _ in range(spec.num_requests)]


def _tokens(spec: WorkloadSpec, count: int, random: Random) -> tuple[int, ...]:
    return tuple(random.randrange(FIRST_TOKEN_ID, spec.vocab_size) for _ in range(count))


def _stream(spec: WorkloadSpec, purpose: str) -> Random:
    return Random(f"{spec.seed}/{purpose}")


def _require_at_least(name: str, value: int, limit: int) -> None:
    if value < limit:
        raise ConfigError(f"{name} {value} must be at least {limit}")
