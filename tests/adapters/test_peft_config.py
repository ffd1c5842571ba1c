from __future__ import annotations

import dataclasses
import math

import pytest
from peft import LoraConfig, PeftType, PromptLearningConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

from lora_serve.adapters.peft_config import (
    HARMLESS,
    HONOURED,
    REFUSED,
    LoRASettings,
    parse_settings,
)


def findings_of(**settings: object) -> list[str]:
    findings: list[str] = []
    parse_settings({"peft_type": "LORA"} | settings, findings)
    return findings


def settings_of(**settings: object) -> LoRASettings:
    findings: list[str] = []
    parsed = parse_settings({"peft_type": "LORA"} | settings, findings)
    assert not findings
    return parsed


def test_every_setting_of_the_installed_peft_is_sorted() -> None:
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    assert fields - HONOURED - HARMLESS - set(REFUSED) == set()


def test_no_setting_is_sorted_twice() -> None:
    assert len(HONOURED | HARMLESS | set(REFUSED)) == len(HONOURED) + len(HARMLESS) + len(REFUSED)


def test_whatever_peft_writes_by_default_is_served() -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"]).to_dict()
    assert findings_of(**config | {"target_modules": list(config["target_modules"])}) == []


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refused_setting_is_named_with_advice_when_it_is_set(name: str) -> None:
    (finding,) = findings_of(**{name: ["x"]})
    assert finding == f"{name!r} is set to ['x']: {REFUSED[name]}"
    assert findings_of(**{name: None}) == []


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_a_harmless_setting_is_ignored(name: str) -> None:
    assert findings_of(**{name: {"any": "thing"}}) == []


def test_an_unknown_setting_is_refused_only_when_it_is_set() -> None:
    assert findings_of(use_next_years_lora=False, next_years_groups=0) == []
    (finding,) = findings_of(use_next_years_lora=True)
    assert "'use_next_years_lora' is set to True" in finding
    assert "update lora-serve or retrain" in finding


@pytest.mark.parametrize("peft_type", ["IA3", "lora", None, 1, ["LORA"]])
def test_only_lora_is_served(peft_type: object) -> None:
    (finding,) = findings_of(peft_type=peft_type)
    told = f"peft_type is {peft_type!r}; only 'LORA' is served; `lora-serve convert` writes it as"
    assert finding == f"{told} plain LoRA"


def test_methods_that_change_no_weights_are_not_sent_to_convert() -> None:
    of_prompts = [
        kind.value
        for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()
        if issubclass(config, PromptLearningConfig) or kind is PeftType.ADAPTION_PROMPT
    ]
    assert len(of_prompts) > 5
    for kind in of_prompts:
        (finding,) = findings_of(peft_type=kind, num_virtual_tokens=4, token_dim=64)
        assert finding.startswith(f"peft_type is {kind!r}: it puts trained rows before the prompt")
        assert "convert" not in finding


def test_of_another_method_only_its_name_is_told() -> None:
    assert (
        len(findings_of(peft_type="LOHA", r=3, module_dropout=0.5, use_effective_conv2d=True)) == 1
    )


@pytest.mark.parametrize("tokens", [[], [1.0], [-1], [True], ["a"], "ab", 3, [1] * 129])
def test_invocation_tokens_must_be_ids(tokens: object) -> None:
    (finding,) = findings_of(alora_invocation_tokens=tokens)
    assert "must be a list of 1 to 128 ids" in finding


@pytest.mark.parametrize("bias", ["boft_only", None, False])
def test_an_unknown_bias_is_refused(bias: object) -> None:
    assert f"bias is {bias!r}; it must be one of none, all" in findings_of(bias=bias)[0]


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "Gaussian", "eva", "orthogonal"])
def test_a_plain_beginning_is_served(init: object) -> None:
    assert findings_of(init_lora_weights=init) == []


@pytest.mark.parametrize(
    "init", ["pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "next", 1, ["eva"]]
)
def test_a_beginning_that_changes_the_base_is_refused(init: object) -> None:
    (finding,) = findings_of(init_lora_weights=init)
    assert f"init_lora_weights is {init!r}" in finding


@pytest.mark.parametrize("rank", [0, -1, 4.0, "4", True, None, 2**31, 2**60, [4]])
def test_a_rank_that_none_can_be_is_told_with_its_limits(rank: object) -> None:
    limits = "a whole number from 1 to 2,147,483,647"
    assert findings_of(r=rank) == [f"r is {rank!r}; it must be {limits}"]
    (finding,) = findings_of(rank_pattern={"q_proj": rank})
    assert finding == f"rank_pattern: 'q_proj' must each be {limits}"


@pytest.mark.parametrize("alpha", ["8", None, True, math.inf, math.nan, 10**400, -1e39])
def test_alpha_is_a_number_that_float32_holds(alpha: object) -> None:
    assert "must be a finite number" in findings_of(lora_alpha=alpha)[0]
    assert "must each be a finite number" in findings_of(alpha_pattern={"q_proj": alpha})[0]


@pytest.mark.parametrize("alpha", [16, 0.5, 0, -2.0])
def test_alpha_may_be_any_finite_number(alpha: float) -> None:
    assert settings_of(r=4, lora_alpha=alpha).scale_of("q_proj", 4) == alpha / 4


@pytest.mark.parametrize("value", ["false", 0, 1, None])
def test_a_switch_is_true_or_false(value: object) -> None:
    assert findings_of(use_rslora=value) == [f"use_rslora is {value!r}; it must be true or false"]


@pytest.mark.parametrize("patterns", [[], "q_proj", 4])
def test_patterns_are_an_object(patterns: object) -> None:
    assert findings_of(rank_pattern=patterns) == [
        f"rank_pattern is {patterns!r}; it must be an object"
    ]


def test_missing_patterns_may_be_written_as_null() -> None:
    assert settings_of(rank_pattern=None, alpha_pattern=None) == LoRASettings()


def test_a_pattern_that_is_none_is_named_with_its_setting() -> None:
    (finding,) = findings_of(rank_pattern={"(a+)+": 4})
    assert finding == "rank_pattern: '(a+)+' is not a pattern of module names"


def test_rslora_divides_by_the_root_of_the_modules_own_rank() -> None:
    settings = settings_of(r=4, lora_alpha=8, use_rslora=True, rank_pattern={"q_proj": 9})
    assert settings.scale_of("q_proj", settings.rank_of("q_proj")) == 8 / 3
    assert settings.scale_of("k_proj", settings.rank_of("k_proj")) == 4.0


@pytest.mark.parametrize("name", [None, 7, ["x"]])
def test_a_base_models_name_that_is_no_text_is_left_out(name: object) -> None:
    assert settings_of(base_model_name_or_path=name).base_model == ""
