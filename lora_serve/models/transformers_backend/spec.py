"""A model of transformers as its config.json describes it."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lora_serve.config.parallel import Reduce
from lora_serve.distributed.group import ALONE, Group
from lora_serve.errors import ConfigError
from lora_serve.models.base import KVSpec, LinearLayout, Weights
from lora_serve.models.transformers_backend.interfaces import NAME
from lora_serve.models.transformers_backend.model import TransformersModel
from lora_serve.models.transformers_backend.row_operations import sample_bits
from lora_serve.models.transformers_backend.tracing import Trace
from lora_serve.ops.contract import Ops

_NO_FACTS = frozenset(("_name_or_path", "architectures", "dtype", "transformers_version"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersSpec:
    """A `ModelSpec` of a class of transformers.

    found: what a forward of it computes. shapes: of its checkpoint's tensors. prefix: of all names
    but the head's, which checkpoints of the decoder alone leave out. tied: names of tensors that
    are others', and whose. ignored: patterns of names that checkpoints may hold and nothing reads.
    """

    model_class: Any
    config: Any
    found: Trace
    shapes: Mapping[str, tuple[int, ...]]
    prefix: str
    tied: Mapping[str, str]
    ignored: tuple[str, ...]
    max_positions: int
    dtype: str | None

    @property
    def architecture(self) -> str:
        return str(self.model_class.__name__)

    @property
    def vocab_size(self) -> int:
        return self.found.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.found.hidden_size

    def vocabulary(self) -> None:
        """Do what `ModelSpec` says: embeddings and head are modules of transformers."""

    def facts(self) -> str:
        """Do what `ModelSpec` says: the config, and whose code computes on which processor."""
        import transformers

        settings = {k: v for k, v in self.config.to_dict().items() if k not in _NO_FACTS}
        text = json.dumps(settings, sort_keys=True, default=str)
        return (
            f"TransformersSpec({self.architecture}, "
            f"config={hashlib.sha256(text.encode()).hexdigest()}, "
            f"transformers={transformers.__version__}, torch={torch.__version__}, "
            f"threads={torch.get_num_threads()}, bits={sample_bits()})"
        )

    def linears(self) -> Sequence[LinearLayout]:
        adapted = (each for each in self.found.linears if each.is_adapted)
        return tuple(
            LinearLayout(index, ((each.name, each.out_features),), each.in_features, each.has_bias)
            for index, each in enumerate(adapted)
        )

    def expert_linears(self) -> Sequence[LinearLayout]:
        """Do what `ModelSpec` says: adapters change no experts of transformers' modules."""
        return ()

    def kv_specs(self) -> Sequence[KVSpec]:
        return tuple(self.found.kv_specs)

    def tensor_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self.shapes

    def tensor_name(self, stored: str) -> str | None:
        if stored in self.shapes:
            return stored
        for name in (f"{self.prefix}.{stored}", stored.removeprefix(f"{self.prefix}.")):
            if name in self.shapes:
                return name
        if stored in self.tied or any(re.search(each, stored) for each in self.ignored):
            return None
        return stored

    def tied_to(self, stored: str) -> str | None:
        source = self.tied.get(stored)
        return source if source in self.shapes else None

    def rotary_tables(self, context_len: int) -> Sequence[Tensor]:
        """Do what `ModelSpec` says: there are none, since the modules turn q and k themselves."""
        return ()

    def divided(self, num_ranks: int, reduce: Reduce) -> TransformersSpec:
        """Do what `ModelSpec` says: this model cannot be divided, and its sums are whole."""
        if reduce.adds_segments:
            raise ConfigError(
                f"{reduce}: {self.architecture} is run by transformers' modules, whose sums are "
                "whole; leave the flag out"
            )
        if num_ranks > 1:
            raise ConfigError(
                f"--tensor-parallel-size {num_ranks}: {self.architecture} is run by "
                "transformers' modules, which are not divided among ranks; leave the flag out"
            )
        return self

    def build(
        self, weights: Weights, ops: Ops, rotary_tables: Sequence[Tensor], group: Group = ALONE
    ) -> TransformersModel:
        """Do what `ModelSpec` says, but that all weights are alive while they are packed.

        Raises:
            ConfigError: rows or positions are not what they would be alone.
        """
        if ops.device.type != "cpu":
            raise ConfigError(
                f"{self.architecture} is run by transformers' modules, which are served on CPUs "
                "alone; add --device cpu"
            )
        # transformers' threads write to parameters, which may not be tensors of inference mode.
        with torch.inference_mode(False):
            tensors = {name: weights.take(name).clone() for name in self.shapes}
        dtype = next(iter(tensors.values())).dtype
        module = self._load(tensors, dtype)
        tensors.clear()  # so that each weight's memory is given back as it is packed
        model = TransformersModel(module, ops, self.found, dtype)
        model.try_rows(self.vocab_size, self.max_positions)
        return model

    def _load(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> Any:
        """Let transformers put the tensors where its conversions say, and make its buffers."""
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # the server has its own
        with torch.inference_mode(False), torch.no_grad():
            module, info = self.model_class.from_pretrained(
                None,
                config=copy.deepcopy(self.config),
                state_dict=tensors,
                dtype=dtype,
                attn_implementation=NAME,
                experts_implementation=NAME,
                output_loading_info=True,
            )
        wrong = {key: value for key, value in info.items() if value}
        if wrong:
            raise ConfigError(f"{self.architecture}: transformers cannot load it: {wrong}")
        return module.requires_grad_(False)
