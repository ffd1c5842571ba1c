from __future__ import annotations

import re
import time

import pytest

from lora_serve.adapters.patterns import ModulePatterns, compile_patterns

Q3 = "model.layers.3.self_attn.q_proj"
Q13 = "model.layers.13.self_attn.q_proj"
DOWN3 = "model.layers.3.mlp.down_proj"


def matched(key: str, module: str) -> bool:
    findings: list[str] = []
    patterns = compile_patterns("rank_pattern", {key: True}, findings)
    assert not findings
    return patterns.get(module, False)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("q_proj", [Q3, Q13]),
        ("self_attn.q_proj", [Q3, Q13]),
        ("proj", []),
        (Q3, [Q3]),
        ("^model.layers.3.*", [Q3, DOWN3]),
        (r"layers\.3\..*", [Q3, DOWN3]),
        (r"layers\.(?:3|4)\.mlp\.\w+", [DOWN3]),
        (r"layers\.1?3\.self_attn.*", [Q3, Q13]),
        (r"\d{2}.self_attn.q_proj", [Q13]),
        (r"[0-9]+.mlp.[du][op]\w*", [DOWN3]),
        ("k_proj|down_proj", [DOWN3]),
        (r"model.layers.3.self_attn.q_proj$", [Q3]),
        ("", []),
    ],
)
def test_a_key_means_what_it_means_to_peft(key: str, meant: list[str]) -> None:
    assert [module for module in (Q3, Q13, DOWN3) if matched(key, module)] == meant
    by_peft = [m for m in (Q3, Q13, DOWN3) if re.match(rf"(.*\.)?({key})$", m)]
    assert meant == by_peft


def test_the_first_key_that_matches_wins() -> None:
    patterns = compile_patterns("rank_pattern", {"layers.3.*": 1, "q_proj": 2}, [])
    assert [patterns.get(module, 0) for module in (Q3, Q13, DOWN3)] == [1, 2, 1]


def test_no_patterns_leave_the_default() -> None:
    patterns: ModulePatterns[int] = ModulePatterns()
    assert patterns.get(Q3, 7) == 7


@pytest.mark.parametrize(
    "key",
    [
        "(a+)+",
        "(a|a)*",
        "(.*){9}",
        r"(x)\1",
        "(?=a)",
        "(?P<x>a)",
        "(?i)q_proj",
        "[[a]",
        "[a--b]",
        "[b-a]",
        "*",
        "a**",
        "(",
        ")",
        ")|(",
        "a" * 1001,
        "(" * 500 + ")" * 500,
        "q proj",
        "\ud800",
        "\\",
    ],
)
def test_a_key_that_cannot_be_matched_safely_is_a_finding(key: str) -> None:
    findings: list[str] = []
    patterns = compile_patterns("alpha_pattern", {key: 1}, findings)
    assert len(findings) == 1
    assert findings[0].startswith("alpha_pattern: ")
    assert patterns == ModulePatterns()


@pytest.mark.parametrize(
    "keys",
    [
        [".*.*.*.*x"],
        ["a?" * 20],
        ["(a|a)" * 20],
        [".*.*.*x", ".*.*.*y"],
        [r"\w{1,9}\w{1,9}\w{1,9}\w{1,9}x"],
    ],
)
def test_patterns_with_too_many_ways_are_a_finding(keys: list[str]) -> None:
    findings: list[str] = []
    patterns = compile_patterns("rank_pattern", dict.fromkeys(keys, 1), findings)
    assert findings == [
        "rank_pattern: its patterns are too complex to match; write out module names"
    ]
    assert patterns == ModulePatterns()


def test_the_slowest_patterns_that_pass_take_milliseconds() -> None:
    worst = [".*.*.*x", r"\w+\w+\w+x", "(a|a)" * 12 + "x", "a?" * 14 + "x"]
    for key in worst:
        patterns = compile_patterns("rank_pattern", {key: 1}, [])
        assert patterns.patterns
        began = time.perf_counter()
        for name in (Q13, "a" * 64, "." * 64):
            patterns.get(name, 0)
        assert time.perf_counter() - began < 1


def test_a_pattern_for_each_of_a_thousand_modules_is_served() -> None:
    names = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(1000)]
    findings: list[str] = []
    patterns = compile_patterns("rank_pattern", {n: i for i, n in enumerate(names)}, findings)
    assert not findings
    assert patterns.get(names[777], -1) == 777


@pytest.mark.parametrize(
    ("keys", "excess"),
    [
        ([f"q{number}" for number in range(100_000)], "100000 keys are more than 2048"),
        (
            [f"{number}" + "a" * 900 for number in range(1000)],
            "keys of 902890 characters are longer than 262144",
        ),
    ],
)
def test_more_keys_than_can_be_compiled_in_a_moment_are_a_finding(
    keys: list[str], excess: str
) -> None:
    findings: list[str] = []
    patterns = compile_patterns("rank_pattern", dict.fromkeys(keys, 1), findings)
    assert findings == [f"rank_pattern: {excess}; let one pattern stand for many modules"]
    assert patterns == ModulePatterns()
