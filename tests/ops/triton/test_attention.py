from __future__ import annotations

import random
from itertools import accumulate

import numpy as np
import pytest
import torch

from lora_serve.ops.contract import Ops
from lora_serve.ops.triton import attention_launch, attention_plan
from lora_serve.ops.triton.attention_plan import fill_attention_plan, new_attention_plan
from tests.ops.cases import PagedCase, assert_close, exact_rotation, normal

BF16 = torch.bfloat16
WINDOWS = pytest.mark.parametrize("window", [None, 20])
# Of tests that take seconds where kernels are interpreted.
FEW_WINDOWS = pytest.mark.parametrize("window", [20, pytest.param(None, marks=pytest.mark.slow)])


def make(
    ops: Ops,
    *seq_lens: int,
    dtype: torch.dtype = BF16,
    heads: tuple[int, int] = (2, 1),
    head_size: int = 16,
    block_size: int = 16,
    window: int | None = None,
    softcap: float | None = None,
    has_sinks: bool = False,
) -> PagedCase:
    return PagedCase(
        ops,
        seq_lens,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_size=head_size,
        dtype=dtype,
        block_size=block_size,
        window=window,
        softcap=softcap,
        has_sinks=has_sinks,
    )


def test_attention_is_the_softmax_over_what_is_visible(ops: Ops, dtype: torch.dtype) -> None:
    case = make(ops, 270, dtype=dtype)
    assert_close(case.step([(0, 0, 270)])[0], case.exact(0), dtype)


@pytest.mark.parametrize("window", [1, 20, 260])
def test_a_window_hides_what_lies_before_it(ops: Ops, window: int) -> None:
    case = make(ops, 270, window=window)
    assert_close(case.step([(0, 0, 270)])[0], case.exact(0), BF16)


@pytest.mark.parametrize(
    ("heads", "head_size"),
    [((1, 1), 64), ((6, 6), 80), ((14, 2), 96), ((80, 1), 128), ((4, 2), 256)],
)
def test_query_heads_share_key_heads_in_groups(
    ops: Ops, heads: tuple[int, int], head_size: int
) -> None:
    case = make(ops, 9, heads=heads, head_size=head_size)
    assert_close(case.step([(0, 0, 9)])[0], case.exact(0), BF16)


def test_rotation_turns_q_in_place_by_its_position(ops: Ops, dtype: torch.dtype) -> None:
    q, k, v = (normal(5, 2, 32, dtype=dtype, seed=seed) for seed in range(3))
    cos_sin = normal(50, 32, dtype=torch.float32)
    positions = torch.tensor([49, 0, 7, 7, 3])
    expected = exact_rotation(q, cos_sin, positions)
    cache = ops.attention.new_kv_cache(4, 16, 2, 32, dtype)
    ops.attention.rotary_and_write_kv(q, k, v, cos_sin, positions, cache, torch.arange(5))
    assert_close(q, expected, dtype)


@pytest.mark.parametrize("poison", [torch.inf, 3e4])
def test_what_lies_beyond_the_sequence_is_never_read(ops: Ops, poison: float) -> None:
    case = make(ops, 21)
    clean = case.chunked(0, 21)
    case.cache.fill_(poison)
    assert torch.equal(case.chunked(0, 11), clean)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_an_overflow_reaches_no_row_before_it(ops: Ops, dtype: torch.dtype, broken: float) -> None:
    """Else one request's overflow would spoil the prefix that it shares with others."""
    case = make(ops, 70, dtype=dtype)
    before = case.chunked(0, 70)[:50]
    for tensor in (case.requests[0].k, case.requests[0].v):
        tensor[50] = broken
        case.cache.fill_(torch.nan)
        after = case.step([(0, 0, 70)])[0]
        assert torch.equal(after[:50], before)
        assert not torch.isfinite(after[50:]).all(dim=(1, 2)).any()


