"""What ranks are sent of a step: all that its rows need, and no more for a longer history."""

from __future__ import annotations

from array import array

from msgspec.structs import replace

from lora_serve.identity import BASE_MODEL, AdapterRef
from lora_serve.prompts import PlacedRows
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import (
    AskedOutputs,
    KVLoad,
    PromptScoring,
    SampleInput,
    ScheduledRequest,
    SchedulerOutput,
    SeenTokens,
)
from lora_serve.worker.rank_wire import StepDecoder, StepEncoder

SEEN = SeenTokens(array("i", range(5000)), array("i", [1]) * 5000)


def sample(**more: object) -> SampleInput:
    return SampleInput(SamplingParams(temperature=0.5), seed=1, position=2, **more)  # type: ignore[arg-type]


def decode_step(
    num_tokens: int, tables: list[array[int]], request_id: str = "r"
) -> SchedulerOutput:
    asked = AskedOutputs((sample(seen=SEEN, bitmask=bytes(20_000)),))
    request = ScheduledRequest(request_id, BASE_MODEL, num_tokens - 1, [7], tables, asked)
    return SchedulerOutput(num_tokens, (request,))


def table(*ids: int) -> list[array[int]]:
    return [array("i", ids)]


def test_a_step_arrives_as_it_was_but_for_what_drawing_asks() -> None:
    scoring = PromptScoring([4, 5], 3, first_row=1)
    requests = (
        ScheduledRequest(
            "a",
            AdapterRef("name", b"digest", 3),
            16,
            array("i", [1, 2, 3]),
            [array("i", [9, 8]), array("i", [1, 2])],
            AskedOutputs((sample(), sample()), scoring, num_pooled=2, sums_hidden=True),
            PlacedRows(((1, 2),), b"rows"),
            None,
            5,
        ),
        ScheduledRequest("b", BASE_MODEL, 40, [0], table(3, 4, 5), token_from=1),
    )
    step = SchedulerOutput(4, requests, (b"old",), (b"new", b"new"), (1, 2))
    encoder, decoder = StepEncoder(), StepDecoder()
    got, has_loads = decoder.decode(encoder.encode(step))
    assert not has_loads
    assert (got.step_id, got.drop_adapters, got.add_adapters, got.kv_saves) == (
        *(4, (b"old",)),
        *((b"new", b"new"), (1, 2)),
    )
    for sent, came in zip(requests, got.requests, strict=True):
        digests = [getattr(each.adapter, "digest", b"") for each in (sent, came)]
        assert digests[0] == digests[1]
        assert came.asked.num_rows(came.num_tokens) == sent.asked.num_rows(sent.num_tokens)
        assert len(came.asked.samples) == len(sent.asked.samples)
        same = replace(came, adapter=sent.adapter, asked=sent.asked)
        assert same == replace(sent, token_ids=same.token_ids)
        assert list(same.token_ids) == list(sent.token_ids)
    assert got.requests[0].asked.scoring == PromptScoring([0, 0], 0, 1)


def test_loads_follow_a_step() -> None:
    encoder, decoder = StepEncoder(), StepDecoder()
    loads = (KVLoad(3, b"abc"), KVLoad(4, b"de"))
    _, has_loads = decoder.decode(encoder.encode(SchedulerOutput(1, (), kv_loads=loads)))
    assert has_loads
    assert decoder.decode_loads(encoder.encode_loads(loads)) == loads


def test_what_is_sent_does_not_grow_with_a_request() -> None:
    encoder, decoder = StepEncoder(), StepDecoder()
    sizes, ids = [], list(range(100, 164))
    for num_tokens in range(1024, 4096, 16):
        step = decode_step(num_tokens, table(*ids))
        message = encoder.encode(step)
        sizes.append(len(message))
        assert decoder.decode(message)[0].requests[0].block_tables == table(*ids)
        ids.append(len(ids))
    assert max(sizes[1:]) < 60


def test_tables_that_change_arrive_changed() -> None:
    encoder, decoder = StepEncoder(), StepDecoder()
    lives = [
        decode_step(40, table(1, 2, 3)),
        decode_step(41, table(0, 2, 3)),  # a block that is seen no more
        decode_step(49, table(0, 0, 3, 4)),
        SchedulerOutput(0, ()),
        decode_step(17, table(5, 6)),  # preempted, and admitted again
        decode_step(33, table(5, 6, 7), "other"),
        decode_step(33, table(5, 6, 8)),
    ]
    for step in lives:
        got, _ = decoder.decode(encoder.encode(step))
        assert [r.block_tables for r in got.requests] == [r.block_tables for r in step.requests]
