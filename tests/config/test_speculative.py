from __future__ import annotations

import json
import re

import pytest

from lora_serve.config import SpeculativeConfig
from lora_serve.errors import ConfigError


def test_settings_as_json_or_as_a_mapping_are_those_of_the_flags() -> None:
    given = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    by_flags = SpeculativeConfig(
        speculative_method="ngram",
        speculative_num_speculative_tokens=4,
        speculative_prompt_lookup_max=3,
    )
    assert SpeculativeConfig(speculative_config=json.dumps(given)) == by_flags
    assert SpeculativeConfig(speculative_config=given) == by_flags
    assert by_flags.method == "ngram"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"method": "draft_model"}, "method draft_model needs model, the directory, hub id or"),
        ({"method": "eagle3", "model": "x"}, "no method 'eagle3'; have ngram, suffix, draft_model"),
        ({"method": "ngram", "model": "x"}, "model without method draft_model means nothing"),
        ({"quantization": "int8"}, "quantization without method draft_model means nothing"),
        (
            {"method": "ngram", "draft_tensor_parallel_size": 1},
            "unknown setting draft_tensor_parallel",
        ),
        ({"num_speculative_tokens": 3}, "num_speculative_tokens without a method drafts nothing"),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 2}, "must be at least"),
        ({"method": "ngram", "prompt_lookup_max": "3"}, "prompt_lookup_max '3' must be a int"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "tokens 0 must be from 1 to 256"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 1e999}, "inf must be from"),
        ({"method": "suffix", "speculation": "off"}, "unknown setting speculation"),
    ],
)
def test_what_drafts_nothing_here_is_refused(given: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        SpeculativeConfig(speculative_config=given)


def test_a_method_without_json_is_told_how_to_be_written() -> None:
    told = r"""--speculative-config suffix must be a JSON object: '{"method": "suffix"}', or give"""
    with pytest.raises(ConfigError, match=re.escape(told)):
        SpeculativeConfig(speculative_config="suffix")


def test_speculation_can_be_left_to_the_server_or_switched_off() -> None:
    assert SpeculativeConfig().method is None
    assert SpeculativeConfig(speculation="auto").method == "suffix"
    ngram = {"method": "ngram"}
    assert SpeculativeConfig(speculation="auto", speculative_config=ngram).method == "ngram"
    off = SpeculativeConfig(speculation="off", speculative_config=ngram)
    assert (off.method, off.is_enabled, off.max_draft_rows, off.max_drafts) == (None, False, 0, 0)


def test_rows_may_be_set_for_the_tokens_that_grammars_force_alone() -> None:
    few = SpeculativeConfig(speculative_config={"max_step_rows": 4})
    assert (few.is_enabled, few.max_draft_rows, few.max_drafts) == (False, 4, 3)
    suffix = SpeculativeConfig(speculation="auto")
    assert (SpeculativeConfig().max_draft_rows, suffix.max_draft_rows) == (16, 64)


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({}, (2, 5)),
        ({"prompt_lookup_max": 1}, (1, 1)),
        ({"prompt_lookup_max": 4}, (2, 4)),
        ({"prompt_lookup_min": 7}, (7, 7)),
        ({"prompt_lookup_min": 3, "prompt_lookup_max": 3}, (3, 3)),
    ],
)
def test_one_size_of_ngrams_is_enough(given: dict[str, int], sizes: tuple[int, int]) -> None:
    config = SpeculativeConfig(speculative_config={"method": "ngram", **given})
    assert config.ngram_sizes == sizes
