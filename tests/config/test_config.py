from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any

import pytest

from lora_serve.config import (
    CatalogConfig,
    EngineConfig,
    KVTierConfig,
    LimitsConfig,
    LoRAConfig,
    ModelConfig,
    ServerConfig,
)
from lora_serve.config.setting import flag_name
from lora_serve.engine.settings import engine_config
from lora_serve.errors import ConfigError
from lora_serve.llm import LLM


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModelConfig(max_model_len=0), "--max-model-len 0 must be at least 1"),
        (lambda: ModelConfig(cpu_threads=-1), "--cpu-threads -1 must be at least 1"),
        (lambda: ModelConfig(max_logprobs=-2), "--max-logprobs -2 must be at least -1"),
        (lambda: ServerConfig(max_body_bytes=0), "--max-body-bytes 0 must be at least 1"),
        (lambda: ModelConfig(cpu_threads=5000), "--cpu-threads 5000 must be at most 2048"),
        (
            lambda: LimitsConfig(max_num_queued_reqs=-2),
            "--max-num-queued-reqs -2 must be at least -1",
        ),
        (
            lambda: LimitsConfig(max_num_queued_tokens=0),
            "--max-num-queued-tokens 0 must be at least 1",
        ),
        (
            lambda: ServerConfig(drain_timeout=float("nan")),
            "--drain-timeout nan must be at least 0",
        ),
    ],
)
def test_a_number_that_cannot_be_is_refused_with_its_limit(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"override_op": ("linear=reference",)}, "2: the reference kernels .* leave out --overr"),
        ({"model_impl": "transformers"}, "2 does not go with --model-impl transformers, whose"),
    ],
)
def test_what_does_not_go_with_ranks_is_refused_from_the_settings_alone(
    settings: dict[str, object], told: str
) -> None:
    engine_config(**settings)
    with pytest.raises(ConfigError, match=f"^--tensor-parallel-size {told}"):
        engine_config(tensor_parallel_size=2, **settings)


def test_ranks_that_no_segments_can_have_are_refused_with_those_that_can() -> None:
    for size in (1, 2, 4, 8):
        engine_config(tensor_parallel_size=size, tensor_parallel_reduce="segments")
    with pytest.raises(ConfigError) as caught:
        engine_config(tensor_parallel_size=3, tensor_parallel_reduce="segments")
    assert str(caught.value) == (
        "--tensor-parallel-reduce segments: 3 ranks would cut some of the 8 segments; choose "
        "1, 2, 4 or 8 ranks, or --tensor-parallel-reduce gather"
    )


def test_every_override_that_cannot_be_is_told_in_a_line() -> None:
    wrong = ("lore=reference", "linear=gpu", "linear", "rms_norm=reference", "=cpu")
    with pytest.raises(ConfigError) as caught:
        engine_config(override_op=wrong)
    lines = str(caught.value).splitlines()
    assert [line.partition(";")[0] for line in lines] == [
        "--override-op lore=reference: unknown op 'lore'",
        "--override-op linear=gpu: unknown backend 'gpu'",
        "--override-op linear: unknown backend ''",
        "--override-op =cpu: unknown op ''",
    ]
    assert "choose one of embed, rms_norm," in lines[0]
    assert lines[1].endswith("; write OP=BACKEND with one of cpu, reference, triton")


def test_a_size_may_be_a_text_wherever_it_is_set() -> None:
    in_json = '{"kv_connector_extra_config": {"kv_ram_bytes": "2GiB"}}'
    assert KVTierConfig(kv_transfer_config=in_json).kv_ram_bytes == 2**31
    config = engine_config(kv_disk_bytes="512MiB", max_model_len="32K", max_num_batched_tokens="4k")
    assert config.kv_tiers.kv_disk_bytes == 2**29
    assert (config.model.max_model_len, config.scheduler.max_num_batched_tokens) == (32768, 4000)
    with pytest.raises(ConfigError, match="--kv-disk-bytes: 'much' is no number of bytes"):
        engine_config(kv_disk_bytes="much")


PARTS = (*(part.default_factory for part in fields(EngineConfig)), ServerConfig)
CHOSEN = [
    pytest.param(part, field, id=field.name)
    for part in PARTS
    for field in fields(part)
    if "choices" in field.metadata
]


