"""All kernels that serve, as one value that layers and the worker are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

from lora_serve.ops.contract.attention import AttentionKernels
from lora_serve.ops.contract.experts import ExpertKernels
from lora_serve.ops.contract.linear import FuseGated, LinearKernels, PackCodes, PackQuantized
from lora_serve.ops.contract.lora import LoRAKernels, PlanPairs
from lora_serve.ops.contract.packed import (
    AdapterT,
    AttentionPlan,
    AttentionPlanT,
    ExpertsT,
    LinearT,
    LoRAPlan,
    LoRAPlanT,
    PackedAdapter,
    PackedExperts,
    PackedLinear,
)
from lora_serve.ops.contract.rowwise import RowwiseKernels
from lora_serve.ops.contract.screening import PackScreen
from lora_serve.ops.kept_packing import KeptPacking
from lora_serve.ops.recorded_steps import GraphPlans, HostCalls, Record

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
