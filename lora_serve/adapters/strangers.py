"""What tensors of an adapter may be that fit no module which adapters may change here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lora_serve.adapters.experts import PARAMETERS, LayerExperts, experts_of, is_of_experts
from lora_serve.adapters.findings import listed

Shapes = Mapping[str, tuple[int, int]]


def told_of_strangers(
    strangers: Mapping[str, str], lora_modules: Shapes, all_modules: Shapes
) -> Iterator[str]:
    """A finding about each kind of stranger.

    strangers: the module that each tensor is of, "" if its name tells none. all_modules: with those
        of the vocabulary.
    """
    layers = experts_of(lora_modules)
    of_experts = sorted(filter(is_of_experts, strangers))
    if of_experts:
        yield _not_served_of_experts(of_experts, lora_modules)
    of_dense = sorted(name for name, module in strangers.items() if _is_dense(module, layers))
    if of_dense:
        yield (
            "LoRA on the MLPs of layers that have experts in this model: "
            f"{listed(of_dense)}; it was trained on another model: serve it with that"
        )
    others = sorted({*strangers} - {*of_experts, *of_dense})
    if others:
        kinds = {
            "experts." * is_of_experts(module) + module.rpartition(".")[2] for module in all_modules
        }
        yield (
            "tensors that are no lora_A or lora_B of a projection adapters may change here "
            f"({', '.join(sorted(kinds))} of this model's layers): {listed(others)}"
        )


def _is_dense(module: str, layers: Mapping[str, LayerExperts]) -> bool:
    """Whether it is a projection of an MLP, where this model has experts."""
    parent, _, name = module.rpartition(".")
    experts = layers.get(f"{parent}.experts")
    return experts is not None and name in (*experts.projections, *PARAMETERS)


def _not_served_of_experts(names: list[str], lora_modules: Shapes) -> str:
    layers = experts_of(lora_modules)
    if not layers:
        return (
            f"LoRA on experts, where adapters may change none: {listed(names)}; they may "
            "of models with experts that this server's own families run, on GPUs with "
            "--max-lora-expert-rank"
        )
    experts = next(iter(layers.values()))
    return (
        f"tensors of experts that are no lora_A or lora_B of {', '.join(experts.projections)} of "
        f"experts 0 to {experts.count - 1}: {listed(names)}"
    )
