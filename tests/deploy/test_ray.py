from __future__ import annotations

from pathlib import Path

import pytest
import yaml

pytest.importorskip("ray.serve", reason="NO SERVE CONFIG TESTED: Ray Serve is missing")

from ray.serve.schema import ServeDeploySchema

from lora_serve.cli.fleet_app import parsed
from lora_serve.cli.serve_run import configs

FILE = Path(__file__).parents[2] / "deploy/ray/serve.yaml"


def test_the_file_is_a_serve_config_whose_arguments_are_flags() -> None:
    schema = ServeDeploySchema.model_validate(yaml.safe_load(FILE.read_text()))
    (application,) = schema.applications
    assert application.import_path == "lora_serve.fleet:app"
    engine, server, fleet = configs(parsed(application.args))
    assert engine.lora.enable_lora
    assert not server.is_local, "nobody may change the server without a key"
    assert fleet.scales
    assert fleet.num_ingresses == 2


def test_the_application_of_the_file_can_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_SERVE_API_KEY", "key")
    from lora_serve.fleet import app

    arguments = yaml.safe_load(FILE.read_text())["applications"][0]["args"]
    built = app(arguments)
    ingress = built._bound_deployment
    assert ingress.num_replicas == 2
    replicas, _, server, has_catalog = ingress.init_args
    assert not has_catalog, "the file names none, so its replicas refuse to change adapters"
    assert server.api_key == ("key",)
    scaling = replicas._bound_deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (2, 4)
    assert scaling.target_ongoing_requests == 16
