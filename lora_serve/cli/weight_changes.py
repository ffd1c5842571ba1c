"""What an adapter of any of PEFT's methods makes of a model's weights, matrix by matrix.

PEFT itself merges: what is told is what it would compute with. Each matrix is merged in float64 by
itself, so that differences from the base weights keep their digits and memory holds one.
"""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterator
from contextlib import contextmanager

from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import load_peft_weights
from torch import Tensor
from torch.nn import Module

from lora_serve.adapters.peft_config import REFUSED
from lora_serve.cli.peft_model import adapter_config, add_adapter, load_base
from lora_serve.errors import AdapterFormatError
from lora_serve.models.weights import bytes_digest

_PREFIX = "base_model.model."


def method_of(adapter: str) -> str:
    """PEFT's name of the method, and the settings that make it more than that: "LORA, use_dora".

    The config is one that PEFT has read.
    """
    config = adapter_config(adapter)
    return ", ".join([str(config["peft_type"]), *(name for name in REFUSED if config.get(name))])


class AdaptedModel:
    """A base model with an adapter in it. `merged_weights` first, then `other_changes`."""

    def __init__(self, model: str, adapter: str, projections: Container[str]) -> None:
        """Load both.

        projections: names of the linear layers that are told as matrices.

        Raises:
            ConfigError: the model cannot be read.
            AdapterFormatError: the adapter cannot be added to it, or changes no weights.
        """
        self._adapter = adapter
        self._projections = projections
        base = load_base(model)
        self._base_digests = {
            name: bytes_digest(tensor)
            for name, tensor in base.state_dict().items()
            if not self._is_projection(name)
        }
        self._adapted = add_adapter(base, adapter, model)
        self.method = method_of(adapter)
        config = self._adapted.peft_config["default"]
        if config.is_prompt_learning:
            raise AdapterFormatError(
                adapter,
                [f"{self.method} puts virtual tokens before prompts; it changes no weights"],
            )
        self._unread = _unread_tensors(self._adapted, adapter, self._base_digests)

    def merged_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Each projection that has a part of the adapter, and its weight with it, float64.

        Raises:
            AdapterFormatError: this method changes more than weights.
        """
        for name, layer in self._adapted.get_base_model().named_modules():
            if isinstance(layer, BaseTunerLayer) and name in self._projections:
                dtype = _weight(layer).dtype
                assert isinstance(layer, Module), f"{name} is a {type(layer).__name__}"
                layer.double()
                with self._told_as_unmergeable():
                    layer.merge(safe_merge=True)
                    if not _weight(layer).isfinite().all():
                        raise ValueError(f"{name} gets numbers that are not finite")
                yield name, _weight(layer)
                layer.get_base_layer().to(dtype)  # not the adapter's: layers may share some

    def other_changes(self) -> list[str]:
        """Names of all other tensors that the adapter changes or adds."""
        with self._told_as_unmergeable():
            merged = self._adapted.merge_and_unload(safe_merge=True)
        changed = [
            name
            for name, tensor in merged.state_dict().items()
            if not self._is_projection(name)
            and self._base_digests.get(name) != bytes_digest(tensor.contiguous())
        ]
        return changed + self._unread

    def _is_projection(self, tensor_name: str) -> bool:
        module, _, kind = tensor_name.rpartition(".")
        return kind == "weight" and module in self._projections

    @contextmanager
    def _told_as_unmergeable(self) -> Iterator[None]:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "All adapters are already merged")
                yield
        except Exception as error:  # whatever a method has in the place of merging
            told = str(error) or type(error).__name__
            raise AdapterFormatError(
                self._adapter, [f"PEFT cannot merge {self.method} into weights: {told}"]
            ) from error


def _weight(layer: BaseTunerLayer) -> Tensor:
    """The base layer's, as it is by now."""
    weight = layer.get_base_layer().weight
    assert isinstance(weight, Tensor), f"{type(layer).__name__} has no matrix"
    return weight.detach()


def _unread_tensors(adapted: PeftModel, adapter: str, in_base: Container[str]) -> list[str]:
    """Tensors of the adapter's files that PEFT passes over without a word."""
    read = get_peft_model_state_dict(adapted, save_embedding_layers=True)
    return sorted(
        name
        for name in load_peft_weights(adapter, device="cpu")
        if name not in read and name.removeprefix(_PREFIX) not in in_base
    )
