from __future__ import annotations

import dataclasses

import pytest

from lora_serve.cli import serve
from lora_serve.cli.arguments import (
    GROUPS,
    add_config_arguments,
    engine_config,
    server_config,
)
from lora_serve.cli.parser import OneLineParser
from lora_serve.config import EngineConfig, ServerConfig
from lora_serve.errors import ConfigError


def parser() -> OneLineParser:
    made = OneLineParser(prog="lora-serve serve")
    add_config_arguments(made)
    return made


def test_nothing_given_is_the_default() -> None:
    args = parser().parse_args([])
    assert engine_config(args) == EngineConfig()
    assert server_config(args) == ServerConfig()


def test_what_users_of_vllm_type_works() -> None:
    args = parser().parse_args(
        "some/model --served-model-name one two --enable-lora --max-loras 4 --max-lora-rank 64 "
        "--lora-modules a=/a b=/b --max-model-len 8192 --max-num-seqs 8 --enable-prefix-caching "
        "--gpu-memory-utilization 0.5 --override-op linear=reference --override-op lora=reference "
        "--api-key k1 k2 --port 9000 --enforce-eager --enable-prompt-embeds".split()
    )
    engine, server = engine_config(args), server_config(args)
    assert engine.model.model == "some/model"
    assert engine.model.served_model_name == ("one", "two")
    assert engine.model.override_op == ("linear=reference", "lora=reference")
    assert engine.lora.modules == [("a", "/a"), ("b", "/b")]
    assert (engine.lora.max_loras, engine.scheduler.max_num_seqs) == (4, 8)
    assert engine.cache.gpu_memory_utilization == 0.5
    assert (server.port, server.api_key) == (9000, ("k1", "k2"))


def test_prefix_caching_can_be_turned_off() -> None:
    args = parser().parse_args(["--no-enable-prefix-caching"])
    assert not engine_config(args).cache.enable_prefix_caching


def test_every_setting_has_one_sentence_of_help() -> None:
    for _, config in GROUPS:
        for field in dataclasses.fields(config):
            text = field.metadata["help"]
            assert text.endswith("."), field.name
            assert field.metadata.get("repeat") is None or field.metadata["metavar"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--max-lora", "3"], ["--max-lora", "did you mean --max-lora"]),
        (["--dtype", "int3"], ["--dtype", "int3", "bfloat16"]),
        (["--dtype", "bloat16"], ["did you mean bfloat16?"]),
        (["--port", "http"], ["--port", "http"]),
        (["--max-model-len", "16x"], ["--max-model-len", "'16x'", "16K (16384) or 16k (16000)"]),
        (["--kv-ram-bytes", "8GX"], ["--kv-ram-bytes", "'8GX'", "512MiB", "8GB (1000 MB each)"]),
        (["--kv-ram-bytes", "0.3KiB"], ["--kv-ram-bytes", "'0.3KiB'"]),
        (["model", "another"], ["another"]),
    ],
)
def test_a_mistyped_command_is_one_line_and_exit_code_2(
    argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parser().parse_args(argv)
    assert caught.value.code == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert all(word in line for word in words)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--block-size", "20"], "--block-size 20"),
        (["--gpu-memory-utilization", "1.5"], "1.5"),
        (["--num-gpu-blocks-override", "0"], "--num-gpu-blocks-override 0"),
        (["--kv-cache-memory-bytes", "0"], "--kv-cache-memory-bytes 0"),
        (["--max-num-seqs", "0"], "--max-num-seqs 0"),
        (["--max-loras", "0"], "--max-loras 0"),
        (["--max-lora-rank", "0"], "--max-lora-rank 0"),
        (["--max-loras", "4", "--max-cpu-loras", "3"], "--max-cpu-loras 3"),
        (["--enable-lora", "--lora-modules", "a"], "--lora-modules a"),
        (["--enable-lora", "--lora-modules", "{broken"], "{broken"),
        (["--lora-modules", "a=/a"], "--enable-lora"),
        (["--port", "70000"], "70000"),
    ],
)
def test_impossible_settings_are_named(argv: list[str], words: str) -> None:
    args = parser().parse_args(argv)
    with pytest.raises(ConfigError) as caught:
        engine_config(args), server_config(args)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("4096", 4096), ("16k", 16_000), ("16K", 16_384), ("1m", 10**6), ("25.6k", 25_600)],
)
def test_a_length_may_be_written_with_vllms_suffixes(text: str, tokens: int) -> None:
    args = parser().parse_args(["--max-model-len", text])
    assert engine_config(args).model.max_model_len == tokens


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4096", 4096),
        ("512MiB", 512 * 2**20),
        ("8GiB", 2**33),
        ("8 GB", 8 * 10**9),
        ("1.5gib", 3 * 2**29),
        ("8G", 2**33),  # as vLLM reads it
        ("8g", 8 * 10**9),
    ],
)
def test_bytes_may_be_written_with_their_unit(text: str, num_bytes: int) -> None:
    args = parser().parse_args(["--kv-cache-memory-bytes", text, "--max-body-bytes", text])
    assert engine_config(args).cache.kv_cache_memory_bytes == num_bytes
    assert server_config(args).max_body_bytes == num_bytes


def test_every_flag_that_takes_bytes_takes_their_unit() -> None:
    for _, config in GROUPS:
        for field in dataclasses.fields(config):
            if field.name.endswith("_bytes"):
                assert field.metadata.get("quantity") == "bytes", field.name


def test_a_default_is_shown_as_it_may_be_written() -> None:
    assert "(default: 16GiB)" in parser().format_help()


def test_no_default_in_the_help_is_written_as_python_writes_it() -> None:
    parser = OneLineParser(prog="lora-serve serve")
    serve.add_arguments(parser)
    told = " ".join(parser.format_help().split())
    assert "Methods that pages of other origins may use. (default: *)" in told
    assert "(default: (" not in told
