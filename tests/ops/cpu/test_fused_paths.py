"""Every path with a fused multiply-add gives the bits of the machine's best one.

AMX alone has another order of sums for bfloat16: test_tiles.py.

Outputs of 16 bits hide most of what the order of a sum does. So there are sums here that cancel:
nothing is left of them but what rounding did, and every bit of the result shows the order.
csrc/tests/test_halves.cpp holds the mutant, which adds the halves of a word in the other order.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lora_serve.ops.contract import LoRAPart, Ops
from tests.ops.cases import PagedCase, normal

cpu = pytest.importorskip("lora_serve.ops.cpu.backend", reason="the native kernels are not built")

FUSED = [path for path in cpu.usable_paths() if path != "scalar"] or ["neon"]
WITH_TILES = "amx"
BEST, *OTHERS = [path for path in FUSED if path != WITH_TILES]


@pytest.fixture(params=[path for path in FUSED if path != BEST])
def on_both(
    request: pytest.FixtureRequest, dtype: torch.dtype
) -> Callable[[Callable[[Ops], Tensor]], Tensor]:
    """Runs something on the best path and on this one, and holds them to the same bits."""
    if request.param == WITH_TILES and dtype == torch.bfloat16:
        pytest.skip("tiles add bfloat16 in another order")
    best, other = cpu.load(BEST, 2), cpu.load(request.param, 2)

    def run(compute: Callable[[Ops], Tensor]) -> Tensor:
        expected, got = compute(best), compute(other)
        assert torch.equal(got, expected)
        return got

    return run


OnBoth = Callable[[Callable[[Ops], Tensor]], Tensor]


def lora_delta(ops: Ops, x: Tensor, part: LoRAPart) -> Tensor:
    """What the part adds to rows of zeros."""
    y = torch.zeros(len(x), len(part.b), dtype=x.dtype)
    ops.adapters.lora(
        y, x, ops.adapters.plan_lora([(0, len(x), ops.adapters.pack_adapter([[part]]))], len(x)), 0
    )
    return y


def test_linear_and_lora(on_both: OnBoth, dtype: torch.dtype) -> None:
    x, weight = normal(13, 257, dtype=dtype), normal(70, 257, dtype=dtype, seed=1)
    bias = normal(70, dtype=dtype, seed=2)
    on_both(lambda ops: ops.linears.linear(x, ops.linears.pack_linear(weight, bias)))
    part = LoRAPart(normal(7, 257, dtype=dtype), normal(70, 7, dtype=dtype, seed=3), 0.5, 0)
    on_both(lambda ops: lora_delta(ops, x, part))


def test_norm_and_activation(on_both: OnBoth, dtype: torch.dtype) -> None:
    x, weight = normal(13, 257, dtype=dtype), normal(257, dtype=dtype, seed=1)
    on_both(lambda ops: ops.rowwise.rms_norm(x, weight, 1e-6))
    on_both(lambda ops: ops.rowwise.rms_norm(x, weight.float() + 2**-12, 1e-6))
    on_both(lambda ops: ops.rowwise.silu_and_mul(x[:, 1:].contiguous()))
    on_both(lambda ops: ops.rowwise.gelu_tanh_and_mul(x[:, 1:].contiguous()))


def test_capped_logits(on_both: OnBoth, dtype: torch.dtype) -> None:
    x = normal(13, 2570, dtype=dtype) * torch.logspace(-6, 3, 2570).to(dtype)
    on_both(lambda ops: ops.rowwise.soft_cap(x.clone(), 30.0))


@pytest.mark.parametrize("softcap", [None, 20.0])
def test_attention(on_both: OnBoth, dtype: torch.dtype, softcap: float | None) -> None:
    def attend(ops: Ops) -> Tensor:
        case = PagedCase(
            ops,
            [700],
            num_heads=6,
            num_kv_heads=2,
            head_size=80,
            dtype=dtype,
            window=600,
            softcap=softcap,
        )
        case.requests[0].q.mul_(6)
        return case.step([(0, 0, 700)])[0]

    on_both(attend)


@pytest.mark.parametrize("rows", [1, 2, 13, 40])
def test_a_product_that_cancels(on_both: OnBoth, dtype: torch.dtype, rows: int) -> None:
    """131 + 131 elements: the halves of some words belong to different sides."""
    a, b = normal(rows, 131, dtype=dtype), normal(70, 131, dtype=dtype, seed=1)
    x, weight = torch.cat((a, a), dim=1), torch.cat((b, -b), dim=1)
    noise = on_both(lambda ops: ops.linears.linear(x, ops.linears.pack_linear(weight, None)))
    assert noise.count_nonzero() > noise.numel() / 2
    assert noise.abs().max() < 1e-4


def test_a_shrink_that_cancels(on_both: OnBoth, dtype: torch.dtype) -> None:
    a, shrink = normal(13, 131, dtype=dtype), normal(7, 131, dtype=dtype, seed=1)
    x = torch.cat((a, a), dim=1)
    part = LoRAPart(
        torch.cat((shrink, -shrink), dim=1), normal(70, 7, dtype=dtype, seed=2), 1024.0, 0
    )
    assert on_both(lambda ops: lora_delta(ops, x, part)).any()


def test_an_expand_that_cancels(on_both: OnBoth, dtype: torch.dtype) -> None:
    x, shrink = normal(13, 64, dtype=dtype), normal(31, 64, dtype=dtype, seed=1)
    expand = normal(70, 31, dtype=dtype, seed=2)
    part = LoRAPart(torch.cat((shrink, shrink)), torch.cat((expand, -expand), dim=1), 1.0, 0)
    assert on_both(lambda ops: lora_delta(ops, x, part)).any()


def without_rotation(ops: Ops, seq_len: int, head_size: int, dtype: torch.dtype) -> PagedCase:
    case = PagedCase(ops, [seq_len], num_heads=6, num_kv_heads=2, head_size=head_size, dtype=dtype)
    cosine, sine = case.cos_sin.chunk(2, dim=-1)
    cosine.fill_(1.0)
    sine.fill_(0.0)
    return case


def test_scores_that_cancel(on_both: OnBoth, dtype: torch.dtype) -> None:
    """Their scale makes of each rounding a weight of its own."""

    def attend(ops: Ops) -> Tensor:
        case = without_rotation(ops, 150, 80, dtype)
        request = case.requests[0]
        request.q[..., 40:] = request.q[..., :40]
        request.k[..., 40:] = -request.k[..., :40]
        case.scale = 2.0**20
        return case.step([(0, 0, 150)])[0]

    on_both(attend)


def test_values_that_cancel(on_both: OnBoth, dtype: torch.dtype) -> None:
    """Position p + 31 has the key of position p and its value with the other sign."""

    def attend(ops: Ops) -> Tensor:
        case = without_rotation(ops, 62, 80, dtype)
        request = case.requests[0]
        request.k[31:] = request.k[:31]
        request.v[31:] = -request.v[:31]
        return case.step([(0, 0, 62)])[0][-1]

    noise = on_both(attend)
    assert noise.any()
    assert noise.abs().max() < 1e-4


@pytest.mark.parametrize("path", [BEST, *OTHERS])
@pytest.mark.parametrize("halves", [torch.bfloat16, torch.float16])
def test_the_upper_half_of_a_word_is_added_first(path: str, halves: torch.dtype) -> None:
    """1.5 + 2^25 is 2^25; then -2^25 leaves 0. The other way round 2 would be left."""
    x = torch.tensor([[0.0, 1.5, -4096.0, 4096.0]], dtype=halves)
    weight = torch.tensor([[0.0, 1.0, 8192.0, 8192.0]], dtype=halves)
    ops = cpu.load(path, 1)
    assert ops.linears.linear(x, ops.linears.pack_linear(weight, None)).item() == 0.0
