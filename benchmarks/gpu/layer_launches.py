"""What the layers of some models, and their sampling, launch on a card: recorded, never run.

The launches are those that the `Ops` record makes: it is called with tensors that have shapes and
no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_serve.ops.contract import LoRAPart, Ops
from lora_serve.ops.quantization import INT4, INT8, CodeFormat, QuantizedWeight
from lora_serve.ops.triton.backend import TritonKernels
from lora_serve.ops.triton.codes import pack_codes
from lora_serve.ops.triton.launch import Launch, Launcher, Machine
from lora_serve.sampling.triton.sampler import TritonSampler
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import SampleInput

META = torch.device("meta")
BLOCK_SIZE = 16
VOCAB_SIZE = 151_936


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One decoder's facts that kernels are shaped by. is_gemma: its activation and wide norms."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    softcap: float | None = None
    is_gemma: bool = False


MODELS = (
    ModelShape("0.5B", 896, 4864, 14, 2, 64),
    ModelShape("3B", 2048, 11008, 16, 2, 128),
    ModelShape("7B", 3584, 18944, 28, 4, 128),
    ModelShape("heads of 96", 3072, 8192, 32, 32, 96, window=2048),
    ModelShape("heads of 256", 2048, 16384, 8, 4, 256, window=4096),
    ModelShape("Gemma 2", 2304, 9216, 8, 4, 256, window=4096, softcap=50.0, is_gemma=True),
)


CODES_SHAPE = (3584, 18944)  # outputs and inputs of 7B's last product, which has most spans
# Each with whether a checkpoint stores them, with offsets, and whether activations get codes, too.
CODES = (
    (INT8, False, False),
    (INT8, False, True),
    (INT4, False, False),
    (INT4, False, True),
    (CodeFormat("stored", bits=4, group=128, least=-8, most=7), True, False),
    (CodeFormat("stored", bits=4, group=32, least=-8, most=7), True, False),
    (CodeFormat("stored", bits=8, group=16, least=-128, most=127), True, False),
)


@dataclass(frozen=True, slots=True)
class Work:
    """rows and requests of a step; captured: through a plan of fixed address."""

    name: str
    num_rows: int
    num_requests: int
    context: int
    is_captured: bool = False


WORKS = (
    Work("decode of 32", 32, 32, 2048),
    Work("captured decode of 256", 256, 256, 2048, is_captured=True),
    Work("prefill of 8192", 8192, 1, 8192),
)


def launches_of(model: ModelShape, work: Work, machine: Machine) -> list[Launch]:
    """The launches of one decoder layer in one step."""
    launches: list[Launch] = []
    kernels = TritonKernels(META, machine, batch_invariant=True, run=launches.append)
    _run_layer(kernels.ops(), model, work)
    return launches


def _run_layer(ops: Ops, model: ModelShape, work: Work) -> None:
    def empty(*shape: int, dtype: torch.dtype = model.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    heads = (model.num_heads, model.num_kv_heads, model.num_kv_heads)
    head, hidden, inner = model.head_size, model.hidden_size, model.intermediate_size
    shapes = (
        (sum(heads) * head, hidden),
        (hidden, heads[0] * head),
        (2 * inner, hidden),
        (hidden, inner),
    )
    lora = _plan_lora(ops, shapes, work, model.dtype)
    norm_dtype = torch.float32 if model.is_gemma else model.dtype
    norm_weight = empty(hidden, dtype=norm_dtype)
    residual = ops.rowwise.add_rms_norm(
        empty(work.num_rows, hidden), empty(work.num_rows, hidden), norm_weight, 1e-6
    )
    for index, (out_features, in_features) in enumerate(shapes):
        bias = empty(out_features) if index == 0 else None
        x = empty(work.num_rows, in_features)
        y = ops.linears.linear(x, ops.linears.pack_linear(empty(out_features, in_features), bias))
        ops.adapters.lora(y, x, lora, index)
    q, k, v = empty(work.num_rows, sum(heads), head).split(heads, dim=1)
    ops.rowwise.rms_norm(q, empty(head, dtype=norm_dtype), 1e-6)
    cache = ops.attention.new_kv_cache(4096, BLOCK_SIZE, model.num_kv_heads, head, model.dtype)
    rows = empty(work.num_rows, dtype=torch.int64)
    ops.attention.rotary_and_write_kv(
        q, k, v, empty(work.context, head, dtype=torch.float32), rows, cache, rows
    )
    plan = _plan_attention(ops, work)
    ops.attention.paged_attention(q, cache, plan, head**-0.5, model.window, model.softcap)
    gate = ops.rowwise.gelu_tanh_and_mul if model.is_gemma else ops.rowwise.silu_and_mul
    gate(empty(residual.shape[0], 2 * inner))
    if model.is_gemma:
        ops.rowwise.embed(empty(1000, hidden), rows, hidden**0.5)
        ops.rowwise.soft_cap(empty(work.num_requests, 1000), 30.0)


def codes_launches(work: Work, machine: Machine) -> list[Launch]:
    """Launches of linear layers and experts over codes of each kind, and of plain experts."""
    launches: list[Launch] = []
    kernels = TritonKernels(META, machine, batch_invariant=True, run=launches.append)
    ops, (out_features, in_features) = kernels.ops(), CODES_SHAPE
    x = torch.empty(work.num_rows, in_features, dtype=torch.bfloat16, device=META)
    for packed in _codes_of_each_kind(out_features, in_features):
        ops.linears.linear(x, packed)
    _run_experts(ops, work)
    return launches


def _codes_of_each_kind(out_features: int, in_features: int) -> list[object]:
    """Codes as `--quantization` finds them, and as checkpoints store them, with offsets."""
    found: list[object] = []
    codes = torch.empty(out_features, in_features, dtype=torch.int8, device=META)
    for form, is_stored, quantize_activations in CODES:
        shape = (out_features, in_features // form.group)
        scales = torch.empty(shape, dtype=torch.bfloat16, device=META)
        weight = QuantizedWeight(form, codes, scales)
        if is_stored:
            weight = QuantizedWeight(form, codes, scales.float(), scales.float())
        found.append(pack_codes(weight, None, META, quantize_activations))
    return found


def _run_experts(ops: Ops, work: Work) -> None:
    """An expert's first layer, of the numbers of OLMoE."""
    hidden, inner, num_experts, num_chosen = 2048, 1024, 64, 8
    x = torch.empty(work.num_rows, hidden, dtype=torch.bfloat16, device=META)
    weight = torch.empty(2 * inner, hidden, dtype=torch.bfloat16, device=META)
    logits = torch.empty(work.num_rows, num_experts, dtype=torch.bfloat16, device=META)
    chosen = ops.experts.choose(logits, num_chosen, False)
    of_codes = _codes_of_each_kind(2 * inner, hidden)
    for packed in (ops.linears.pack_linear(weight, None), of_codes[0], of_codes[-2]):
        experts = ops.experts.pack_experts([packed] * num_experts)
        pairs = ops.experts.linear(x, experts, chosen)
    ops.experts.add_gated(x, logits[:, :1], ops.experts.combine(pairs[:, :hidden], chosen))


