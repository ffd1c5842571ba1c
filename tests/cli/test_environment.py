from __future__ import annotations

import argparse

import pytest

from lora_serve.cli.arguments import engine_config
from lora_serve.cli.environment import with_environment, with_settings
from lora_serve.config import ServerConfig
from lora_serve.errors import ConfigError


def test_keys_of_the_environment_are_added_to_those_of_the_flags() -> None:
    environ = {
        "VLLM_API_KEY": "theirs",
        "LORA_SERVE_API_KEY": "ours",
        "LORA_SERVE_ADMIN_API_KEY": "root",
    }
    config = with_environment(ServerConfig(api_key=("flag",)), environ)
    assert config.api_key == ("flag", "ours", "theirs")
    assert config.admin_api_key == ("root",)


@pytest.mark.parametrize("name", ["VLLM_API_KEY", "LORA_SERVE_API_KEY", "LORA_SERVE_ADMIN_API_KEY"])
@pytest.mark.parametrize("value", ["", "  "])
def test_a_key_variable_that_is_set_but_empty_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is set, but empty"):
        with_environment(ServerConfig(), {name: value})


@pytest.mark.parametrize(
    ("value", "allows"), [("1", True), ("True", True), ("0", False), ("", False)]
)
def test_vllms_variable_allows_runtime_updating(value: str, allows: bool) -> None:
    environ = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": value}
    assert with_environment(ServerConfig(), environ).allow_runtime_lora_updating is allows


def test_an_empty_environment_changes_nothing() -> None:
    assert with_environment(ServerConfig(), {}) == ServerConfig()


@pytest.mark.parametrize(
    ("given", "environ", "seconds"),
    [
        ({}, {}, 600.0),
        ({}, {"VLLM_ENGINE_READY_TIMEOUT_S": "1800"}, 1800.0),
        ({"engine_ready_timeout": 60.0}, {"VLLM_ENGINE_READY_TIMEOUT_S": "1800"}, 60.0),
    ],
)
def test_vllms_variable_bounds_the_start_where_no_flag_does(
    given: dict[str, float], environ: dict[str, str], seconds: float
) -> None:
    config = engine_config(with_settings(argparse.Namespace(**given), environ))
    assert config.limits.engine_ready_timeout == seconds


@pytest.mark.parametrize(
    ("given", "environ", "resolver"),
    [
        ({"enable_lora": True}, {}, ("dir:/adapters",)),
        (
            {"enable_lora": True},
            {"VLLM_PLUGINS": "x, lora_filesystem_resolver"},
            ("dir:/adapters",),
        ),
        ({"enable_lora": True}, {"VLLM_PLUGINS": ""}, ()),
        ({"enable_lora": True}, {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0"}, ()),
        ({"enable_lora": True}, {"VLLM_LORA_RESOLVER_CACHE_DIR": ""}, ()),
        ({"enable_lora": True, "lora_resolver": ("dir:/own",)}, {}, ("dir:/own",)),
        ({}, {}, ()),
    ],
)
def test_vllms_variables_name_a_directory_to_resolve_adapters_in(
    given: dict[str, object], environ: dict[str, str], resolver: tuple[str, ...]
) -> None:
    environ = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "true",
        "VLLM_LORA_RESOLVER_CACHE_DIR": "/adapters",
        **environ,
    }
    config = engine_config(with_settings(argparse.Namespace(**given), environ))
    assert config.lora.lora_resolver == resolver


def test_vllms_list_of_repositories_is_refused_where_vllm_would_heed_it() -> None:
    environ = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_LORA_RESOLVER_HF_REPO_LIST": "org/repo,org/other",
        "VLLM_LORA_RESOLVER_CACHE_DIR": "/adapters",
    }
    given = {"enable_lora": True}
    with pytest.raises(ConfigError, match=r"org/repo,org/other .* --lora-resolver hf"):
        with_settings(argparse.Namespace(**given), environ)
    chosen = environ | {"VLLM_PLUGINS": "lora_filesystem_resolver"}
    assert "lora_resolver" in with_settings(argparse.Namespace(**given), chosen)
    with_settings(argparse.Namespace(**given, lora_resolver=("hf",)), environ)
    with_settings(argparse.Namespace(), environ)
    with_settings(argparse.Namespace(**given), environ | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0"})


@pytest.mark.parametrize("value", ["", "soon", "-1", "nan", "inf"])
def test_a_start_is_not_bounded_by_what_is_no_number_of_seconds(value: str) -> None:
    told = f"VLLM_ENGINE_READY_TIMEOUT_S is '{value}', and no number of seconds"
    with pytest.raises(ConfigError, match=told):
        with_settings(argparse.Namespace(), {"VLLM_ENGINE_READY_TIMEOUT_S": value})
