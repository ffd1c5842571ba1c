"""The drafters by their methods' names, as --speculative-config has them. A new one comes here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lora_serve.config import SpeculativeConfig
from lora_serve.config.speculative import DRAFT_MODEL
from lora_serve.model_info import DraftModelInfo
from lora_serve.speculation.base import Drafter
from lora_serve.speculation.draft_model import DraftModelDrafter
from lora_serve.speculation.ngram import NgramDrafter
from lora_serve.speculation.suffix import SuffixDrafter

MakeDrafter = Callable[[SpeculativeConfig, DraftModelInfo | None], Drafter]


def _ngram(config: SpeculativeConfig, model: DraftModelInfo | None) -> Drafter:
    return NgramDrafter(*config.ngram_sizes)


def _suffix(config: SpeculativeConfig, model: DraftModelInfo | None) -> Drafter:
    return SuffixDrafter(
        config.speculative_suffix_decoding_max_cached_tokens,
        config.speculative_suffix_decoding_max_tree_depth,
        config.speculative_suffix_decoding_max_spec_factor,
    )


def _draft_model(config: SpeculativeConfig, model: DraftModelInfo | None) -> Drafter:
    assert model is not None, "no draft model was loaded"
    return DraftModelDrafter(model)


DRAFTERS: Mapping[str, MakeDrafter] = {
    "ngram": _ngram,
    "suffix": _suffix,
    DRAFT_MODEL: _draft_model,
}


def make_drafter(config: SpeculativeConfig, model: DraftModelInfo | None = None) -> Drafter | None:
    """The drafter that the config names; None where nothing is to be drafted.

    model: the draft model that was loaded, if any.
    """
    method = config.method
    return None if method is None else DRAFTERS[method](config, model)
