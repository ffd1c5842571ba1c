"""A model that a user gives to the demo: adapters are made up for it, and its answers are asked.

What a version must answer is what a server without a prefix cache says first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lora_serve.config.model import SMOLLM2
from lora_serve.demo.client import Client, ServerRefusedError
from lora_serve.demo.questions import Continuations, begun_text
from lora_serve.demo.random_adapters import RANK, Projections, write_random_adapter
from lora_serve.demo.scenarios import MODEL_NAME, SCENARIOS, Ask, Version
from lora_serve.demo.smollm2 import DTYPE, ensure_smollm2
from lora_serve.errors import ConfigError

QUESTION = "What is the capital of France?"
GAINS = (0.5, 2.0, 8.0, 32.0)
_ATTENTION = ".self_attn."
_NAMES = {Version.A: "adapter-a", Version.B: "adapter-b", Version.BASE: MODEL_NAME}


@dataclass(frozen=True, slots=True)
class GivenModel:
    """model: as `lora-serve serve` takes it, with `flags`. projections: what adapters change."""

    model: str
    projections: Projections
    flags: tuple[str, ...] = ()


def given_model(model: str, progress: Callable[[str], None]) -> GivenModel:
    """The model of this name; its weights are not read, those of smollm2 are fetched.

    Raises:
        ConfigError: it is not there, or cannot be served.
    """
    from lora_serve.models.source import load_spec, model_path  # torch

    name, flags = model, tuple[str, ...]()
    if model == SMOLLM2:
        name, flags = str(ensure_smollm2(progress)), ("--dtype", DTYPE)
    spec = load_spec(model_path(name, None, with_weights=False))
    projections = {
        projection: (layout.in_features, size)
        for layout in spec.linears()
        for projection, size in layout.projections
        if _ATTENTION in projection
    }
    return GivenModel(name, projections, flags)


def first_answer(client: Client) -> str:
    """What the model says to a question; or of a text, where it has no chat template."""
    try:
        return f"{QUESTION} {client.chat(MODEL_NAME, QUESTION)}"
    except ServerRefusedError:
        begun = "The capital of France is"
        return begun + client.complete(MODEL_NAME, begun).text


def distinct_adapters(
    client: Client, given: GivenModel, workspace: Path
) -> tuple[Path, Path, Continuations, float]:
    """Two adapters with which the model answers otherwise, all its answers, and their gain.

    Args:
        client: of a server without a prefix cache; no adapter of theirs stays loaded.
        given: the model that it serves.
        workspace: where the adapters are written.

    Raises:
        ConfigError: whatever the gain, two answers are equal.
    """
    first_lines = {
        (s.version, s.first_line) for e in SCENARIOS for s in e.steps if isinstance(s, Ask)
    }
    for gain in GAINS:
        places = {
            v: workspace / f"version-{v.name.lower()}-{gain:g}" for v in (Version.A, Version.B)
        }
        for seed, place in enumerate(places.values()):
            write_random_adapter(place, given.projections, given.model, seed, gain)
        answers = _answers(client, places, sorted(first_lines, key=str))
        if len({answers[version, ""] for version in Version}) == len(Version):
            return places[Version.A], places[Version.B], Continuations(answers), gain
    raise ConfigError(
        f"{given.model}: adapters of rank {RANK} with random numbers do not change its answers, so "
        "the demo can show nothing on it; try it with your own: lora-serve check --adapter"
    )


def _answers(
    client: Client, places: dict[Version, Path], asked: list[tuple[Version, str]]
) -> dict[tuple[Version, str], str]:
    for version, place in places.items():
        client.load_adapter(_NAMES[version], place)
    answers = {
        (version, line): client.complete(_NAMES[version], begun_text(line)).text
        for version, line in asked
    }
    for version in places:
        client.unload_adapter(_NAMES[version])
    return answers
