"""What ranks are told of adapters: all that there is of them, or nothing."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest

from lora_serve.adapter_checkpoint import (
    AdapterCheckpoint,
    LoRAModule,
    ModuleBias,
    TokenRows,
    tensors_of,
)
from lora_serve.distributed.link import Link, new_link
from lora_serve.distributed.shares import RankPlace
from lora_serve.worker.rank_server import receive_call, send_call
from lora_serve.worker.rank_shares import adapter_share
from tests.fakes.checkpoints import whole_checkpoint
from tests.fakes.ranks import LIMIT


@dataclass(frozen=True, slots=True)
class NewKind(AdapterCheckpoint):
    scalings: tuple[ModuleBias, ...] = ()


@pytest.mark.parametrize("call", [b"a digest", whole_checkpoint()], ids=["discard", "prepare"])
def test_a_rank_gets_all_that_an_adapter_has(call: AdapterCheckpoint | bytes) -> None:
    ours, end = new_link("the other")
    theirs = Link(end, "the first")
    send_call(ours, call, LIMIT)
    assert receive_call(theirs.receive(LIMIT), theirs, LIMIT) == call
    assert not theirs.has_message(0.0)
    for link in (ours, theirs):
        link.close()


# What `adapter_share` divides of each part, and what each rank has whole.
KNOWN_TENSORS = {LoRAModule: {"b", "a"}, TokenRows: {"rows"}, ModuleBias: {"values"}}


def test_each_tensor_of_a_part_is_one_that_ranks_know_to_divide() -> None:
    whole = whole_checkpoint()
    for part in (*whole.modules, *whole.token_rows, *whole.biases):
        held = {field.name for field in fields(part) if any(tensors_of(getattr(part, field.name)))}
        assert held == KNOWN_TENSORS[type(part)], "divide it in lora_serve/worker/rank_shares.py"


def test_tensors_that_ranks_cannot_divide_are_refused_by_name() -> None:
    alone, whole = RankPlace(0, 1), whole_checkpoint()
    assert adapter_share(whole, (), None, alone) is whole
    new = NewKind("/p", b"digest", 4, 100, "", scalings=whole.biases)
    with pytest.raises(AssertionError, match=r"ranks do not divide {'scalings'} of"):
        adapter_share(new, (), None, alone)
