"""What kernels do: a protocol for each group of them that shares a private format.

T tokens, R requests, H hidden size, D head size; Hq query heads share Hkv key heads; "dtype" is the
model's. `ops/reference/` gives each kernel's meaning in plain torch, and the others are tested
against it. The rule that all of them keep: an output element is summed in an order that depends on
absolute position only, never on how many rows, which other rows, or which chunk it came with.

All arithmetic is in float32 and rounded to the dtype once, at the end of a kernel. Kernels know no
request: how tokens are sampled from logits is `lora_serve.sampling`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NewType, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor

from lora_serve.ops.kept_packing import KeptPacking
from lora_serve.ops.quantization import CodeFormat, QuantizedWeight
from lora_serve.ops.recorded_steps import GraphPlans, HostCalls, Record

# What a backend makes for itself and only it looks into. A backend's own modules name their own
# types, and mypy holds its kernels to them; to layers and the worker they are these.
PackedLinear = NewType("PackedLinear", object)
PackedExperts = NewType("PackedExperts", object)
PackedAdapter = NewType("PackedAdapter", object)
LoRAPlan = NewType("LoRAPlan", object)
AttentionPlan = NewType("AttentionPlan", object)

# The same, of one backend.
LinearT = TypeVar("LinearT")
ExpertsT = TypeVar("ExpertsT")
AdapterT = TypeVar("AdapterT")
LoRAPlanT = TypeVar("LoRAPlanT")
AttentionPlanT = TypeVar("AttentionPlanT")
LinearOutT = TypeVar("LinearOutT", covariant=True)
LinearInT = TypeVar("LinearInT", contravariant=True)
AdapterInT = TypeVar("AdapterInT", contravariant=True)
LoRAPlanOutT = TypeVar("LoRAPlanOutT", covariant=True)


class RowwiseKernels(Protocol):
    """Kernels that take every row by itself. Each of them can be swapped alone."""

    def embed(self, weight: Tensor, input_ids: Tensor, scale: float | None, /) -> Tensor:
        """Look rows of weight (V, H) up by input_ids (T), int64.

        Returns:
            (T, H), newly allocated: the rows as they are; or times scale, rounded once.
        """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, /) -> Tensor:
        """Give x / sqrt(mean(x^2) + eps) * weight, the mean over the last dimension.

        Args:
            x: (N, D); or (T, heads, D), a token's heads side by side, tokens at any stride.
            weight: (D), of x's dtype or float32, contiguous.
            eps: added to the mean of squares.

        Returns:
            x's shape, contiguous, newly allocated.
        """

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, /) -> Tensor:
        """Add x (T, H) to residual (T, H) in place, rounded to its dtype; return its `rms_norm`.

        residual: contiguous.
        """

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, /) -> Tensor:
        """Give (x - mean) / sqrt(variance + eps) * weight + bias, both over the last dimension.

        Args:
            x: (T, H), contiguous.
            weight, bias: (H), of x's dtype, contiguous.
            eps: added to the variance, the mean of (x - mean)^2.

        Returns:
            (T, H), contiguous, newly allocated.
        """

    def add(self, x: Tensor, residual: Tensor, /) -> Tensor:
        """Add x (T, H) to residual (T, H), contiguous, in place, rounded once; return residual."""

    def scale(self, x: Tensor, factor: float, /) -> Tensor:
        """Multiply x, contiguous, by factor in place, rounded once; return it."""

    def silu_and_mul(self, x: Tensor, /) -> Tensor:
        """Give silu(x[:, :I]) * x[:, I:] of x (T, 2 I): (T, I), where silu(g) = g / (1 + e^-g)."""

    def gelu_tanh_and_mul(self, x: Tensor, /) -> Tensor:
        """`silu_and_mul` with gelu in its form with tanh in the place of silu.

        gelu(g) = g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 g^3)))
        """

    def gelu_tanh(self, x: Tensor, /) -> Tensor:
        """Make gelu(x), as `gelu_tanh_and_mul` has it, of x (T, I), contiguous, in place."""

    def soft_cap(self, logits: Tensor, cap: float, /) -> Tensor:
        """Make cap * tanh(logits / cap) of logits (N, V), contiguous, in place; return them.

        cap: above 0. Two logits may round to one: an LM head that is capped is not screened.
        """


class LinearKernels(Protocol[LinearT]):
    """Linear layers, their weights in the backend's own order."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None, /) -> LinearT:
        """Pack weight (out, in) and bias (out). May keep the weight itself."""

    def pack_rows(self, weight: Tensor, /) -> LinearT:
        """Pack weight (out, in) as it is, never quantised, for `linear`.

        Any thread may, beside the one that runs steps. Its memory is free when it is dropped.
        """

    def linear(self, x: Tensor, packed: LinearT, /) -> Tensor:
        """Give x @ weight.T + bias of x (T, in): (T, out), rounded once, after the bias."""


