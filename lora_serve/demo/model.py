"""Where the demo's model and adapters lie, made on first use. Light to import: training is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lora_serve.demo.cache import build_once, cache_root
from lora_serve.demo.recipe import Recipe
from lora_serve.demo.training_process import train_in_process


@dataclass(frozen=True, slots=True)
class DemoPaths:
    """A Qwen2 model directory, and two PEFT adapters that answer with different labels."""

    model: Path
    alpha: Path
    beta: Path


def ensure_demo(progress: Callable[[str], None]) -> DemoPaths:
    """Train model and adapters in a minute or two, or find them where an earlier call left them.

    `progress` gets a line now and then while that takes time.
    """
    recipe = Recipe()
    directory = cache_root() / f"demo-{recipe.name}"

    def build(target: Path) -> None:
        train_in_process(recipe, target, progress)

    build_once(directory, build, progress)
    adapters = directory / "adapters"
    return DemoPaths(directory / "model", adapters / "alpha", adapters / "beta")
