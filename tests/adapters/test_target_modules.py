from __future__ import annotations

import time

import pytest

from lora_serve.adapters import target_modules
from lora_serve.adapters.target_modules import parse_targets

NAMES = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(40)]


def test_without_target_modules_every_module_has_lora() -> None:
    """PEFT always writes them; without, it takes a default of its own for some architectures."""
    assert not parse_targets({}, (), []).without_lora(NAMES, [])
    assert parse_targets({}, ("q_proj",), []).without_lora(NAMES, []) == set(NAMES)


def test_target_parameters_alone_give_no_module_lora() -> None:
    config = {"target_parameters": ["experts.down_proj"], "target_modules": None}
    assert parse_targets(config, (), []).without_lora(NAMES, []) == set(NAMES)


@pytest.mark.parametrize("setting", ["target_modules", "exclude_modules", "layers_pattern"])
def test_an_expression_that_would_match_for_ever_is_a_finding(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_modules, "_MATCHING_SECONDS", 0.2)
    config: dict[str, object] = {"target_modules": ["q_proj"], "layers_to_transform": [1]}
    findings: list[str] = []
    config[setting] = r"(?:[a-z_.0-9]+?)*?(?:[a-z_.0-9]+?)*?(?:[a-z_.0-9]+?)*?(?<=!)"
    if setting == "target_modules":
        del config["layers_to_transform"]
    targets = parse_targets(config, (), findings)
    assert not findings
    began = time.process_time()
    assert not targets.without_lora(NAMES, findings)
    assert time.process_time() - began < 2
    assert findings == [
        "target_modules, exclude_modules or layers_pattern took longer than 0.2 s of processor "
        "time to match with the names of its modules; write out names"
    ]


@pytest.mark.parametrize("setting", ["target_modules", "exclude_modules", "layers_pattern"])
def test_an_expression_that_is_none_is_a_finding(setting: str) -> None:
    for expression, told in (("(", "which is no expression"), ("a" * 16_385, "16385 characters")):
        findings: list[str] = []
        parse_targets({setting: expression, "layers_to_transform": [1]}, (), findings)
        assert any(finding.startswith(setting) and told in finding for finding in findings)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"target_modules": {"q_proj": 1}}, "target_modules is {'q_proj': 1}; it must be an exp"),
        ({"target_modules": [1]}, "target_modules is [1]; it must be an expression, or a list of"),
        ({"exclude_modules": 7}, "exclude_modules is 7; it must be an expression, or a list of"),
        ({"layers_to_transform": "1"}, "layers_to_transform is '1'; it must be a number, a list"),
        ({"layers_to_transform": [True]}, "layers_to_transform is [True]; it must be a number"),
        (
            {"layers_to_transform": 1, "layers_pattern": {"h": 1}},
            "layers_pattern is {'h': 1}; it must be a name, or a list of them",
        ),
    ],
)
def test_what_no_setting_may_be_is_a_finding(settings: dict[str, object], told: str) -> None:
    findings: list[str] = []
    parse_targets(settings, (), findings)
    assert len(findings) == 1
    assert findings[0].startswith(told)


def test_names_have_the_time_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_modules, "_MATCHING_SECONDS", 0.05)
    findings: list[str] = []
    targets = parse_targets({"target_modules": r"(.*a)?(.*b)?(.*c)?(.*d)?.*(?<=_)"}, (), findings)
    assert not targets.without_lora(
        [f"{name}.{n}" for n in range(2000) for name in NAMES], findings
    )
    assert len(findings) == 1


def test_a_name_of_many_parts_takes_no_time() -> None:
    began = time.process_time()
    parse_targets({"target_modules": ["q_proj"]}, (), []).without_lora(["a." * 2**21], [])
    assert time.process_time() - began < 1
