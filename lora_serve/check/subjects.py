"""Whom probes ask and what about: models as requests name them, prompts, versions of adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class AskedModel:
    """Who answers, as requests ask for it: the base model, or an adapter."""

    model: str
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Embeds:
    """A prompt of embeddings. payload: base64, as bodies have it."""

    payload: str


Prompt = str | Embeds


@dataclass(frozen=True, slots=True)
class Version:
    """The bytes of one adapter. directory: None if it is served already; then `speaker` is it."""

    label: str
    directory: Path | None
    speaker: AskedModel | None = None

    @property
    def files(self) -> Path:
        assert self.directory is not None, "probes that load need LOADS"
        return self.directory


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the user chose. adapters: directories. served: what the server serves already.

    model_path: of the base model, for the shapes of adapters to make up.
    """

    tolerance: float = 0.0
    adapters: tuple[Path, ...] = ()
    served: tuple[AskedModel, ...] = ()
    model_path: str = ""
    num_prompt_tokens: int = 400
    num_pressing: int = 24
    nonce: str
