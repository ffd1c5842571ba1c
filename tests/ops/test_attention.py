from __future__ import annotations

import pytest
import torch

from lora_serve.ops.contract import Ops
from tests.fakes.threads import num_threads
from tests.ops.cases import PagedCase, assert_close, exact_rotation, normal

WINDOWS = pytest.mark.parametrize("window", [None, 1, 20, 300])


def make(
    ops: Ops,
    dtype: torch.dtype,
    *seq_lens: int,
    heads: tuple[int, int] = (4, 2),
    head_size: int = 32,
    **options: int | float | None,
) -> PagedCase:
    return PagedCase(
        ops,
        seq_lens,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_size=head_size,
        dtype=dtype,
        **options,
    )


@WINDOWS
@pytest.mark.parametrize("seq_len", [1, 17, 256, 257, 600])
def test_attention_is_the_softmax_over_what_is_visible(
    ops: Ops, dtype: torch.dtype, seq_len: int, window: int | None
) -> None:
    case = make(ops, dtype, seq_len, window=window)
    assert_close(case.step([(0, 0, seq_len)])[0], case.exact(0), dtype)


@pytest.mark.parametrize("heads", [(1, 1), (6, 6), (14, 2), (8, 1)])
@pytest.mark.parametrize("head_size", [16, 64, 128])
def test_query_heads_share_key_heads_in_groups(
    ops: Ops, dtype: torch.dtype, heads: tuple[int, int], head_size: int
) -> None:
    case = make(ops, dtype, 70, heads=heads, head_size=head_size)
    assert_close(case.step([(0, 0, 70)])[0], case.exact(0), dtype)


@pytest.mark.parametrize("block_size", [32, 48, 256])
def test_any_block_size_gives_the_same_bits(ops: Ops, dtype: torch.dtype, block_size: int) -> None:
    expected = make(ops, dtype, 300).step([(0, 0, 300)])[0]
    case = make(ops, dtype, 300, block_size=block_size)
    assert torch.equal(case.step([(0, 0, 300)])[0], expected)


@WINDOWS
def test_chunks_of_any_size_give_the_same_bits(
    ops: Ops, dtype: torch.dtype, window: int | None
) -> None:
    """Each chunk finds a prefix in the cache."""
    case = make(ops, dtype, 540, window=window)
    whole = case.chunked(0, 540)
    for chunk in (7, 16, 100, 256):
        case.cache.fill_(torch.nan)
        assert torch.equal(case.chunked(0, chunk), whole), f"chunks of {chunk}"


@WINDOWS
def test_decode_gives_the_bits_of_prefill(ops: Ops, dtype: torch.dtype, window: int | None) -> None:
    case = make(ops, dtype, 275, window=window)
    whole = case.chunked(0, 275)
    case.cache.fill_(torch.nan)
    case.step([(0, 0, 240)])
    for position in range(240, 275):
        assert torch.equal(case.step([(0, position, position + 1)])[0], whole[position:][:1])


def test_bits_do_not_depend_on_the_batch_with_two_threads(ops: Ops) -> None:
    with num_threads(2):
        case = make(ops, torch.float32, 260, 20, heads=(2, 1), head_size=16)
        whole = case.chunked(0, 260)
        assert torch.equal(case.chunked(0, 150), whole)
        assert torch.equal(case.step([(1, 0, 20), (0, 0, 260)])[1], whole)


def test_other_requests_in_the_batch_change_nothing(ops: Ops, dtype: torch.dtype) -> None:
    case = make(ops, dtype, 40, 300, 1, 530)
    alone = [case.chunked(index, 1000) for index in range(4)]
    case.cache.fill_(torch.nan)
    case.step([(1, 0, 299), (3, 0, 200)])
    mixed = case.step([(3, 200, 530), (0, 0, 40), (1, 299, 300), (2, 0, 1)])
    assert torch.equal(mixed[0], alone[3][200:])
    assert torch.equal(mixed[1], alone[0])
    assert torch.equal(mixed[2], alone[1][299:])
    assert torch.equal(mixed[3], alone[2])


def test_what_lies_beyond_the_sequence_is_never_read(ops: Ops, dtype: torch.dtype) -> None:
    case = make(ops, dtype, 21)
    clean = case.chunked(0, 21)
    for poison in (torch.inf, -torch.inf, 3e4):
        case.cache.fill_(poison)
        assert torch.equal(case.chunked(0, 5), clean)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_an_overflow_reaches_no_row_before_it(ops: Ops, dtype: torch.dtype, broken: float) -> None:
    """Else one request's overflow would spoil the prefix that it shares with others."""
    case = make(ops, dtype, 300)
    before = case.chunked(0, 300)[:280]
    for tensor in (case.requests[0].k, case.requests[0].v):
        tensor[280] = broken
        case.cache.fill_(torch.nan)
        after = case.step([(0, 0, 300)])[0]
        assert torch.equal(after[:280], before)
        assert not torch.isfinite(after[280:]).all(dim=(1, 2)).any()


