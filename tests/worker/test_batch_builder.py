from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from lora_serve.identity import BASE_MODEL, AdapterRef, NoAdapter
from lora_serve.layers.batch import ForwardBatch
from lora_serve.ops.contract import PackedAdapter
from lora_serve.ops.reference import REFERENCE
from lora_serve.prompts import PlacedRows
from lora_serve.step import NOTHING_ASKED, AskedOutputs, ScheduledRequest
from lora_serve.worker.batch_builder import BatchBuilder
from lora_serve.worker.batch_rows import BatchRows
from lora_serve.worker.device import CpuDevice
from tests.fakes.asked import sampling, scoring
from tests.fakes.bare_model import SAMPLE

A, B = AdapterRef("a", b"A" * 32), AdapterRef("b", b"B" * 32)


FIRST_ROW = PlacedRows(((0, 1),), bytes(4))


def request(
    start: int, num_tokens: int, first_block: int, adapter: AdapterRef | NoAdapter = BASE_MODEL
) -> ScheduledRequest:
    num_blocks = -(-(start + num_tokens) // 16)
    return ScheduledRequest(
        request_id=f"r{first_block}",
        adapter=adapter,
        start=start,
        token_ids=range(100 * first_block, 100 * first_block + num_tokens),
        block_tables=[range(first_block, first_block + num_blocks)],
    )


BUILDER = BatchBuilder(
    REFERENCE, CpuDevice(), block_size=16, hidden_size=2, dtype=torch.bfloat16, group_of=(0,)
)


def lay_out(*requests: ScheduledRequest) -> BatchRows:
    return BUILDER.lay_out(requests, adapter_of=_packed)


def build(*requests: ScheduledRequest) -> ForwardBatch:
    return BUILDER.to_device(lay_out(*requests))


def _packed(digest: bytes) -> PackedAdapter:
    return digest.decode()[0]


def test_each_row_knows_its_token_position_and_slot() -> None:
    batch = build(request(14, 4, first_block=3), request(0, 2, first_block=7))
    assert batch.input_ids.tolist() == [300, 301, 302, 303, 700, 701]
    assert batch.positions.tolist() == [14, 15, 16, 17, 0, 1]
    (slot_mapping,) = batch.slot_mapping
    assert slot_mapping.tolist() == [62, 63, 64, 65, 112, 113]
    assert batch.lora is None
    assert batch.inputs_embeds is None


def test_rows_of_one_adapter_stand_together() -> None:
    rows = lay_out(request(0, 2, 1, B), request(0, 1, 2), request(0, 3, 3, A), request(5, 1, 4, B))
    assert rows.order == (1, 2, 0, 3)
    assert rows.query_start_loc == (0, 1, 4, 6, 7)
    assert rows.segments == ((1, 4, "A"), (4, 7, "B"))
    lora = BUILDER.to_device(rows).lora
    assert lora is not None
    assert lora.segments == rows.segments


def test_versions_with_equal_bytes_are_one_segment() -> None:
    again = AdapterRef("other name", A.digest, generation=3)
    assert lay_out(request(0, 1, 1, A), request(0, 1, 2, again)).segments == ((0, 2, "A"),)


def test_rows_before_an_adapters_start_are_in_no_segment() -> None:
    within = replace(request(4, 6, 1, A), adapter_start=7)
    before = replace(request(9, 3, 2, A), adapter_start=9)
    behind = replace(request(0, 5, 3, A), adapter_start=5)
    rows = lay_out(within, before, behind, request(0, 2, 4, A), request(0, 1, 5, B))
    assert rows.query_start_loc == (0, 6, 9, 14, 16, 17)
    assert rows.segments == ((3, 6, "A"), (6, 9, "A"), (14, 16, "A"), (16, 17, "B"))


def test_an_adapter_that_starts_behind_all_rows_is_in_no_plan() -> None:
    batch = build(replace(request(0, 5, 1, A), adapter_start=5))
    assert batch.lora is None


def test_only_output_rows_behind_an_adapters_start_are_in_a_segment() -> None:
    drafted = replace(request(4, 6, 1, A), adapter_start=8, asked=sampling(*[SAMPLE] * 4))
    rows = lay_out(drafted, replace(request(0, 3, 2, A), asked=sampling(SAMPLE), adapter_start=3))
    assert rows.outputs is not None
    assert rows.outputs.rows.tolist() == [2, 3, 4, 5, 8]
    assert rows.outputs.segments == ((2, 4, "A"),)


def test_a_row_of_each_draft_is_sampled_from() -> None:
    drafted = replace(request(4, 6, 1), asked=sampling(SAMPLE, SAMPLE, SAMPLE))
    rows = lay_out(drafted, replace(request(7, 1, 2), asked=sampling(SAMPLE)))
    assert rows.outputs is not None
    assert rows.outputs.rows[list(rows.logits_indices)].tolist() == [3, 4, 5, 6]


def test_samplers_are_found_by_their_last_row() -> None:
    first = replace(request(0, 2, 1, B), asked=sampling(SAMPLE))
    rows = lay_out(first, request(0, 3, 2), replace(request(4, 1, 3), asked=sampling(SAMPLE)))
    assert rows.order == (1, 2, 0)
    assert rows.samplers == (2, 0)
    batch = BUILDER.to_device(rows)
    assert batch.outputs is not None
    assert batch.outputs.rows[list(rows.logits_indices)].tolist() == [3, 5]


def test_hidden_states_come_out_only_of_rows_that_are_asked_for() -> None:
    drawing = replace(request(0, 4, 1, B), asked=sampling(SAMPLE))
    scored = replace(request(6, 3, 2, A), asked=scoring((1, 2, 3)))
    rows = lay_out(request(2, 5, 3, A), drawing, scored, request(0, 2, 4))
    assert rows.order == (3, 0, 2, 1)
    assert rows.outputs is not None
    assert rows.outputs.rows.tolist() == [7, 8, 9, 13]
    assert rows.outputs.query_start_loc == (0, 3, 4)
    assert rows.outputs.seq_lens.tolist() == [9, 4]
    assert rows.outputs.segments == ((0, 3, "A"), (3, 4, "B"))
    assert rows.output_start_loc == (0, 0, 0, 3, 4)
    assert rows.logits_indices == (3,)


def test_a_step_that_asks_for_nothing_has_one_row_come_out() -> None:
    rows = lay_out(request(0, 4, 1), request(0, 3, 2))
    assert rows.outputs is not None
    assert rows.outputs.rows.tolist() == [3]
    assert not rows.samplers


@pytest.mark.parametrize("asked", [NOTHING_ASKED, sampling(SAMPLE)])
def test_all_rows_come_out_of_a_decode_step(asked: AskedOutputs) -> None:
    """Also where a prompt's chunk happens to be a token: recorded steps compute all rows."""
    rows = lay_out(request(5, 1, 1), replace(request(7, 1, 2), asked=asked))
    assert rows.outputs is None
    assert rows.logits_indices == ((1,) if asked.samples else ())


def test_a_decode_step_has_one_token_of_each_request() -> None:
    assert lay_out(request(5, 1, 1), request(0, 1, 2, A)).is_decode
    assert not lay_out(request(5, 1, 1), request(0, 2, 2)).is_decode
    assert not lay_out(replace(request(5, 1, 1), embeds=FIRST_ROW)).is_decode


def test_embeds_supply_their_rows_of_their_chunk() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=torch.bfloat16)
    data = bytes(rows.view(torch.uint8).flatten().tolist())
    embeds = PlacedRows(((0, 2), (3, 1)), data)
    batch = build(request(0, 1, 1), replace(request(8, 5, 2), embeds=embeds))
    assert batch.is_embeds is not None
    assert batch.inputs_embeds is not None
    assert batch.is_embeds.tolist() == [False, True, True, False, True, False]
    assert torch.equal(batch.inputs_embeds[batch.is_embeds], rows)


