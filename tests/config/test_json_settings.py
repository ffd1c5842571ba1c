from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from lora_serve.config import (
    KVEventsConfig,
    KVTierConfig,
    LoRAConfig,
    ModelConfig,
    ServerConfig,
    SpeculativeConfig,
    StructuredOutputsConfig,
)
from lora_serve.errors import ConfigError

DEEP = "[" * 200_000
TAKES_JSON: dict[str, Callable[[str], object]] = {
    "--kv-events-config": lambda text: KVEventsConfig(kv_events_config=text),
    "--kv-transfer-config": lambda text: KVTierConfig(kv_transfer_config=text),
    "--lora-modules": lambda text: LoRAConfig(enable_lora=True, lora_modules=(text,)),
    "--pooler-config": lambda text: ModelConfig(model="m", pooler_config=text),
    "--allowed-origins": lambda text: ServerConfig(allowed_origins=(text,)),
    "--speculative-config": lambda text: SpeculativeConfig(speculative_config=text),
    "--structured-outputs-config": lambda text: StructuredOutputsConfig(
        structured_outputs_config=text
    ),
}


LISTS = (DEEP, "[[]]")  # what begins otherwise is an origin
OBJECTS = ('{"a":' + DEEP, '{"a": ' + "9" * 5000 + "}", "")


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        *product(TAKES_JSON, LISTS),
        *product((flag for flag in TAKES_JSON if flag != "--allowed-origins"), OBJECTS),
    ],
)
def test_json_that_no_flag_can_read_is_refused_in_a_short_line(flag: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{flag}") as caught:
        TAKES_JSON[flag](text)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("setting", "text", "message"),
    [
        ("--structured-outputs-config", '{"compile_timeout": 1%s}', "timeout inf must be above 0"),
        ("--structured-outputs-config", '{"compile_timeout": -1%s}', "timeout -inf must be above"),
        ("--structured-outputs-config", '{"backend": 1%s}', "backend 10{79} must be a str, as"),
        ("--structured-outputs-config", '{"a%s": 1}', "unknown setting a0{79}; known are backend"),
        ("--speculative-config", '{"method": "a%s"}', "no method 'a0{78}; have ngram"),
        ("--kv-transfer-config", '{"kv_role": 1%s}', "kv_role 10{79} must be a str, as 'kv_both'"),
        (
            "--kv-transfer-config",
            '{"kv_connector_extra_config": 1%s}',
            "extra_config 10{79} must be a JSON object",
        ),
        ("--lora-modules", '{"name": 1%s, "path": "/one"}', "modules .{80}: must be NAME=PATH"),
    ],
)
def test_values_are_cut_in_what_is_said_of_them(setting: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TAKES_JSON[setting](text % ("0" * 4000))


@pytest.mark.parametrize(
    "entry", ['{"name": 1, "path": "/one"}', '{"name": "a", "path": ["/one"]}']
)
def test_the_name_and_path_of_an_adapter_are_texts(entry: str) -> None:
    with pytest.raises(ConfigError, match="must be NAME=PATH"):
        LoRAConfig(enable_lora=True, lora_modules=(entry,))


def test_a_flag_takes_the_mapping_that_its_json_stands_for() -> None:
    settings = {"kv_role": "kv_producer", "kv_connector_extra_config": {"kv_ram_bytes": "1MiB"}}
    expected = KVTierConfig(kv_role="kv_producer", kv_ram_bytes=2**20)
    assert KVTierConfig(kv_transfer_config=settings) == expected