def _plan_lora(
    ops: Ops, shapes: Sequence[tuple[int, int]], work: Work, dtype: torch.dtype
) -> object:
    if work.is_captured:
        assert ops.graph_plans is not None
        return ops.graph_plans.new_lora_plan(work.num_rows)
    parts = [
        [LoRAPart(torch.empty(16, n, dtype=dtype), torch.empty(m, 16, dtype=dtype), 1.0, 0)]
        for m, n in shapes
    ]
    rows = work.num_rows // work.num_requests
    adapter = ops.adapters.pack_adapter(parts)
    segments = [(i * rows, (i + 1) * rows, adapter) for i in range(work.num_requests)]
    return ops.adapters.plan_lora(segments, work.num_rows)


def _plan_attention(ops: Ops, work: Work) -> object:
    max_blocks = work.context // BLOCK_SIZE
    if work.is_captured:
        assert ops.graph_plans is not None
        return ops.graph_plans.new_attention_plan(work.num_rows, max_blocks, BLOCK_SIZE, True)
    starts = torch.linspace(0, work.num_rows, work.num_requests + 1).int()
    lengths = torch.full((work.num_requests,), work.context, dtype=torch.int32)
    tables = torch.zeros(work.num_requests, max_blocks, dtype=torch.int32)
    return ops.attention.plan_attention(starts, lengths, tables, BLOCK_SIZE)


def sampling_launches(machine: Machine) -> list[Launch]:
    """Launches of a step that samples, with all filters, from the models' largest vocabulary."""
    launches: list[Launch] = []
    sampler = TritonSampler(Launcher(machine, launches.append))
    logits = torch.empty(32, VOCAB_SIZE, dtype=torch.bfloat16, device=META)
    inputs = [SampleInput(SamplingParams(top_k=20, top_p=0.8), seed=0, position=0)] * 32
    sampler.sample(logits, inputs)
    return launches
