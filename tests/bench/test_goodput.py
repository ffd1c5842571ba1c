from __future__ import annotations

import pytest

from lora_serve.bench.client import RequestRecord
from lora_serve.bench.goodput import Goodput, Limits
from lora_serve.errors import ConfigError


def record(ttft: float, gaps: tuple[float, ...] = (), error: str | None = None) -> RequestRecord:
    return RequestRecord(
        adapter=None,
        prompt_tokens=3,
        late_seconds=0.0,
        e2e_seconds=ttft + sum(gaps),
        ttft_seconds=ttft,
        gaps_seconds=gaps,
        output_tokens=1 + len(gaps),
        error=error,
    )


def test_a_request_counts_when_it_keeps_every_limit() -> None:
    limits = Limits.parse(["ttft:500", "tpot:50", "e2el:600"])
    assert limits == Limits(ttft=500, tpot=50, e2el=600)
    assert limits.kept_by(record(0.5, (0.05, 0.05)))
    assert limits.kept_by(record(0.5))  # one token has no time of later ones
    assert not limits.kept_by(record(0.51))
    assert not limits.kept_by(record(0.1, (0.04, 0.08)))
    assert not limits.kept_by(record(0.5, (0.04, 0.04, 0.04)))
    assert not limits.kept_by(record(0.1, error="HTTP 500"))
    assert Limits().kept_by(record(9e9))


def test_goodput_is_over_the_whole_run_and_all_of_its_requests() -> None:
    records = [record(0.1, (0.01,)), record(0.2), record(0.9), record(0.1, error="gone")]
    goodput = Goodput.of(records, Limits(ttft=500), wall_seconds=4.0)
    assert goodput == Goodput(requests_per_second=0.5, tokens_per_second=0.75, share=0.5)


@pytest.mark.parametrize(
    "pair", ["ttft", "ttft:", "ttft:-1", "ttft:nan", "ttft:inf", "itl:5", ":5"]
)
def test_what_is_no_limit_is_refused_with_an_example(pair: str) -> None:
    with pytest.raises(ConfigError, match="such as ttft:500"):
        Limits.parse([pair])