class FuseGated(Protocol[LinearInT]):
    """Makes one kernel of a packed weight (2 I, in), gate's outputs first, and its activation."""

    def __call__(self, packed: LinearInT, activation: str, /) -> Callable[[Tensor], Tensor] | None:
        """Give what makes (T, I) of x (T, in), with the bits of `linear` and then the activation.

        activation: silu or gelu_tanh, which `RowwiseKernels` has as `silu_and_mul` and so on.

        Returns:
            None where the two kernels by themselves serve this weight.
        """


class PackQuantized(Protocol[LinearOutT]):
    """Packs a weight as the codes and scales that quantization.py has for it, to the bit."""

    def __call__(
        self,
        weight: Tensor,
        code_format: CodeFormat,
        bias: Tensor | None,
        quantize_activations: bool,
        /,
    ) -> LinearOutT: ...


class PackCodes(Protocol[LinearOutT]):
    """Packs a weight (out, in) that is codes already; scales and offsets are in float32.

    Groups are 16, 32, 64, 128 or 256 codes. An output element is the sum over groups, in ascending
    order, of scale * (codes . x) + offset * (sum of x).
    """

    def __call__(self, weight: QuantizedWeight, bias: Tensor | None, /) -> LinearOutT: ...


class ScreenedArgmax(Protocol):
    """Finds the largest outputs of a packed weight without computing all."""

    def __call__(self, x: Tensor, bitmasks: Sequence[bytes | None], /) -> list[int]:
        """Find the first of the largest outputs of each row of x (N, H); -1 where that is open.

        bitmasks: which outputs of each row count, as `SampleInput.bitmask` has it; empty if all do.
        """


class TokenChoice(NamedTuple):
    """How a row's token is chosen, as sampling/specification/draw.py has it.

    scale: 1 / temperature; 0 for greedy, which looks at nothing else.
    seed: in [0, 2**64).
    """

    scale: float
    min_p: float
    top_p: float
    top_k: int
    seed: int
    position: int


@runtime_checkable
class ScreenedTokens(ScreenedArgmax, Protocol):
    """A ScreenedArgmax that also draws tokens."""

    def draw(
        self, x: Tensor, bitmasks: Sequence[bytes | None], choices: Sequence[TokenChoice], /
    ) -> list[int]:
        """Choose a token of each row of x (N, H) by its outputs; -1 where all of them are needed.

        choices: N, one for each row.
        """


class Screen(ScreenedArgmax, Protocol):
    """A ScreenedArgmax of a packed weight that also tells how large the found outputs are."""

    def outputs(self, x: Tensor, tokens: Sequence[int], /) -> list[float]:
        """Output tokens[t] of row t of x (N, H), with the bits that `linear` gives it."""


class PackScreen(Protocol[LinearInT]):
    """Makes a kernel that finds the largest output of a packed weight without computing all.

    None where the weight's numbers cannot be screened. The kernel keeps what it needs of `packed`.
    """

    def __call__(self, weight: Tensor, packed: LinearInT, /) -> Screen | None: ...


@dataclass(frozen=True, slots=True)
class ChosenExperts:
    """The K experts that each of T rows takes, and how much of each.

    ids: (T, K), int32, a row's in the order in which it sums them. weights: (T, K), float32. Both
    contiguous. Row t and its j-th expert are pair t * K + j.
    """

    ids: Tensor
    weights: Tensor


class ExpertKernels(Protocol[LinearT, ExpertsT]):
    """Mixtures of experts: linear layers of which each row takes a few.

    Their weights are packed by `LinearKernels` of the same backend, and so may be quantised.
    """

    def pack_gate(self, weight: Tensor, bias: Tensor | None = None, /) -> LinearT:
        """Pack weight (N, H) and bias (N) of what decides between experts: never quantised."""

    def gate(self, x: Tensor, packed: LinearT, /) -> Tensor:
        """Give x @ weight.T + bias of x (T, H): (T, N), in the dtype."""

    def choose(self, logits: Tensor, num_chosen: int, among_chosen: bool, /) -> ChosenExperts:
        """Find the largest of each row of logits (T, E); of equal ones the first.

        among_chosen: whether a row's weights are the softmax of its chosen logits alone, or what
            the softmax of all its logits has there.
        """

    def pack_experts(self, experts: Sequence[LinearT], /) -> ExpertsT:
        """Bring packed linear layers of one shape together. May keep them."""

    def linear(self, x: Tensor, packed: ExpertsT, chosen: ChosenExperts, /) -> Tensor:
        """Give each pair's product with its expert's weight, as `LinearKernels.linear` does.

        x: (T, in), where all pairs of a row read it; or (T * K, in), a row for each pair.

        Returns:
            (T * K, out), newly allocated.
        """

    def combine(self, x: Tensor, chosen: ChosenExperts, /) -> Tensor:
        """Sum x (T * K, H), times their weights, over each row's pairs: (T, H), rounded once."""

    def add_gated(self, x: Tensor, logits: Tensor, total: Tensor, /) -> Tensor:
        """Add sigmoid(logits) * x to total in place, rounded once; return total.

        x, total: (T, H), contiguous. logits: (T, 1).
        """


