"""What is told of machines that are not here rests on what a rank on real kernels receives."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.speed import ranks_on_paper
from benchmarks.speed.ranks_on_paper import CASES, check, on_paper, table
from lora_serve.config.parallel import REDUCES, SEGMENTS
from lora_serve.ops.select import available_ops


@pytest.mark.skipif("cpu" not in available_ops(), reason="no native CPU kernels")
def test_a_rank_receives_what_is_reckoned(monkeypatch: pytest.MonkeyPatch) -> None:
    check(4)
    for num_ranks in (2, 4):
        check(num_ranks, REDUCES[SEGMENTS](num_ranks))
    monkeypatch.setattr(ranks_on_paper, "_layer_width", lambda shape, _: 3 * shape.hidden_size)
    with pytest.raises(AssertionError, match="4 ranks, 40 tokens"):
        check(4)


def test_gathers_are_cheap_between_sockets_and_dear_between_cards() -> None:
    sockets, cards = (on_paper(*case) for case in CASES)
    assert sockets.chunk_gathering < sockets.chunk_computing / 50
    assert sockets.decode_gathering < sockets.decode_reading / 20
    assert cards.chunk_gathering > cards.chunk_computing / 3
    assert cards.decode_gathering > cards.decode_reading / 2


def test_the_document_has_the_table() -> None:
    document = Path("docs/tensor-parallel.md").read_text()
    assert table([on_paper(*case) for case in CASES]) in document
