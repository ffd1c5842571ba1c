"""A `Model` that runs transformers' modules: their data flow, our kernels where weights are.

Linear layers, experts and attention are ours. What lies between is torch's, by the rules of
`row_operations`. Rows of a step are given as one sequence: no module but attention looks at more
than one of them, which is tried before the model serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lora_serve.errors import ConfigError
from lora_serve.layers.batch import ForwardBatch
from lora_serve.layers.biases import add_biases
from lora_serve.layers.vocabulary import HeadChanges
from lora_serve.models.base import KVSpec
from lora_serve.models.transformers_backend.interfaces import SINKS, Named, attach, scale_of
from lora_serve.models.transformers_backend.row_operations import RowOperations
from lora_serve.models.transformers_backend.tracing import (
    Trace,
    decoder_inputs,
    head_logits,
    weight_of,
)
from lora_serve.ops.contract import ChosenExperts, Ops, PackedExperts, ScreenedArgmax


@dataclass(slots=True)
class RunningStep:
    """The step that modules compute for. batch: None while rows are tried, without attention."""

    operations: RowOperations
    batch: ForwardBatch | None = None
    kv_caches: Sequence[Tensor] = ()
    num_attended: int = 0  # calls of attention so far: the next one's layer

    def begin(self, batch: ForwardBatch | None, kv_caches: Sequence[Tensor]) -> None:
        self.batch, self.kv_caches, self.num_attended = batch, kv_caches, 0


class PackedModule:
    """The forward of a linear layer. index: among those that adapters change; None for others."""

    def __init__(self, ops: Ops, module: Any, index: int | None, step: RunningStep) -> None:
        self._ops = ops
        self._index = index
        self._step = step
        weight = weight_of(module)
        self._shape = weight.shape
        self._packed = ops.linears.pack_linear(weight.contiguous(), module.bias)
        module.weight = _without_values(module.weight)
        module.__dict__["forward"] = self

    def __call__(self, x: Tensor) -> Tensor:
        out_features, in_features = self._shape
        with self._step.operations.looking_away():
            rows = x.reshape(-1, in_features).contiguous()
            y = self._ops.linears.linear(rows, self._packed)
            batch = self._step.batch
            if self._index is not None and batch is not None and batch.lora is not None:
                self._ops.adapters.lora(y, rows, batch.lora, self._index)
                add_biases(y, batch.biases, self._index)
        return y.view(*x.shape[:-1], out_features)


class PackedExpertsModule:
    """The experts of one module, packed."""

    def __init__(self, ops: Ops, module: Any) -> None:
        self.into = self._pack(ops, module, "gate_up_proj" if module.has_gate else "up_proj")
        self.out = self._pack(ops, module, "down_proj")

    @staticmethod
    def _pack(ops: Ops, module: Any, name: str) -> PackedExperts:
        weights: Tensor = getattr(module, name)
        biases = getattr(module, f"{name}_bias") if module.has_bias else [None] * len(weights)
        experts = [
            ops.linears.pack_linear(
                (weight.t() if module.is_transposed else weight).contiguous(), bias
            )
            for weight, bias in zip(weights, biases, strict=True)
        ]
        setattr(module, name, _without_values(weights))
        return ops.experts.pack_experts(experts)


def _without_values(weight: Tensor) -> nn.Parameter:
    """A parameter of the same shape and type: modules may ask for these."""
    return nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)


class PagedHooks:
    """Attention over the paged cache, and our kernels for experts."""

    def __init__(
        self,
        ops: Ops,
        kv_specs: Sequence[KVSpec],
        experts: dict[nn.Module, PackedExpertsModule],
        step: RunningStep,
    ) -> None:
        self._ops = ops
        self._kv_specs = kv_specs
        self._experts = experts
        self._step = step
        self._sinks: dict[int, Tensor] = {}  # by layer

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: object, named: Named
    ) -> Tensor:
        step = self._step
        layer, step.num_attended = step.num_attended, step.num_attended + 1
        with step.operations.looking_away():
            if step.batch is None:
                heads = torch.arange(q.shape[1]) * v.shape[1] // q.shape[1]
                return v[:, heads].transpose(1, 2).contiguous()
            return self._attend(step.batch, layer, q, k, v, scale_of(module, q, named), named)

    def _attend(
        self,
        batch: ForwardBatch,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        named: Named,
    ) -> Tensor:
        spec, cache = self._kv_specs[layer], self._step.kv_caches[layer]
        q_rows, k_rows, v_rows = (_filled_up(x, spec.head_size, cache.dtype) for x in (q, k, v))
        # The modules have turned q and k themselves; here all angles are 0.
        still = torch.zeros(1, spec.head_size)
        still[:, : spec.head_size // 2] = 1.0
        attention = self._ops.attention
        at_zero = torch.zeros_like(batch.positions)
        attention.rotary_and_write_kv(
            q_rows, k_rows, v_rows, still, at_zero, cache, batch.slot_mapping[layer]
        )
        attended = attention.paged_attention(
            q_rows,
            cache,
            batch.attention[layer],
            scale,
            spec.window,
            named.get("softcap"),
            self._sinks_of(layer, named.get(SINKS)),
        )
        return attended[None, :, :, : v.shape[3]].to(q.dtype).contiguous()

    def _sinks_of(self, layer: int, given: Tensor | None) -> Tensor | None:
        """The weights that a module gives, as kernels take them."""
        if given is not None and layer not in self._sinks:
            self._sinks[layer] = given.detach().to(torch.float32).contiguous()
        return self._sinks.get(layer)

    def experts(self, module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        packed, experts = self._experts[module], self._ops.experts
        looking_away = self._step.operations.looking_away
        with looking_away():
            chosen = ChosenExperts(ids.int().contiguous(), weights.float().contiguous())
            hidden = experts.linear(x, packed.into, chosen)
        hidden = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
        with looking_away():
            return experts.combine(experts.linear(hidden, packed.out, chosen), chosen)


def _filled_up(x: Tensor, head_size: int, dtype: torch.dtype) -> Tensor:
    """(1, heads, T, D) -> (T, heads, head_size), with zeros, which add nothing to any product."""
    _, heads, num_rows, size = x.shape
    rows = torch.zeros(num_rows, heads, head_size, dtype=dtype)
    rows[:, :, :size] = x[0].transpose(0, 1)
    return rows


class TransformersModel:
    """A `Model` of a module's decoder and its head."""

    def __init__(self, module: nn.Module, ops: Ops, found: Trace, dtype: torch.dtype) -> None:
        self._step = step = RunningStep(RowOperations())
        adapted = [each.name for each in found.linears if each.is_adapted]
        for linear in found.linears:
            index = adapted.index(linear.name) if linear.is_adapted else None
            PackedModule(ops, module.get_submodule(linear.name), index, step)
        experts = {
            each: PackedExpertsModule(ops, each)
            for each in map(module.get_submodule, found.experts)
        }
        attach(module, PagedHooks(ops, found.kv_specs, experts, step))
        self._decoder = module.get_submodule(found.decoder)
        self._embeds_rows(module)
        self._module = module
        self._found = found
        self._dtype = dtype

    def forward(self, batch: ForwardBatch, kv_caches: Sequence[Tensor]) -> Tensor:
        self._step.begin(batch, kv_caches)
        try:
            hidden = self._run(batch.input_ids, batch.positions)
        finally:
            self._step.begin(None, ())  # it would keep adapters that were dropped
        return hidden if batch.outputs is None else hidden.index_select(0, batch.outputs.rows)

    def logits(self, hidden: Tensor, changes: HeadChanges = ()) -> Tensor:
        assert not changes, "TransformersSpec has no vocabulary that adapters change"
        with self._step.operations:
            logits = head_logits(self._module, self._found, hidden)
        return logits.to(self._dtype).contiguous()

    @property
    def screened_argmax(self) -> ScreenedArgmax | None:
        return None

    @torch.inference_mode()
    def try_rows(self, vocab_size: int, max_positions: int) -> None:
        """See that rows are the same alone and in company, apart from attention.

        Raises:
            ConfigError: they are not, since a module looks at other rows than its own; or positions
                do not count from 0.
        """
        self._step.begin(None, ())
        self._try_positions(vocab_size)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(vocab_size, (5,), generator=generator)
        positions = torch.tensor([0, 3, 7, max_positions - 1, 2]).clamp(max=max_positions - 1)
        together = self._run(tokens, positions)
        logits = self.logits(together)
        for row in range(len(tokens)):
            of_row = slice(row, row + 1)
            alone = self._run(tokens[of_row], positions[of_row])
            same = torch.equal(alone[0], together[row])
            if not same or not torch.equal(self.logits(alone)[0], logits[row]):
                raise ConfigError(
                    f"{type(self._module).__name__} cannot be served: its modules compute a token "
                    "from others of the batch, or without its position"
                )

    def _try_positions(self, vocab_size: int) -> None:
        """See that positions which are left out are 0, 1, 2, …; some models begin at another."""
        tokens = torch.arange(5) % vocab_size
        inputs = decoder_inputs(tokens, torch.arange(5))
        given = self._decoder(**inputs).last_hidden_state
        del inputs["position_ids"]
        if not torch.equal(self._decoder(**inputs).last_hidden_state, given):
            raise ConfigError(
                f"{type(self._module).__name__} cannot be served: its positions do not count from 0"
            )

    def _run(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """(T) -> (T, H)."""
        with self._step.operations:
            output = self._decoder(**decoder_inputs(input_ids, positions))
        hidden: Tensor = output.last_hidden_state[0]
        return hidden.to(self._dtype).contiguous()

    def _embeds_rows(self, module: Any) -> None:
        """Let rows of prompt_embeds take the place of their tokens' embeddings."""
        embedding = module.get_input_embeddings()
        embed = embedding.forward

        def forward(input_ids: Tensor) -> Tensor:
            rows: Tensor = embed(input_ids)
            batch = self._step.batch
            if batch is None or batch.inputs_embeds is None or batch.is_embeds is None:
                return rows
            return torch.where(batch.is_embeds[:, None], batch.inputs_embeds, rows)

        embedding.__dict__["forward"] = forward