@dataclass(frozen=True, slots=True)
class LoRAPart:
    """One projection's delta inside a (possibly fused) linear layer.

    y[:, out_start : out_start + b.shape[0]] += scale * (x @ a.T) @ b.T

    a: (rank, in_features), model dtype, contiguous. b: (out_features, rank), likewise.
    """

    a: Tensor
    b: Tensor
    scale: float
    out_start: int


class LoRAKernels(Protocol[AdapterT, LoRAPlanT]):
    """What adapters add to linear layers."""

    def pack_adapter(self, linears: Sequence[Sequence[LoRAPart]], /) -> AdapterT:
        """Pack an adapter. linears[i]: the parts of linear layer i."""

    def plan_lora(
        self, segments: Sequence[tuple[int, int, AdapterT]], num_tokens: int, /
    ) -> LoRAPlanT:
        """Plan a step's deltas, once a step.

        segments: (start, end, adapter), disjoint row ranges in ascending order. Rows outside them
            have no adapter.
        """

    def lora(self, y: Tensor, x: Tensor, plan: LoRAPlanT, linear_index: int, /) -> None:
        """Add every segment's delta of x (T, in) to y (T, out), contiguous, in place.

        The hidden x @ a.T stays float32; the delta is added in float32 and y rounded once.
        """


class PlanPairs(Protocol[AdapterInT, LoRAPlanOutT]):
    """Plans the deltas of experts without the host's knowing which experts were chosen."""

    def __call__(
        self,
        changes: Sequence[tuple[int, int, Sequence[AdapterInT]]],
        chosen: ChosenExperts,
        /,
    ) -> tuple[Tensor, LoRAPlanOutT]:
        """Bring the pairs of each adapter and expert side by side, and plan their deltas.

        changes: (start, end, adapters), at least one: disjoint ranges of chosen's rows in ascending
            order, and the adapter of each expert.

        Returns:
            The pairs of these rows in their new order, int64, and the plan of the deltas of rows
            that stand in it.
        """


class AttentionKernels(Protocol[AttentionPlanT]):
    """Paged attention with its KV cache, whose layout is the backend's own."""

    def new_kv_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        /,
    ) -> Tensor:
        """Allocate one layer's cache (num_blocks, 2 for K and V, num_kv_heads, …), uninitialised.

        What a head's part looks like belongs to the backend, and tiers move it as bytes.

        Raises:
            ConfigError: for a block or head size that the kernels cannot take.
        """

    def rotary_and_write_kv(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        /,
    ) -> None:
        """Rotate q in place, and write rotated k, and v, to the cache.

        Args:
            q: (T, Hq, D), and k and v (T, Hkv, D): heads side by side, tokens at any stride.
            cos_sin: (P, D), float32: the cosines of position p's angles, then their sines. The
                halves of a head turn together (neox).
            positions: (T), int64.
            kv_cache: from new_kv_cache.
            slot_mapping: (T), int64: block_id * block_size + offset.
        """

    def plan_attention(
        self, query_start_loc: Tensor, seq_lens: Tensor, block_tables: Tensor, block_size: int, /
    ) -> AttentionPlanT:
        """Plan a step's attention, once a step, for all layers; int32 tensors on the CPU.

        Args:
            query_start_loc: (R + 1): request r's queries are rows [loc[r], loc[r + 1]).
            seq_lens: (R): its queries are the last of so many positions.
            block_tables: (R, any): where those positions lie.
            block_size: of the cache.
        """

    def paged_attention(
        self,
        q: Tensor,
        kv_cache: Tensor,
        plan: AttentionPlanT,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
        /,
    ) -> Tensor:
        """Attend from q (T, Hq, D), at any stride of tokens -> (T, Hq, D), newly allocated.

        Causal: the query at position p sees [0, p], or (p - sliding_window, p]. Scores are
        scale * q . k, or softcap * tanh(scale * q . k / softcap). Blocks that lie before what any
        of a request's queries sees may hold anything, and need not be the request's.

        sinks: (Hq), float32, contiguous: the score of one position more, which every query of the
        head sees and which has no value.
        """