@pytest.mark.parametrize("num_requests", [1, 5])
def test_attention_is_planned_over_each_requests_own_blocks(num_requests: int) -> None:
    requests = [request(10 * i, 3, first_block=10 * i) for i in range(num_requests)]
    (plan,) = build(*requests).attention
    assert [(p.start, p.end, p.seq_len) for p in plan] == [
        (3 * i, 3 * i + 3, 10 * i + 3) for i in range(num_requests)
    ]
    assert [p.blocks.tolist() for p in plan] == [list(r.block_tables[0]) for r in requests]


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_layers_get_the_slots_and_the_plan_of_their_group(num_tokens: int) -> None:
    builder = BatchBuilder(REFERENCE, CpuDevice(), 16, 2, torch.bfloat16, group_of=(1, 0, 1))
    chunk = replace(
        request(17, num_tokens, 0), block_tables=[(5, 6), (0, 9)], asked=sampling(SAMPLE)
    )
    rows = builder.lay_out([chunk], adapter_of=_packed)
    batch = builder.to_device(rows)
    assert [slots.tolist()[0] for slots in batch.slot_mapping] == [145, 97, 145]
    assert [len(slots) for slots in batch.slot_mapping] == [num_tokens] * 3
    assert [plan[0].blocks.tolist() for plan in batch.attention] == [[0, 9], [5, 6], [0, 9]]
    if batch.outputs is not None:
        assert list(batch.outputs.attention) == [2]
        assert batch.outputs.attention[2][0].blocks.tolist() == [0, 9]
    assert (batch.outputs is None) == (num_tokens == 1)
