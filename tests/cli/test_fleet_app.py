from __future__ import annotations

import pytest

from lora_serve.cli import fleet_app
from lora_serve.cli.serve_run import configs
from lora_serve.errors import ConfigError


def test_arguments_are_the_flags_of_serve_with_their_types() -> None:
    args = {
        "model": "m",
        "enable_lora": "true",  # as `serve run` gives it
        "max-loras": 4,
        "enable_prefix_caching": False,  # as a file gives it
        "lora_modules": ["a=/a", "b=/b"],
        "api_key_file": "/keys",
        "replicas": "3",
        "disable_ui": "false",
        "num_ingresses": 2,
    }
    engine, server, fleet = configs(fleet_app.parsed(args))
    assert (engine.model.model, engine.lora.enable_lora, engine.lora.max_loras) == ("m", True, 4)
    assert engine.lora.lora_modules == ("a=/a", "b=/b")
    assert not engine.cache.enable_prefix_caching
    assert (server.api_key_file, server.disable_ui) == ("/keys", False)
    assert (fleet.replicas, fleet.num_ingresses) == (3, 2)


def test_a_cluster_is_never_taken_for_a_loopback_address() -> None:
    _, server, _ = configs(fleet_app.parsed({"model": "m"}))
    assert not server.is_local


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({"modle": "m"}, "unknown argument --modle=m; did you mean --model"),
        ({"enable_lora": "perhaps"}, "enable-lora must be true or false, got 'perhaps'"),
        ({"port": 80}, "port is not the application's; use http_options.port of Ray Serve"),
        ({"lora_replica_id": "a"}, "use the ids of replicas of Ray Serve"),
        ({"max_loras": "many"}, "many"),
        ({"routing_policy": "best"}, "best"),
        ({"api_key": "secret"}, "api_key would be shown by Ray's dashboard; use api_key_file"),
        ({"admin-api-key": ["secret"]}, "LORA_SERVE_ADMIN_API_KEY"),
        ({"lora_catalog": "redis://:secret@host/0"}, "use lora_catalog_password_file"),
        ({"kv_redis_url": "redis://user:secret@host/0"}, "use kv_redis_password_file"),
    ],
)
def test_arguments_that_cannot_be_are_refused(args: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as refusal:
        configs(fleet_app.parsed(args))
    assert "secret" not in str(refusal.value)
