from __future__ import annotations

import pytest

from lora_serve.cli.arguments import engine_config, server_config
from lora_serve.cli.parser import OneLineParser
from lora_serve.cli.serve import add_arguments
from lora_serve.cli.vllm_flags import INERT_FLAGS, NOT_OFFERED, told_of
from lora_serve.config import EngineConfig, LoRAConfig, ModelConfig, ServerConfig
from lora_serve.errors import ConfigError


def parser() -> OneLineParser:
    made = OneLineParser(prog="lora-serve serve")
    add_arguments(made)
    return made


def words_of(names: tuple[str, ...], neutral: tuple[str, ...] | None) -> list[str]:
    return [names[0], *(() if neutral == () else neutral[:1] if neutral else ("5",))]


def test_flags_without_effect_are_taken_and_told_of() -> None:
    given = [word for flag in INERT_FLAGS for word in words_of(flag.names, flag.neutral)]
    args = parser().parse_args(given)
    assert (engine_config(args), server_config(args)) == (EngineConfig(), ServerConfig())
    assert len(told_of(args)) == len(INERT_FLAGS)
    assert told_of(args)[0].startswith("--enable-chunked-prefill changes nothing: prompts are")
    assert told_of(parser().parse_args([])) == ()


@pytest.mark.parametrize("flag", [flag for flag in INERT_FLAGS if flag.neutral])
def test_a_value_that_would_change_something_is_refused_by_name(
    flag: object, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args([flag.names[0], "other"])
    told = capsys.readouterr().err
    assert flag.names[0] in told
    assert "other is not supported: " in told


def test_objects_mean_the_same_in_any_order(capsys: pytest.CaptureFixture[str]) -> None:
    markers = '{"reasoning_end_str":"</think>","reasoning_start_str":"<think>"%s}'
    assert told_of(parser().parse_args(["--reasoning-config", markers % ""]))
    for other in (markers % ',"reasoning_parser":"x"', "{"):
        with pytest.raises(SystemExit):
            parser().parse_args(["--reasoning-config", other])
        assert f"{other} is not supported" in capsys.readouterr().err


def test_the_model_may_be_named_by_a_flag_but_only_once() -> None:
    assert engine_config(parser().parse_args(["--model", "m"])).model.model == "m"
    assert engine_config(parser().parse_args(["m", "--model", "m"])).model.model == "m"
    with pytest.raises(ConfigError, match="a and --model b: name one model"):
        engine_config(parser().parse_args(["a", "--model", "b"]))


def test_vllms_words_for_values_are_taken() -> None:
    words = "m --dtype half --load-format auto --generation-config vllm".split()
    model = engine_config(parser().parse_args(words)).model
    assert (model.dtype, model.load_format, model.generation_config) == (
        "float16",
        "auto",
        "none",
    )
    assert ModelConfig(dtype="float").dtype == "float32"
    with pytest.raises(ConfigError, match="--dtype double"):
        ModelConfig(dtype="double")


def test_flags_may_be_written_with_underscores_and_have_vllms_names() -> None:
    args = parser().parse_args(
        ["--max_num_seqs=7", "--shutdown-timeout", "3", "--chat-template=a_b"]
    )
    assert engine_config(args).scheduler.max_num_seqs == 7
    server = server_config(args)
    assert (server.drain_timeout, server.chat_template) == (3.0, "a_b")


def test_fewer_adapters_in_memory_mean_fewer_in_a_step() -> None:
    assert LoRAConfig().max_loras == 8
    assert LoRAConfig(max_cpu_loras=2).max_loras == 2
    assert LoRAConfig(max_cpu_loras=20).max_loras == 8
    with pytest.raises(ConfigError, match="--max-cpu-loras 2 is below --max-loras 3"):
        LoRAConfig(max_cpu_loras=2, max_loras=3)
    with pytest.raises(ConfigError, match="--max-cpu-loras 0 must be at least 1"):
        LoRAConfig(max_cpu_loras=0)
    with pytest.raises(ConfigError, match="--max-lora-expert-rank 9 is above --max-lora-rank 8"):
        LoRAConfig(max_lora_expert_rank=9, max_lora_rank=8)


def test_no_flag_without_effect_is_proposed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--enable-chunked-prefil"])
    assert "chunked-prefill" not in capsys.readouterr().err


@pytest.mark.parametrize("flag", NOT_OFFERED)
def test_a_flag_of_what_is_not_offered_says_so(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["MODEL", flag])
    assert f"{flag} is not offered: {NOT_OFFERED[flag]}; leave it out" in capsys.readouterr().err
