"""Every path of the native kernels on every number of threads, whatever the machine would choose.

What a kernel must give is tested in the files that all backends share; here each path meets the
reference once more, and itself in other batches, chunks and thread counts. That paths agree with
each other: test_fused_paths.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lora_serve.ops.contract import LoRAPart, Ops, PackedLinear
from lora_serve.ops.quantization import INT4, INT8, CodeFormat, QuantizedWeight, quantize
from lora_serve.ops.reference import REFERENCE
from tests.ops.cases import (
    PagedCase,
    assert_close,
    exact_gelu_tanh_and_mul,
    exact_linear,
    exact_lora,
    exact_rms_norm,
    exact_silu_and_mul,
    exact_soft_cap,
    normal,
)

cpu = pytest.importorskip("lora_serve.ops.cpu.backend", reason="the native kernels are not built")

THREADS = (1, 2, 3)


@pytest.fixture(params=cpu.usable_paths(), scope="module")
def by_threads(request: pytest.FixtureRequest) -> list[Ops]:
    """One path, with 1, 2 and 3 threads."""
    return [cpu.load(request.param, num_threads) for num_threads in THREADS]


def same_on_all(results: list[Tensor]) -> Tensor:
    for result in results[1:]:
        assert torch.equal(result, results[0])
    return results[0]


@pytest.mark.parametrize("rows", [1, 2, 5, 12, 13, 300])
def test_linear(by_threads: list[Ops], dtype: torch.dtype, rows: int) -> None:
    """Wide enough that three threads share even one row."""
    x = normal(rows, 258, dtype=dtype)
    weight, bias = normal(1003, 258, dtype=dtype, seed=1), normal(1003, dtype=dtype, seed=2)
    y = same_on_all(
        [ops.linears.linear(x, ops.linears.pack_linear(weight, bias)) for ops in by_threads]
    )
    assert_close(y, exact_linear(x, weight, bias), dtype)
    packed = by_threads[2].linears.pack_linear(weight, bias)
    last = by_threads[2].linears.linear(x[-1:].clone(), packed)
    assert torch.equal(last, y[-1:])


@pytest.mark.parametrize("rows", [1, 2, 5, 13, 300])
@pytest.mark.parametrize("code_format", [INT8, INT4], ids=lambda f: f.name)
def test_quantized_linear(
    by_threads: list[Ops], dtype: torch.dtype, code_format: CodeFormat, rows: int
) -> None:
    x = normal(rows, 394, dtype=dtype)
    weight, bias = normal(1003, 394, dtype=dtype, seed=1), normal(1003, dtype=dtype, seed=2)
    quantized = quantize(weight, code_format)
    exact = exact_linear(x, quantized.dequantized(), bias)
    for activations in (False, True):
        packed = [pack(ops, weight, code_format, bias, activations) for ops in by_threads]
        y = same_on_all(
            [ops.linears.linear(x, p) for ops, p in zip(by_threads, packed, strict=True)]
        )
        last = by_threads[2].linears.linear(x[-1:].clone(), packed[2])
        assert torch.equal(last, y[-1:])
        if activations:
            expected = REFERENCE.linears.linear(x, pack(REFERENCE, weight, code_format, bias, True))
            assert torch.equal(y, expected)
        else:
            assert_close(y, exact, dtype)


def pack(
    ops: Ops, weight: Tensor, code_format: CodeFormat, bias: Tensor | None, activations: bool
) -> PackedLinear:
    assert ops.pack_quantized is not None, "the native kernels and the reference have it"
    return ops.pack_quantized(weight, code_format, bias, activations)


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 128), (8, 16), (8, 32)])
@pytest.mark.parametrize("has_offsets", [False, True], ids=["scales", "offsets"])
def test_codes_as_a_checkpoint_has_them(
    by_threads: list[Ops], dtype: torch.dtype, bits: int, group: int, has_offsets: bool
) -> None:
    """Some of 300 rows get the bits that all get; blocks of each size have loops of their own."""
    x, bias = normal(300, 394, dtype=dtype), normal(1003, dtype=dtype, seed=2)
    most = 2 ** (bits - 1) - 1
    form = CodeFormat("stored", bits, group, least=-most - 1, most=most)
    random = torch.Generator().manual_seed(bits + group)
    codes = torch.randint(form.least, most + 1, (1003, 394), generator=random, dtype=torch.int8)
    groups = -(-394 // group)
    scales = normal(1003, groups, dtype=torch.float32, seed=3) / most
    offsets = normal(1003, groups, dtype=torch.float32, seed=4) / 3
    weight = QuantizedWeight(form, codes, scales, offsets if has_offsets else None)
    packs = [ops.pack_codes for ops in by_threads]
    packed = [pack(weight, bias) for pack in packs if pack is not None]
    y = same_on_all([ops.linears.linear(x, p) for ops, p in zip(by_threads, packed, strict=True)])
    assert_close(y, exact_linear(x, weight.dequantized(), bias), dtype)
    for rows in (1, 2, 5, 13):
        assert torch.equal(by_threads[1].linears.linear(x[-rows:].clone(), packed[1]), y[-rows:])


@pytest.mark.parametrize("width", [1, 31, 394, 512])
@pytest.mark.parametrize("code_format", [INT8, INT4], ids=lambda f: f.name)
def test_every_path_finds_the_specifications_codes_and_scales(
    by_threads: list[Ops], dtype: torch.dtype, code_format: CodeFormat, width: int
) -> None:
    """Products with rows of one 1 give them back: exact, since nothing is added to them."""
    weight = awkward_weights(width, dtype)
    expected = quantize(weight, code_format).dequantized()
    ones = torch.eye(width)
    usable = expected.isfinite().all(dim=1)
    assert (~usable).nonzero().flatten().tolist() == [8, 9, 10]
    for ops in by_threads:
        got = ops.linears.linear(ones, pack(ops, weight, code_format, None, False)).t()
        assert torch.equal(got[usable], expected[usable])
        assert not got[~usable].isfinite().any()


def awkward_weights(width: int, dtype: torch.dtype) -> Tensor:
    """(41, width): ties, groups of one sign, the smallest and largest numbers there are."""
    weight = normal(41, width, dtype=torch.float32)
    weight[1] = torch.arange(width) % 15 / 2 - 3.5
    weight[2:4] = weight[2:4].abs() + 0.1
    weight[3] *= -1
    weight[4] = 0.0
    limits = torch.finfo(dtype)
    weight[5] *= limits.tiny
    weight[6] *= limits.smallest_normal * 3
    weight[7] = weight[7].clamp(-1.0, 1.0) * limits.max * 0.9
    weight[8, 0], weight[9, -1], weight[10, 0] = torch.nan, torch.inf, -torch.inf
    return weight.to(dtype)


@pytest.mark.parametrize("ranks", [(16, 16), (1, 64), (7, 130)])
def test_lora(by_threads: list[Ops], dtype: torch.dtype, ranks: tuple[int, int]) -> None:
    """Two adapters over a fused layer of two parts; each row its own adapter, and long runs."""
    x, base = normal(130, 200, dtype=dtype), normal(130, 3000, dtype=dtype, seed=1)
    adapters = [
        [
            LoRAPart(normal(rank, 200, dtype=dtype, seed=start + rank), b, 0.25, start)
            for start in (0, 1500)
            for b in [normal(1500, rank, dtype=dtype, seed=start + rank + 1)]
        ]
        for rank in ranks
    ]
    segments = [(i, i + 1, i % 2) for i in range(9)] + [(9, 110, 0), (115, 130, 1)]

    def run(ops: Ops) -> Tensor:
        packed = [ops.adapters.pack_adapter([parts]) for parts in adapters]
        plan = ops.adapters.plan_lora([(start, end, packed[i]) for start, end, i in segments], 130)
        y = base.clone()
        ops.adapters.lora(y, x, plan, 0)
        return y

    exact = base.double()
    for start, end, index in segments:
        exact[start:end] += exact_lora(x[start:end], adapters[index], 3000)
    assert_close(same_on_all([run(ops) for ops in by_threads]), exact, dtype)


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_norm_and_activation(by_threads: list[Ops], dtype: torch.dtype, rows: int) -> None:
    """Wide enough that rows, or one row's columns, are shared."""
    x, weight = normal(rows, 20010, dtype=dtype), normal(20010, dtype=dtype, seed=1)
    normed = same_on_all([ops.rowwise.rms_norm(x, weight, 1e-6) for ops in by_threads])
    assert_close(normed, exact_rms_norm(x, weight, 1e-6), dtype)
    gated = same_on_all([ops.rowwise.silu_and_mul(x) for ops in by_threads])
    assert_close(gated, exact_silu_and_mul(x), dtype)
    gated = same_on_all([ops.rowwise.gelu_tanh_and_mul(x) for ops in by_threads])
    assert_close(gated, exact_gelu_tanh_and_mul(x), dtype)
    wide = weight.float() + 2**-12
    normed = same_on_all([ops.rowwise.rms_norm(x, wide, 1e-6) for ops in by_threads])
    assert_close(normed, exact_rms_norm(x, wide, 1e-6), dtype)


