"""Adapters on disk for the demo's model: one for each name, and other bytes to replace them by."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from benchmarks.common.make_checkpoint import AdapterShape, ModelShape, ensure_adapters
from benchmarks.soak.versions import overwrite
from lora_serve.adapters.checkpoint import read_adapter
from lora_serve.demo.recipe import Recipe

ADAPTER = AdapterShape(8, ("q_proj", "k_proj", "v_proj", "o_proj"))


@dataclass(slots=True)
class Member:
    """One name, and where its adapter lies. digest: of the bytes that lie there now.

    live: digests that may answer under the name; two while a load is on its way.
    """

    name: str
    path: Path
    digest: str = ""
    live: set[str] = field(default_factory=set)

    is_gone: bool = False

    @property
    def is_changing(self) -> bool:
        return len(self.live) > 1

    def note_loaded(self) -> None:
        """The load of what lies there has succeeded."""
        self.live = {self.digest}


class Fleet:
    """`num_versions` sets of bytes take turns, each at another name than before."""

    def __init__(self, directory: Path, num_members: int, num_versions: int) -> None:
        self._directory = directory
        self._shape = demo_shape(Recipe())
        kept = directory / "versions"
        self._versions = list(ensure_adapters(kept, num_versions, ADAPTER, self._shape).values())
        self._digests = {path: self._digest(path) for path in self._versions}
        self._next = itertools.cycle(self._versions)
        self._numbers = itertools.count()
        self.members = [self.new_member() for _ in range(num_members)]

    def new_member(self) -> Member:
        """Another name, with an adapter of its own."""
        name = f"adapter-{next(self._numbers)}"
        member = Member(name, self._directory / name)
        self.renew(member)
        return member

    def renew(self, member: Member) -> None:
        """Write other bytes where its adapter lies, as a training loop does."""
        version = next(self._next)
        member.live.add(self._digests[version])  # before the files: then they may be read
        overwrite(member.path, version)
        member.digest = self._digests[version]

    def remove(self, member: Member) -> None:
        """Its name is unloaded; its files are not needed any more."""
        shutil.rmtree(member.path)

    def _digest(self, path: Path) -> str:
        modules = {
            f"model.layers.{layer}.{name}": size
            for layer in range(self._shape.num_hidden_layers)
            for name, size in self._shape.projections.items()
        }
        checkpoint = read_adapter(str(path), lora_modules=modules, max_lora_rank=ADAPTER.rank)
        return checkpoint.digest.hex()


def demo_shape(recipe: Recipe) -> ModelShape:
    return ModelShape(
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=recipe.hidden_size // recipe.num_heads,
        vocab_size=recipe.vocab_size,
        max_position_embeddings=recipe.max_model_len,
    )


def draws(members: list[Member], seed: str) -> Iterator[Member]:
    """Names by Zipf's law, without end: the k-th is asked for in proportion to 1/k."""
    rng, weights = (
        Random(seed),
        list(itertools.accumulate(1 / (k + 1) for k in range(len(members)))),
    )
    while True:
        yield rng.choices(members, cum_weights=weights)[0]
