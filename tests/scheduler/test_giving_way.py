"""How soon a share that comes gets a place, and what that costs those that have them all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from lora_serve.fuzz.oracle.engine import OracleEngine
from lora_serve.sampling_params import SamplingParams
from lora_serve.scheduler.request import Request
from lora_serve.scheduler.shares import FairShares

PROMPT, BLOCK_SIZE = 400, 16


def answer_of(num_tokens: int, seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, min_tokens=num_tokens, seed=seed)


def wait_of_a_newcomer(
    tenants: Sequence[str],
    num_before: int,
    *,
    num_places: int = 4,
    num_requests: int = 4,
    shares: FairShares | None = None,
    async_scheduling: bool = False,
) -> int:
    """How many steps a share waits that comes when these ran for so many, by turns of tenants."""
    engine = OracleEngine(
        num_blocks=2000,
        max_num_seqs=num_places,
        max_num_batched_tokens=256,
        fair_share="key",
        async_scheduling=async_scheduling,
    )
    if shares is not None:
        engine.core.scheduler._queue._shares = shares
    for number in range(num_requests):
        prompt = [(40 * number + i) % 480 + 8 for i in range(20)]
        tenant = tenants[number % len(tenants)]
        engine.add(f"crowd{number}", prompt, tenant=tenant, params=answer_of(1500, number))
    for _ in range(num_before):
        engine.step()
    engine.add("new", list(range(300, 330)), tenant="newcomer", max_tokens=2)
    num_steps = 0
    while "new" not in engine.outputs:
        engine.step()
        num_steps += 1
    return num_steps


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["one by one", "overlapped"])
@pytest.mark.parametrize(
    ("tenants", "num_places"),
    [("x", 4), ("xy", 4), ("wxyz", 8), ("xxxy", 4)],
    ids=["one share", "two", "four", "a large and a small one"],
)
def test_a_newcomer_does_not_wait_as_long_as_others_have_run(
    tenants: str, num_places: int, async_scheduling: bool
) -> None:
    for num_before in (50, 200):
        num_steps = wait_of_a_newcomer(
            tenants,
            num_before,
            num_places=num_places,
            num_requests=num_places,
            async_scheduling=async_scheduling,
        )
        assert num_steps == (3 if async_scheduling else 1)


@pytest.mark.parametrize("tenants", ["x", "xy", "xxxy"])
def test_a_newcomer_waits_for_one_block_where_older_requests_wait_at_an_equal_count(
    tenants: str,
) -> None:
    for num_before in (50, 200):
        assert wait_of_a_newcomer(tenants, num_before, num_requests=12) <= BLOCK_SIZE + 2


class RunsAheadOfShares(FairShares):
    """The common time moves by all tokens that are computed, for however many shares."""

    def served(self, share: str) -> float:
        return self._served.get(share, self._time)

    def wait(self, share: str) -> None:
        if share not in self._num_waiting:
            self._served[share] = max(self.served(share), self._time)
        super().wait(share)

    def take_turn(self, share: str) -> None:
        pass

    def charge(self, share: str, num_tokens: int) -> None:
        self._served[share] = self.served(share) + num_tokens
        self._time += num_tokens / max(1, len(self._num_waiting))


def test_a_common_time_that_runs_ahead_is_found_out() -> None:
    for num_before in (50, 200):
        assert wait_of_a_newcomer("xy", num_before, shares=RunsAheadOfShares()) > num_before


def short_requests_beside_a_crowd(num_tenants: int) -> tuple[Counter[str], Counter[str]]:
    """Send one short request after another while a share has all places, and nothing is cached.

    Returns the tokens that were computed for each of the crowd, and those that it has.
    """
    engine = OracleEngine(
        num_blocks=800,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        fair_share="key",
        enable_prefix_caching=False,
    )
    for number in range(4):
        prompt = [(7 * number + i * (number + 1)) % 480 + 8 for i in range(PROMPT)]
        engine.add(f"crowd{number}", prompt, tenant="x", params=answer_of(2000, number))
    crowd = list(engine.core.scheduler._requests.values())
    num_short = 0
    for _ in range(700):
        if len(engine.core.scheduler._requests) == len(crowd) and crowd[-1].num_output_tokens:
            num_short += 1
            tenant = f"y{num_short % num_tenants}"
            engine.add(f"short{num_short}", [9 + num_short % 400], tenant=tenant, max_tokens=1)
        engine.step()
    assert num_short > 20
    computed = Counter[str]()
    for step in engine.executor.steps:
        for chunk in step.requests:
            computed[chunk.request_id] += chunk.num_tokens
    assert all(computed[r.request_id] == r.num_computed_in_all for r in crowd)
    return computed, Counter({r.request_id: r.num_tokens for r in crowd})


@pytest.mark.parametrize("num_tenants", [1, 10**6], ids=["of one share", "each of a new share"])
def test_no_request_costs_more_than_three_times_its_tokens_however_often_others_come(
    num_tenants: int,
) -> None:
    computed, num_tokens = short_requests_beside_a_crowd(num_tenants)
    assert computed["crowd0"] < num_tokens["crowd0"], "the oldest never gave way"
    assert any(computed[name] > num_tokens[name] for name in num_tokens), "none gave way"
    for name, count in num_tokens.items():
        assert computed[name] <= 3 * count, name


def test_requests_that_begin_again_and_again_are_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Request, "may_give_way", True)
    with pytest.raises(AssertionError, match="gave way again, and has got no further"):
        short_requests_beside_a_crowd(1)
