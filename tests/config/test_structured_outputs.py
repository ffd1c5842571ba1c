from __future__ import annotations

import pytest

from lora_serve.config import StructuredOutputsConfig
from lora_serve.errors import ConfigError


def test_settings_as_json_are_those_of_the_flags() -> None:
    given = '{"backend": "xgrammar", "compile_timeout": 3, "enable_in_reasoning": true}'
    assert StructuredOutputsConfig(structured_outputs_config=given) == StructuredOutputsConfig(
        structured_outputs_backend="xgrammar",
        structured_outputs_compile_timeout=3.0,
        structured_outputs_enable_in_reasoning=True,
    )


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("{", "is not JSON"),
        ("[]", "must be a JSON object"),
        ('{"engine": 1}', "unknown setting engine; known are backend, compile_timeout"),
        ('{"config": "{}"}', "unknown setting config"),
        ('{"backend": 1}', "backend 1 must be a str, as 'auto'"),
        ('{"backend": "outlines"}', "backend outlines must be one of auto, llguidance, xgrammar"),
        ('{"compile_timeout": 0}', "compile-timeout 0.0 must be above 0"),
    ],
)
def test_json_that_is_no_settings_is_refused(given: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        StructuredOutputsConfig(structured_outputs_config=given)


def test_json_and_a_flag_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="backend is given as a flag, too"):
        StructuredOutputsConfig(
            structured_outputs_backend="llguidance",
            structured_outputs_config='{"backend": "xgrammar"}',
        )
