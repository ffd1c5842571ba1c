"""The doors that transformers has for attention, masks and experts, and what goes through them.

Its interfaces are tables of functions by name, one for all models of a process. Ours, registered
once, hand each call to the `Hooks` of the model that the calling module belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

NAME = "lora_serve"
SINKS = "s_aux"  # what attention calls them


class Hooks(Protocol):
    """What is done in the place of a model's attention and of its experts."""

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: object, named: Named
    ) -> Tensor:
        """Attend from q (1, Hq, T, D) to k (1, Hkv, T, D) and v (1, Hkv, T, Dv), as one call.

        named: what else the module gives, as its scaling.

        Returns:
            (1, T, Hq, Dv).
        """

    def experts(self, module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Sum the chosen experts of each row x (T, H), times their weights: (T, H).

        ids, weights: (T, K).
        """


Named = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys a query sees: what transformers would make a tensor of.

    sees: of batch, head, query and key, as tensors of positions. local_size: of a window or chunk.
    """

    sees: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    local_size: int | None

    def window(self) -> int | None:
        """The window, as KVSpec has it.

        Raises:
            ValueError: it is neither causal nor a causal window, or depends on more than positions.
        """
        size = self.local_size
        edge = size if size is not None else 8
        queries = torch.tensor(sorted({0, 1, edge - 1, edge, edge + 1, 3 * edge}))[:, None]
        keys = torch.arange(3 * edge + 2)[None, :]
        zero = torch.tensor(0)
        expected = keys <= queries
        if size is not None:
            expected &= keys > queries - size
        try:
            seen = self.sees(zero, zero, queries, keys).expand_as(expected)
        except RuntimeError as error:  # it looks at tensors, which are on the meta device
            raise ValueError("a mask that depends on more than positions") from error
        if not torch.equal(seen, expected):
            raise ValueError("a mask that is neither causal nor a causal window")
        return size


def register() -> None:
    """Make transformers know these functions by NAME."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ExpertsInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _mask)
    ExpertsInterface.register(NAME, _experts)


def attach(model: nn.Module, hooks: Hooks) -> None:
    """Let calls of the model's modules go to `hooks`."""
    for module in model.modules():
        module.__dict__[NAME] = hooks


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    **named: Any,
) -> tuple[Tensor, None]:
    hooks: Hooks = module.__dict__[NAME]
    return hooks.attend(module, query, key, value, attention_mask, named), None


def _experts(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    hooks: Hooks = module.__dict__[NAME]
    return hooks.experts(module, hidden_states, top_k_index, top_k_weights)


def _mask(*, mask_function: Callable[..., Tensor], local_size: int | None = None, **_: Any) -> Mask:
    return Mask(mask_function, local_size)


def scale_of(module: nn.Module, q: Tensor, named: Named) -> float:
    """What products q k are multiplied by: said in the call, or by the module, or the usual."""
    scale = named.get("scaling")
    if scale is None:
        scale = getattr(module, "scaling", None)
    return float(q.shape[-1] ** -0.5 if scale is None else scale)
