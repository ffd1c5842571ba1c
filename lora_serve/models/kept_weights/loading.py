"""Builds a model of what was kept at an earlier start, or reads it and keeps it for the next."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from lora_serve.config import ModelConfig
from lora_serve.distributed.group import ROOT, Group
from lora_serve.models.base import Model, ModelSpec, num_parameters
from lora_serve.models.kept_weights.cache import FLAG, WeightsCache, key_of, open_cache
from lora_serve.models.kept_weights.reader import KeptReader, NotingReader
from lora_serve.models.weights import TensorSource, WeightReader
from lora_serve.observability.progress import Progress
from lora_serve.ops.contract import Ops
from lora_serve.ops.kept_packing import KeptPacking, NotAsKeptError

logger = logging.getLogger(__name__)

Build = Callable[[WeightReader], Model]


@dataclass(frozen=True, slots=True)
class Loading:
    """One load of a model. dtype: of its weights. build: makes it of them."""

    spec: ModelSpec
    source: TensorSource
    dtype: torch.dtype
    ops: Ops
    build: Build

    def load(self, config: ModelConfig, group: Group) -> tuple[Model, WeightReader]:
        """The model, and what gave its weights."""
        model, reader = self._loaded(config, group)
        if reader.broken and group.rank == ROOT:
            more = f" and {len(reader.broken) - 1} more tensors" * (len(reader.broken) > 1)
            logger.warning(
                "the checkpoint has infinite or NaN values in %s%s: answers that they reach are "
                "noise; download it again, or export it anew",
                *(reader.broken[0], more),
            )
        return model, reader

    def _loaded(self, config: ModelConfig, group: Group) -> tuple[Model, WeightReader]:
        packing = self.ops.kept_packing
        if config.weights_cache_path is None:
            return self._read()
        reason = _keeps_nothing(packing, group.world_size)
        if packing is None or reason:
            if group.rank == ROOT:
                where = config.weights_cache_path
                logger.warning("%s %s keeps nothing: %s", FLAG, where, reason)
            return self._read()
        files = self.source.files()
        key = None if files is None else key_of(files, self._facts(config))
        if key is None:
            logger.info("%s: these weights are not kept; they are made up, or just changed", FLAG)
            return self._read()
        cache = WeightsCache(
            open_cache(Path(config.weights_cache_path)), config.weights_cache_bytes
        )
        return self._of_kept(cache, key, packing) or self._kept(cache, key, packing)

    def _facts(self, config: ModelConfig) -> list[str]:
        """What shapes packed weights besides the checkpoint's files and the software."""
        ops = self.ops
        return [
            f"{self.spec.architecture} {self.spec.facts()}",
            f"{config.load_format} {config.model_impl} {self.dtype}",
            f"{ops.numerics} codes={ops.pack_codes is not None}",
            f"screen={config.lm_head_screen} {ops.pack_screen is not None}",
        ]

    def _read(self) -> tuple[Model, WeightReader]:
        with self._progress() as progress:
            reader = WeightReader(
                self.source,
                self.dtype,
                self.ops.device,
                progress.note,
                keeps_codes=self.ops.pack_codes is not None,
            )
            return self._build_all(reader), reader

    def _kept(
        self, cache: WeightsCache, key: str, packing: KeptPacking
    ) -> tuple[Model, WeightReader]:
        packs = packing.note()
        try:
            with self._progress() as progress:
                reader = NotingReader(
                    self.source,
                    self.dtype,
                    progress.note,
                    keeps_codes=self.ops.pack_codes is not None,
                )
                model = self._build_all(reader)
        finally:
            packing.stop()
        if not reader.broken:  # or the next start would not look at them
            cache.keep_later(key, reader, packs)
        return model, reader

    def _of_kept(
        self, cache: WeightsCache, key: str, packing: KeptPacking
    ) -> tuple[Model, WeightReader] | None:
        """What was kept of this model; None if nothing was."""
        num_bytes = cache.size_of(key)
        if not num_bytes:
            return None
        try:
            with Progress("packed weights checked and mapped", num_bytes) as progress:
                kept = cache.find(key, progress.note)
                packing.use(kept.packs)
                reader = KeptReader(self.source, self.dtype, kept.taken, kept.tables)
                return self.build(reader), reader
        except NotAsKeptError as error:
            cache.forget(key, str(error))
            return None
        finally:
            packing.stop()

    def _build_all(self, reader: WeightReader) -> Model:
        self.source.will_read(self.spec.tensor_shapes())
        return self.build(reader)

    def _progress(self) -> Progress:
        return Progress("weights read and packed", num_parameters(self.spec) * self.dtype.itemsize)


def _keeps_nothing(packing: KeptPacking | None, num_ranks: int) -> str:
    """Why weights are not kept, and what to do; empty where they are."""
    if num_ranks > 1:
        return (
            f"each of {num_ranks} ranks packs its own share, and only whole weights are kept; "
            "leave it out, or --tensor-parallel-size"
        )
    return "" if packing is not None else "only kernels of CPUs keep their weights; leave it out"