@pytest.mark.parametrize("rows", [1, 3])
def test_scaled_rows_and_capped_logits(
    by_threads: list[Ops], dtype: torch.dtype, rows: int
) -> None:
    x, ids = normal(5, 40010, dtype=dtype) * 20, torch.tensor([4, 0, 3])[:rows]
    scaled = same_on_all([ops.rowwise.embed(x, ids, 1.5) for ops in by_threads])
    assert torch.equal(scaled, (x[ids].double() * 1.5).to(dtype))
    capped = same_on_all([ops.rowwise.soft_cap(x[:rows].clone(), 30.0) for ops in by_threads])
    assert_close(capped, exact_soft_cap(x[:rows], 30.0), dtype)


@pytest.mark.parametrize(
    ("heads", "head_size", "window", "softcap"),
    [
        ((14, 2), 64, None, None),
        ((2, 2), 80, 700, None),
        ((4, 1), 256, None, None),
        ((3, 3), 16, 33, None),
        ((4, 2), 256, 700, 50.0),
        ((2, 1), 32, None, 0.5),
    ],
)
def test_attention(
    by_threads: list[Ops],
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_size: int,
    window: int | None,
    softcap: float | None,
) -> None:
    """1,100 positions are three spans: with more threads than units, spans are shared too."""

    def case(ops: Ops) -> PagedCase:
        return PagedCase(
            ops,
            [1100, 90],
            num_heads=heads[0],
            num_kv_heads=heads[1],
            head_size=head_size,
            dtype=dtype,
            window=window,
            softcap=softcap,
        )

    cases = [case(ops) for ops in by_threads]
    whole = same_on_all([case.step([(0, 0, 1100)])[0] for case in cases])
    assert_close(whole[1000:], cases[0].exact(0)[1000:], dtype)
    decoded = same_on_all([torch.cat(case.step([(1, 0, 90), (0, 1099, 1100)])) for case in cases])
    assert torch.equal(decoded[90:], whole[1099:])


@pytest.mark.parametrize("window", [33, 700])
def test_attention_is_not_changed_by_blocks_before_its_window(
    by_threads: list[Ops], dtype: torch.dtype, window: int
) -> None:
    for ops in by_threads:
        case = PagedCase(
            ops, [1100], num_heads=4, num_kv_heads=2, head_size=32, dtype=dtype, window=window
        )
        whole = case.step([(0, 0, 1100)])[0]
        for start, end in ((900, 1099), (1099, 1100)):
            case.free_blocks_before(0, start - window + 1, torch.nan)
            assert torch.equal(case.step([(0, start, end)])[0], whole[start:end])
