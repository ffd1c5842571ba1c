"""The drafters by their methods' names, as --speculative-config has them. A new one comes here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lora_serve.config import SpeculativeConfig
from lora_serve.speculation.base import Drafter
from lora_serve.speculation.ngram import NgramDrafter
from lora_serve.speculation.suffix import SuffixDrafter


def _ngram(config: SpeculativeConfig) -> Drafter:
    return NgramDrafter(*config.ngram_sizes)


def _suffix(config: SpeculativeConfig) -> Drafter:
    return SuffixDrafter(
        config.speculative_suffix_decoding_max_cached_tokens,
        config.speculative_suffix_decoding_max_tree_depth,
        config.speculative_suffix_decoding_max_spec_factor,
    )


DRAFTERS: Mapping[str, Callable[[SpeculativeConfig], Drafter]] = {
    "ngram": _ngram,
    "suffix": _suffix,
}


def make_drafter(config: SpeculativeConfig) -> Drafter | None:
    """The drafter that the config names; None where nothing is to be drafted."""
    method = config.method
    return None if method is None else DRAFTERS[method](config)