def test_rotation_turns_q_in_place_by_its_position(ops: Ops, dtype: torch.dtype) -> None:
    q, k, v = (normal(5, 2, 32, dtype=dtype, seed=seed) for seed in range(3))
    angles = torch.rand(50, 16, generator=torch.Generator().manual_seed(0)) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.tensor([49, 0, 7, 7, 3])
    expected = exact_rotation(q, cos_sin, positions)
    cache = ops.attention.new_kv_cache(4, 16, 2, 32, dtype)
    ops.attention.rotary_and_write_kv(q, k, v, cos_sin, positions, cache, torch.arange(5))
    assert_close(q, expected, dtype)


def test_large_scores_do_not_overflow(ops: Ops, dtype: torch.dtype) -> None:
    case = make(ops, dtype, 30)
    for request in case.requests:
        request.q.mul_(60)
        request.k.mul_(60)
    got = case.step([(0, 0, 30)])[0]
    assert torch.isfinite(got).all()
    assert got.abs().max() <= case.requests[0].v.abs().max() * 1.01


SOFTCAPS = pytest.mark.parametrize("softcap", [0.5, 50.0])


def capped(
    ops: Ops, dtype: torch.dtype, *seq_lens: int, softcap: float, window: int | None = None
) -> PagedCase:
    """Scores far below the cap and far above it."""
    case = make(ops, dtype, *seq_lens, softcap=softcap, window=window)
    for request in case.requests:
        request.q.mul_(3)
        request.q[::7].mul_(60)
    return case


@SOFTCAPS
@pytest.mark.parametrize("seq_len", [1, 17, 257, 600])
def test_soft_capping_squeezes_scores_before_the_softmax(
    ops: Ops, dtype: torch.dtype, seq_len: int, softcap: float
) -> None:
    case = capped(ops, dtype, seq_len, softcap=softcap)
    assert_close(case.step([(0, 0, seq_len)])[0], case.exact(0), dtype)


@WINDOWS
def test_capped_scores_give_the_same_bits_in_any_chunks_and_company(
    ops: Ops, dtype: torch.dtype, window: int | None
) -> None:
    case = capped(ops, dtype, 330, 40, softcap=5.0, window=window)
    whole = case.chunked(0, 330)
    for chunk in (7, 100):
        case.cache.fill_(torch.nan)
        assert torch.equal(case.chunked(0, chunk), whole), f"chunks of {chunk}"
    assert torch.equal(case.step([(1, 0, 40), (0, 329, 330)])[1], whole[329:])


def test_a_cap_that_no_score_comes_near_changes_next_to_nothing(
    ops: Ops, dtype: torch.dtype
) -> None:
    case = make(ops, dtype, 70)
    free = case.chunked(0, 70)
    case.softcap = 1e4
    assert_close(case.chunked(0, 70), free.double(), dtype)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_an_overflow_reaches_no_capped_row_before_it(
    ops: Ops, dtype: torch.dtype, broken: float
) -> None:
    case = make(ops, dtype, 70, softcap=50.0)
    before = case.chunked(0, 70)[:50]
    case.requests[0].k[50] = broken
    case.cache.fill_(torch.nan)
    assert torch.equal(case.step([(0, 0, 70)])[0][:50], before)


@pytest.mark.parametrize("window", [None, 20])
def test_sinks_take_their_share_of_the_softmax(
    ops: Ops, dtype: torch.dtype, window: int | None
) -> None:
    """Each head has its own, and chunks of any size give the same bits."""
    case = make(ops, dtype, 540, heads=(6, 2), window=window, has_sinks=True)
    whole = case.step([(0, 0, 540)])[0]
    assert_close(whole, case.exact(0), dtype)
    case.cache.fill_(torch.nan)
    assert torch.equal(case.chunked(0, 100), whole)
    for position in (63, 511, 539):
        assert torch.equal(case.step([(0, position, position + 1)])[0], whole[position:][:1])


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 3e4])
@pytest.mark.parametrize("window", [1, 20, 100, 300])
def test_blocks_before_a_window_may_be_anything(
    ops: Ops, dtype: torch.dtype, window: int, poison: float
) -> None:
    """Freed blocks are other requests' by then, and so is the block that stands in the table."""
    case = make(ops, dtype, 560, window=window)
    whole = case.chunked(0, 560)
    case.cache.fill_(torch.nan)
    for start in range(0, 560, 80):
        case.free_blocks_before(0, start - window + 1, poison)
        assert torch.equal(case.step([(0, start, start + 80)])[0], whole[start:][:80])
    for position in (557, 558, 559):
        case.free_blocks_before(0, position - window + 1, poison)
        assert torch.equal(case.step([(0, position, position + 1)])[0], whole[position:][:1])


def test_layers_of_one_plan_may_have_windows_of_their_own(ops: Ops, dtype: torch.dtype) -> None:
    whole = {}
    for window in (None, 20, 300):
        case = make(ops, dtype, 330, window=window)
        whole[window] = case.chunked(0, 330)
    for window, expected in whole.items():
        case.window = window
        assert torch.equal(case.step([(0, 0, 330)])[0], expected)


@WINDOWS
def test_heads_of_256(ops: Ops, dtype: torch.dtype, window: int | None) -> None:
    case = make(ops, dtype, 270, heads=(4, 1), head_size=256, window=window, softcap=50.0)
    whole = case.step([(0, 0, 270)])[0]
    assert_close(whole, case.exact(0), dtype)
    assert torch.equal(case.step([(0, 269, 270)])[0], whole[269:])