StepPlans = GraphPlans[PackedAdapter, LoRAPlan, AttentionPlan]


@dataclass(frozen=True, slots=True)
class Runtime:
    """What runs a backend's kernels.

    launcher: of the backend's own type; None where its kernels need none.
    """

    backend: str
    launcher: object = None


@dataclass(frozen=True, slots=True)
class Ops:
    """The kernels that serve: a group may be another backend's than the next.

    name: as `--override-op` names the backend. numerics: changes whenever results may change in a
        bit; part of the model fingerprint.
    device: where the tensors of all calls live, except those that plans are made of: these are
        CPU tensors, and the backend brings to the device what its kernels need of them.
    pack_quantized, pack_codes, pack_screen: for `linears`; None where there are no such kernels.
    graph_plans: None where nothing is ever captured. record: for a backend that notes its own
        calls, of decodes alone; None where the device records.
    fuse_gated: of `linears` and `rowwise` of one backend; None where there are no such kernels.
    plan_pairs: for `adapters`; None where the host plans the deltas of experts.
    host_calls: for a backend that notes its own calls; None where the host's work needs no note.
    kept_packing: of `linears` and `experts`; None where packed weights are not kept.
    runtime: for kernels of the backend outside these groups.
    """

    name: str
    numerics: str
    device: torch.device
    rowwise: RowwiseKernels
    linears: LinearKernels[PackedLinear]
    experts: ExpertKernels[PackedLinear, PackedExperts]
    adapters: LoRAKernels[PackedAdapter, LoRAPlan]
    attention: AttentionKernels[AttentionPlan]
    pack_quantized: PackQuantized[PackedLinear] | None
    pack_codes: PackCodes[PackedLinear] | None
    pack_screen: PackScreen[PackedLinear] | None
    kept_packing: KeptPacking | None
    graph_plans: StepPlans | None
    record: Record | None
    host_calls: HostCalls | None
    runtime: Runtime
    plan_pairs: PlanPairs[PackedAdapter, LoRAPlan] | None = None
    fuse_gated: FuseGated[PackedLinear] | None = None

    @classmethod
    def of_one_backend(
        cls,
        *,
        name: str,
        numerics: str,
        device: torch.device,
        rowwise: RowwiseKernels,
        linears: LinearKernels[LinearT],
        experts: ExpertKernels[LinearT, ExpertsT],
        adapters: LoRAKernels[AdapterT, LoRAPlanT],
        attention: AttentionKernels[AttentionPlanT],
        runtime: Runtime,
        pack_quantized: PackQuantized[LinearT] | None = None,
        pack_codes: PackCodes[LinearT] | None = None,
        pack_screen: PackScreen[LinearT] | None = None,
        kept_packing: KeptPacking | None = None,
        graph_plans: GraphPlans[AdapterT, LoRAPlanT, AttentionPlanT] | None = None,
        record: Record | None = None,
        host_calls: HostCalls | None = None,
        plan_pairs: PlanPairs[AdapterT, LoRAPlanT] | None = None,
        fuse_gated: FuseGated[LinearT] | None = None,
    ) -> Ops:
        """Groups that take what each other make. From here on only they know its types."""
        return cls(
            name=name,
            numerics=numerics,
            device=device,
            rowwise=rowwise,
            linears=cast(LinearKernels[PackedLinear], linears),
            experts=cast(ExpertKernels[PackedLinear, PackedExperts], experts),
            adapters=cast(LoRAKernels[PackedAdapter, LoRAPlan], adapters),
            attention=cast(AttentionKernels[AttentionPlan], attention),
            pack_quantized=cast(PackQuantized[PackedLinear] | None, pack_quantized),
            pack_codes=cast(PackCodes[PackedLinear] | None, pack_codes),
            pack_screen=cast(PackScreen[PackedLinear] | None, pack_screen),
            kept_packing=kept_packing,
            graph_plans=cast(StepPlans | None, graph_plans),
            record=record,
            host_calls=host_calls,
            runtime=runtime,
            plan_pairs=cast(PlanPairs[PackedAdapter, LoRAPlan] | None, plan_pairs),
            fuse_gated=cast(FuseGated[PackedLinear] | None, fuse_gated),
        )
