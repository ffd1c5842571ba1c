"""Reads the facts of mixtures of experts in config.json, but for those that a family fixes."""

from __future__ import annotations

from lora_serve.models.mixture import Mixture
from lora_serve.models.settings import Settings

_CHOSEN = "num_experts_per_tok"


def read_mixture(
    settings: Settings,
    layers: tuple[int, ...],
    *,
    num_experts: int,
    num_chosen: int,
    intermediate_size: int,
    among_chosen: bool | None = None,
) -> Mixture:
    """The facts of a model's mixtures; faults are among the findings of `settings`.

    Args:
        settings: the config.
        layers: those that have a mixture.
        num_experts: where the config is silent; so is num_chosen.
        num_chosen: experts that each row takes.
        intermediate_size: of one expert.
        among_chosen: as Mixture has it; None: as `norm_topk_prob` says.
    """
    key = next((key for key in ("num_local_experts", "num_experts") if key in settings), None)
    count = num_experts if key is None else settings.integer(key)
    chosen = settings.integer(_CHOSEN, num_chosen)
    if chosen > count:
        settings.refuse(f"{_CHOSEN} {chosen} is more than there are experts, {count}")
    if among_chosen is None:
        among_chosen = settings.flag("norm_topk_prob", False)
    return Mixture(
        num_experts=count,
        num_chosen=chosen,
        among_chosen=among_chosen,
        intermediate_size=intermediate_size,
        layers=layers,
    )


def sparse_layers(settings: Settings) -> tuple[int, ...]:
    """Layers that have a mixture, where `decoder_sparse_step` and `mlp_only_layers` say which."""
    num_layers = settings.integer("num_hidden_layers")
    step = settings.integer("decoder_sparse_step", 1)
    stated = settings.get("mlp_only_layers")
    dense = [] if stated is None else stated
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        settings.refuse(f"mlp_only_layers must be a list of layers, is {str(stated)[:80]}")
        dense = []
    return tuple(i for i in range(num_layers) if (i + 1) % step == 0 and i not in dense)