@pytest.mark.parametrize("poison", [torch.nan, pytest.param(torch.inf, marks=pytest.mark.slow)])
@pytest.mark.parametrize("window", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_blocks_before_a_window_may_be_anything(
    ops: Ops, dtype: torch.dtype, window: int, poison: float
) -> None:
    """Freed blocks are other requests' by then, and so is the block that stands in the table."""
    case = make(ops, 340, dtype=dtype, window=window)
    whole = case.chunked(0, 340)
    case.cache.fill_(torch.nan)
    for start, end in ((0, 130), (130, 260), (260, 339), (339, 340)):
        case.free_blocks_before(0, start - window + 1, poison)
        assert torch.equal(case.step([(0, start, end)])[0], whole[start:end])


@pytest.mark.parametrize("softcap", [0.5, 50.0])
@WINDOWS
def test_soft_capping_squeezes_scores_before_the_softmax(
    ops: Ops, dtype: torch.dtype, softcap: float, window: int | None
) -> None:
    case = make(ops, 270, dtype=dtype, softcap=softcap, window=window)
    case.requests[0].q[::2].mul_(60)
    whole = case.step([(0, 0, 270)])[0]
    assert_close(whole, case.exact(0), dtype)
    for position in (63, 269):
        assert torch.equal(case.step([(0, position, position + 1)])[0], whole[position:][:1])


@WINDOWS
def test_sinks_take_their_share_of_the_softmax(ops: Ops, window: int | None) -> None:
    """Also where spans are walked apart, and folded afterwards."""
    case = make(ops, 270, heads=(4, 2), window=window, has_sinks=True)
    whole = case.step([(0, 0, 270)])[0]
    assert_close(whole, case.exact(0), BF16)
    for position in (63, 269):
        assert torch.equal(case.step([(0, position, position + 1)])[0], whole[position:][:1])


def test_capped_heads_of_256(ops: Ops) -> None:
    case = make(ops, 70, heads=(4, 2), head_size=256, softcap=50.0, window=40)
    assert_close(case.step([(0, 0, 70)])[0], case.exact(0), BF16)


@pytest.mark.parametrize("block_size", [8, 48])
def test_any_block_size_gives_the_same_bits(ops: Ops, block_size: int) -> None:
    expected = make(ops, 150).step([(0, 0, 150)])[0]
    assert torch.equal(make(ops, 150, block_size=block_size).step([(0, 0, 150)])[0], expected)


@FEW_WINDOWS
def test_chunks_of_any_size_give_the_same_bits(ops: Ops, window: int | None) -> None:
    """Each chunk finds a prefix in the cache, in one span or several."""
    case = make(ops, 300, window=window)
    whole = case.chunked(0, 300)
    case.cache.fill_(torch.nan)
    assert torch.equal(case.chunked(0, 110), whole)


@WINDOWS
def test_decode_gives_the_bits_of_prefill(ops: Ops, window: int | None) -> None:
    """Across the ends of a tile and of a span: decode walks spans apart, prefill does not."""
    case = make(ops, 260, window=window)
    whole = case.chunked(0, 260)
    for position in (0, 63, 64, 255, 259):
        assert torch.equal(case.step([(0, position, position + 1)])[0], whole[position:][:1])


def test_other_requests_in_the_batch_change_nothing(ops: Ops) -> None:
    case = make(ops, 40, 270, 1)
    alone = [case.chunked(index, 1000) for index in range(3)]
    case.cache.fill_(torch.nan)
    case.step([(1, 0, 269)])
    mixed = case.step([(0, 0, 40), (1, 269, 270), (2, 0, 1)])
    assert torch.equal(mixed[0], alone[0])
    assert torch.equal(mixed[1], alone[1][269:])
    assert torch.equal(mixed[2], alone[2])


def test_spans_walked_in_a_row_give_the_bits_of_spans_walked_apart(
    ops: Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step without room for partial sums is slower, and nothing else."""
    case = make(ops, 270)
    whole = case.chunked(0, 270)
    apart = case.step([(0, 250, 270)])[0]
    monkeypatch.setattr(attention_plan, "MAX_PARTIAL_ROWS", 0)
    assert torch.equal(apart, whole[250:])
    assert torch.equal(case.step([(0, 250, 270)])[0], apart)


@FEW_WINDOWS
def test_longer_spans_beyond_the_first_ones_give_decode_the_bits_of_prefill(
    ops: Ops, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans end at 64, 128, 256 and 384 here, as they do at 8,192, 9,216 and so on in earnest."""
    for module in (attention_plan, attention_launch):
        monkeypatch.setattr(module, "SPAN", 64)
        monkeypatch.setattr(module, "NEAR_SPANS", 2)
        monkeypatch.setattr(module, "FAR_SPAN", 128)
    case = make(ops, 390, window=window)
    whole = case.chunked(0, 390)
    assert_close(whole, case.exact(0), BF16)
    for start, end in ((127, 128), (128, 129), (255, 257), (383, 384), (384, 390)):
        assert torch.equal(case.step([(0, start, end)])[0], whole[start:end])
    monkeypatch.setattr(attention_plan, "MAX_PARTIAL_ROWS", 0)
    assert torch.equal(case.step([(0, 380, 390)])[0], whole[380:])


@pytest.mark.parametrize(
    ("num_keys", "num_spans"),
    [(0, 0), (1, 1), (256, 1), (257, 2), (8192, 32), (8193, 33), (9216, 33), (131_072, 152)],
)
def test_spans_of_long_contexts_are_few(num_keys: int, num_spans: int) -> None:
    plan = attention_plan.plan_attention(
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([num_keys], dtype=torch.int32),
        torch.zeros(1, -(-num_keys // 16), dtype=torch.int32),
        torch.device("cpu"),
    )
    assert plan.num_single == max(1, num_spans)
    assert plan.num_partial_rows == (num_spans if num_spans > 1 else 0)


@WINDOWS
def test_a_plan_that_is_filled_again_gives_the_same_bits(ops: Ops, window: int | None) -> None:
    """Padding rows touch neither cache nor q, and their attention is 0."""
    case = make(ops, 300, 40, window=window)
    alone = [case.chunked(index, 1000) for index in range(2)]
    plans = ops.graph_plans
    assert plans is not None
    plan = plans.new_attention_plan(4, 20, case.block_size, True)
    q = torch.zeros(4, 2, 16, dtype=BF16)
    assert torch.equal(attend(case, q, plan), torch.zeros_like(q))
    for index, position in ((0, 299), (1, 39), (0, 299)):
        request = case.requests[index]
        q[:1] = rotated(case, index, position, position + 1)
        lengths = np.array([position + 1], np.int32)
        starts = np.array([0, 1], np.int32)
        plans.fill_attention_plan(plan, starts, lengths, request.block_ids[None].numpy())
        out = attend(case, q, plan)
        assert torch.equal(out[0], alone[index][position])
        assert torch.equal(out[1:], torch.zeros_like(q[1:]))


@FEW_WINDOWS
def test_a_plan_for_prompts_that_is_filled_again_gives_the_same_bits(
    ops: Ops, window: int | None
) -> None:
    """Chunks across the ends of tiles and spans beside a decode, in one order and the other."""
    case = make(ops, 300, 40, window=window)
    alone = [case.chunked(index, 1000) for index in range(2)]
    plans = ops.graph_plans
    assert plans is not None
    plan = plans.new_attention_plan(24, 20, case.block_size, False)
    for step in ([(0, 246, 266), (1, 39, 40)], [(1, 0, 23), (0, 299, 300)], [(1, 3, 5)]):
        q = torch.zeros(24, 2, 16, dtype=BF16)
        expected = torch.zeros_like(q)
        starts = [0]
        for index, start, end in step:
            rows = slice(starts[-1], starts[-1] + end - start)
            q[rows] = rotated(case, index, start, end)
            expected[rows] = alone[index][start:end]
            starts.append(rows.stop)
        tables = torch.zeros(len(step), 20, dtype=torch.int32)
        for table, (index, _, _) in zip(tables, step, strict=True):
            ids = case.requests[index].block_ids
            table[: len(ids)] = ids
        lengths = np.array([end for _, _, end in step], np.int32)
        starting = np.array(starts, np.int32)
        plans.fill_attention_plan(plan, starting, lengths, tables.numpy())
        assert torch.equal(attend(case, q, plan), expected)


def test_a_plan_for_decodes_refuses_a_prompt(ops: Ops) -> None:
    plans = ops.graph_plans
    assert plans is not None
    plan = plans.new_attention_plan(4, 2, 16, True)
    starts, lengths, tables = (np.array(values, np.int32) for values in ([0, 3], [3], [[0]]))
    with pytest.raises(AssertionError, match="1 wide tiles, 0 are reserved"):
        plans.fill_attention_plan(plan, starts, lengths, tables)


def test_no_step_needs_more_tiles_than_are_reserved() -> None:
    """Rows that were dealt out at random to requests of any length, and the worst there are."""
    rng = random.Random(0)
    plan = new_attention_plan(96, 100, 16, False, torch.device("cpu"))
    for _ in range(300):
        counts = [2] * 48 if rng.random() < 0.1 else dealt_out(96, rng)
        ends = [rng.choice((count, 1600, rng.randrange(count, 1601))) for count in counts]
        starts = np.array([0, *accumulate(counts)], np.int32)
        tables = np.zeros((len(counts), 100), np.int32)
        fill_attention_plan(plan, starts, np.array(ends, np.int32), tables)
        num_single, _, num_wide, *_ = plan.words[:8].tolist()
        assert num_single <= plan.num_single
        assert num_single + num_wide > 0


def dealt_out(rows: int, rng: random.Random) -> list[int]:
    counts = []
    while rows and rng.random() > 0.02:
        counts.append(rng.randrange(1, min(rows, rng.choice((1, 2, 9, 96))) + 1))
        rows -= counts[-1]
    return counts or [1]


def attend(case: PagedCase, q: torch.Tensor, plan: object) -> torch.Tensor:
    return case.ops.attention.paged_attention(
        q, case.cache, plan, case.scale, case.window, case.softcap, case.sinks
    )


def rotated(case: PagedCase, index: int, start: int, end: int) -> torch.Tensor:
    """q of some rows; the keys that are written with them are those that stand there."""
    request = case.requests[index]
    q = request.q[start:end].clone()
    k, v = request.k[start:end], request.v[start:end]
    positions, slots = torch.arange(start, end), request.slots(start, end)
    case.ops.attention.rotary_and_write_kv(q, k, v, case.cos_sin, positions, case.cache, slots)
    return q