@pytest.mark.parametrize(("part", "field"), CHOSEN)
def test_a_value_that_is_no_choice_is_refused_with_the_choices(
    part: Callable[..., object], field: Field[str]
) -> None:
    choices = field.metadata["choices"]
    for choice in choices:
        names_draft_model = field.name == "speculative_quantization" or choice == "draft_model"
        part(**{field.name: choice}, **{"speculative_model": "m"} if names_draft_model else {})
    flag = "--" + flag_name(field)
    for wrong in ("md5", "", 7, None):
        if wrong is None and field.default is None:
            continue
        with pytest.raises(ConfigError) as caught:
            part(**{field.name: wrong})
        assert str(caught.value) == f"{flag} {wrong} must be one of {', '.join(choices)}"


def test_llm_refuses_a_value_that_is_no_choice_before_it_looks_for_the_model() -> None:
    with pytest.raises(ConfigError, match="--device tpu must be one of auto, cpu, cuda"):
        LLM("/nowhere", device="tpu")


def test_activations_are_not_quantised_by_themselves() -> None:
    with pytest.raises(ConfigError, match="--quantize-activations needs --quantization"):
        ModelConfig(quantize_activations=True)


def test_two_adapters_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="'a' 2 times"):
        LoRAConfig(enable_lora=True, lora_modules=("a=/one", "b=/two", "a=/three"))


@pytest.mark.parametrize("name", ["base", "base:a"])
def test_an_adapter_that_the_models_own_name_would_hide_is_refused(name: str) -> None:
    lora = LoRAConfig(enable_lora=True, lora_modules=(f"{name}=/one",))
    with pytest.raises(ConfigError, match="served as base, other; choose another name"):
        EngineConfig(model=ModelConfig(model="/m", served_model_name=("base", "other")), lora=lora)
    EngineConfig(model=ModelConfig(model="/m"), lora=lora)


def test_kv_transfer_config_says_what_the_flags_say() -> None:
    config = KVTierConfig(
        kv_load_deadline_ms=20,
        kv_transfer_config='{"kv_connector": "TieredConnector", "kv_role": "kv_both", '
        '"kv_load_failure_policy": "fail", "engine_id": "one", '
        '"kv_connector_extra_config": {"kv_ram_bytes": 1000, "kv_disk_path": "/kv"}}',
    )
    assert config == KVTierConfig(
        kv_load_deadline_ms=20,
        kv_load_failure_policy="fail",
        kv_ram_bytes=1000,
        kv_disk_path="/kv",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "must be a JSON object"),
        ('{"kv_connector": "LMCacheConnectorV1"}', 'kv_connector must be "TieredConnector"'),
        ('{"kv_role": "kv_reader"}', "--kv-role kv_reader must be one of kv_both, kv_producer"),
        ('{"kv_save_deadline_ms": 0}', "--kv-save-deadline-ms 0 must be at least 1"),
        ('{"kv_port": 1}', "unknown setting kv_port; known are"),
        ('{"kv_ram_bytes": "lots"}', "--kv-ram-bytes: 'lots' is no number of bytes"),
        ('{"kv_ram_bytes": 0}', "--kv-ram-bytes 0 must be at least 1"),
        ('{"kv_load_deadline_ms": 7}', "kv_load_deadline_ms is given as a flag, too"),
    ],
)
def test_a_kv_transfer_config_that_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KVTierConfig(kv_load_deadline_ms=20, kv_transfer_config=text)


def test_a_policy_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match="some must be one of all, prompt-only, after-n-hits"):
        KVTierConfig(kv_store_policy="some")


def test_secrets_stand_in_no_repr() -> None:
    configs = (
        ServerConfig(api_key=("sesame",), admin_api_key=("sesame",)),
        CatalogConfig(lora_catalog="redis://:sesame@host/0"),
        KVTierConfig(kv_redis_url="redis://:sesame@host/0"),
    )
    assert "sesame" not in repr(configs)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensor_parallel_size": "2"}, "--tensor-parallel-size '2': want a whole number"),
        ({"tensor_parallel_size": 2.5}, "--tensor-parallel-size 2.5: want a whole number"),
        ({"tensor_parallel_size": True}, "--tensor-parallel-size True: want a whole number"),
        ({"tensor_parallel_size": None}, "--tensor-parallel-size None: want a whole number"),
        ({"step_timeout": "5"}, "--step-timeout '5': want a number"),
    ],
)
def test_what_is_no_number_is_told_by_its_flag(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        engine_config(model="tiny", **given)


def test_numbers_may_be_told_as_the_command_line_tells_them() -> None:
    config = engine_config(
        model="tiny", max_model_len="16K", step_timeout=5, override_op=["linear=reference"]
    )
    assert config.model.max_model_len == 16_384
    assert config.model.override_op == ("linear=reference",)
