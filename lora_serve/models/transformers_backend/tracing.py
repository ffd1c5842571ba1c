"""What a model of transformers computes, found by one forward without weights or values."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lora_serve.models.base import KVSpec
from lora_serve.models.transformers_backend.interfaces import SINKS, Mask, Named, attach
from lora_serve.models.transformers_backend.row_operations import NotedOperations

NUM_ROWS = 7  # no other size of a model is likely to be this
_HEAD_MULTIPLE = 16  # kernels take heads of such sizes; smaller ones are filled up with zeros

# What attention is told that changes nothing of what it computes, or that is looked at elsewhere.
_KNOWN_NAMED = frozenset(
    (
        *("cache_position", "dropout", "is_causal", "output_attentions", "output_hidden_states"),
        *("position_embeddings", "position_ids", "return_dict", "scaling", "sliding_window"),
        *("softcap", "use_cache", "output_router_logits", "logits_to_keep", SINKS),
    )
)


@dataclass(frozen=True, slots=True)
class TracedLinear:
    """A linear layer. is_adapted: it takes the rows as they are, so that adapters can change it."""

    name: str
    out_features: int
    in_features: int
    has_bias: bool
    is_adapted: bool


@dataclass(slots=True)
class Trace:
    """kv_specs, experts: in the order of the calls.

    decoder: the name of what a model has below its LM head. output: the class of its result.

    findings: why the model cannot be served; empty if it can.
    """

    linears: list[TracedLinear] = field(default_factory=list)
    kv_specs: list[KVSpec] = field(default_factory=list)
    experts: list[str] = field(default_factory=list)
    decoder: str = ""
    output: type | None = None
    hidden_size: int = 0
    vocab_size: int = 0
    findings: list[str] = field(default_factory=list)

    def refuse(self, finding: str) -> None:
        if finding not in self.findings:
            self.findings.append(finding)


class _CalledError(Exception):
    """A part of the model is about to run."""


def _decoder_name(model: nn.Module, inputs: dict[str, Any]) -> str:
    """The name of the first part that a model calls which is a model itself."""
    from transformers import PreTrainedModel

    def stop(name: str, *_: object) -> None:
        raise _CalledError(name)

    parts = [(name, part) for name, part in model.named_modules() if part is not model]
    handles = [
        part.register_forward_pre_hook(partial(stop, name))
        for name, part in parts
        if isinstance(part, PreTrainedModel)
    ]
    try:
        model(**inputs)
    except _CalledError as error:
        return str(error)
    finally:
        for handle in handles:
            handle.remove()
    raise ValueError(f"{type(model).__name__} has no decoder of its own")


def head_logits(model: nn.Module, found: Trace, hidden: Tensor) -> Tensor:
    """Compute the logits (N, V) of a decoder's hidden states (N, H).

    They are what the model makes of `hidden` in the place of its decoder's result: all that it does
    behind its decoder, whatever that is.
    """
    output = found.output
    assert output is not None, "a model that was traced has a result"
    decoder = model.get_submodule(found.decoder)
    decoder.__dict__["forward"] = lambda *_, **__: output(last_hidden_state=hidden[None])
    try:
        tokens = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        logits: Tensor = model(input_ids=tokens, use_cache=False, return_dict=True).logits
    finally:
        del decoder.__dict__["forward"]
    return logits[0]


def decoder_inputs(input_ids: Tensor, positions: Tensor) -> dict[str, Any]:
    """The arguments of a decoder for rows (T), which need not be one sequence's.

    The mask of ones keeps transformers from looking for sequences in the positions.
    """
    return {
        "input_ids": input_ids[None],
        "position_ids": positions[None],
        "attention_mask": torch.ones_like(input_ids[None]),
        "use_cache": False,
        "return_dict": True,
    }


def trace(model: nn.Module) -> Trace:
    """Run a model on torch's meta device, from tokens to logits.

    model: with the attention, masks and experts of `interfaces`.
    """
    found = Trace()
    operations = NotedOperations(NUM_ROWS)
    hooks = _NotingHooks(model, found)
    attach(model, hooks)
    watch = _LinearWatch(model, found)
    rows = torch.zeros(NUM_ROWS, dtype=torch.int64, device="meta")
    try:
        with torch.inference_mode(), operations:
            inputs = decoder_inputs(rows, rows)
            found.decoder = _decoder_name(model, inputs)
            output = model.get_submodule(found.decoder)(**inputs)
            hidden: Tensor = output.last_hidden_state
            found.output, found.hidden_size = type(output), hidden.shape[-1]
            watch.in_head = True
            found.vocab_size = head_logits(model, found, hidden[0]).shape[-1]
    except Exception as error:  # whatever a module raises says that it cannot be run like this
        found.refuse(f"its forward fails here ({type(error).__name__}: {str(error)[:160]})")
    finally:
        watch.close()
    found.kv_specs = hooks.kv_specs()
    if operations.unknown:
        names = ", ".join(operations.unknown)
        found.refuse(f"it computes what is not known to keep tokens apart ({names})")
    if not found.kv_specs:
        found.refuse("it has no attention that goes through transformers' AttentionInterface")
    return found


def is_linear(module: nn.Module) -> bool:
    """Whether it is a linear layer and computes no more than that."""
    from transformers.pytorch_utils import Conv1D

    return type(module).forward in (nn.Linear.forward, Conv1D.forward)


def weight_of(module: nn.Module) -> Tensor:
    """The weight (out, in) of a module that `is_linear`."""
    weight = module.weight
    assert isinstance(weight, Tensor), f"{type(module).__name__} has no weight"
    return weight if isinstance(module, nn.Linear) else weight.t()  # GPT-2's are (in, out)


class _LinearWatch:
    """Notes the linear layers that get rows of the model's own dtype."""

    def __init__(self, model: nn.Module, found: Trace) -> None:
        self.in_head = False
        self._found = found
        self._handles = [
            module.register_forward_pre_hook(partial(self._note, name))
            for name, module in model.named_modules()
            if is_linear(module)
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _note(self, name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        out_features, in_features = weight_of(module).shape
        x = args[0]
        if x.dtype != module.weight.dtype or any(name == each.name for each in self._found.linears):
            return
        is_adapted = not self.in_head and x.numel() == NUM_ROWS * in_features
        has_bias = module.bias is not None
        self._found.linears.append(
            TracedLinear(name, out_features, in_features, has_bias, is_adapted)
        )


class _NotingHooks:
    """Notes what attention and experts are asked for, and refuses what they do not do."""

    def __init__(self, model: nn.Module, found: Trace) -> None:
        self._found = found
        self._names = {module: name for name, module in model.named_modules()}
        self._calls: list[tuple[int, int, object]] = []  # KV heads, their size, mask

    def kv_specs(self) -> list[KVSpec]:
        return [KVSpec(heads, size, self._window(mask)) for heads, size, mask in self._calls]

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: object, named: Named
    ) -> Tensor:
        for key, value in named.items():
            if key not in _KNOWN_NAMED and value is not None and value is not False:
                self._found.refuse(f"its attention takes {key}")
        if not getattr(module, "is_causal", True) or named.get("is_causal") is False:
            self._found.refuse("its attention is not causal")
        sinks = named.get(SINKS)
        if sinks is not None and sinks.shape != (q.shape[1],):
            self._found.refuse("its attention has other sinks than one for each head")
        if {q.shape[2], k.shape[2], v.shape[2]} != {NUM_ROWS}:
            self._found.refuse("it attends to other tokens than those of its input")
        head_size = max(q.shape[3], v.shape[3])
        head_size += -head_size % _HEAD_MULTIPLE
        self._calls.append((k.shape[1], head_size, mask))
        return q.new_empty(1, NUM_ROWS, q.shape[1], v.shape[3])

    def _window(self, mask: object) -> int | None:
        if not isinstance(mask, Mask):
            self._found.refuse(f"its attention has a mask of its own ({type(mask).__name__})")
            return None
        try:
            return mask.window()
        except ValueError as error:
            self._found.refuse(f"its attention has {error}")
            return None

    def experts(self, module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        name = self._names[module]
        if getattr(module, "has_post_expert_norm", False):
            self._found.refuse("its experts have norms of their own")
        if x.ndim != 2 or x.shape[0] != NUM_ROWS or ids.shape[0] != NUM_ROWS:
            self._found.refuse("its experts do not take the rows of its input")
        if name not in self._found.experts:
            self._found.experts.append(name)
        into = module.gate_up_proj if module.has_gate else module.up_proj
        hidden = x.new_empty(ids.numel(), into.shape[2 if module.is_transposed else 1])
        _ = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
        return torch.empty_like(x)
