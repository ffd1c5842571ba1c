"""The manifests for gateways: valid for Kubernetes, and agreed with the server and with its chart.

The kinds of operators are checked where they hold what is the server's: pods, commands, ports.
"""

from __future__ import annotations

import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from lora_serve.config import EngineConfig, ServerConfig
from lora_serve.server.http.probes import LIVE_PATHS, READY_PATHS
from tests.deploy.command_lines import DEPLOY, parsed

Document = dict[str, Any]
GATEWAYS = DEPLOY / "gateways"
DOCKER = DEPLOY.parent / "docker"
OF_KUBERNETES = {"ConfigMap", "Deployment", "Service"}
PORT_OF_METRICS = 8001  # of deploy/helm/lora-serve


def documents(name: str) -> dict[str, Document]:
    """Reads a file; a kind stands in it once."""
    found = [each for each in yaml.safe_load_all((GATEWAYS / name).read_text()) if each]
    kinds = {each["kind"]: each for each in found}
    assert len(kinds) == len(found)
    return kinds


PODS = {
    "aibrix.yaml": lambda kinds: kinds["Deployment"]["spec"]["template"]["spec"],
    "kserve-runtime.yaml": lambda kinds: {
        key: kinds["ServingRuntime"]["spec"][key] for key in ("containers", "volumes")
    },
    "kserve.yaml": lambda kinds: kinds["LLMInferenceService"]["spec"]["template"],
}


@pytest.mark.skipif(
    find_spec("kubernetes_validate") is None,
    reason="*** THE MANIFESTS FOR GATEWAYS ARE NOT VALIDATED: pip install 'lora-serve[deploy]' ***",
)
@pytest.mark.parametrize("name", sorted(path.name for path in GATEWAYS.iterdir()))
def test_kubernetes_takes_what_is_its_own(name: str) -> None:
    import kubernetes_validate

    kinds = documents(name)
    for kind in OF_KUBERNETES & kinds.keys():
        kubernetes_validate.validate(kinds[kind], "1.37", strict=True)
    if name in PODS:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}}
        spec = PODS[name](kinds)
        kubernetes_validate.validate(pod | {"spec": spec}, "1.37", strict=True)


@pytest.mark.parametrize("name", ["aibrix.yaml", "kserve-runtime.yaml"])
def test_the_server_takes_the_command_and_listens_where_the_probes_ask(name: str) -> None:
    (container,) = PODS[name](documents(name))["containers"]
    engine, server = parsed(container["args"])
    (port,) = container["ports"]
    assert port["containerPort"] == server.port
    assert server.host == "0.0.0.0"
    assert engine.lora.enable_lora
    for probe, paths in {
        "startupProbe": LIVE_PATHS,
        "livenessProbe": LIVE_PATHS,
        "readinessProbe": READY_PATHS,
    }.items():
        asked = container.get(probe, {"httpGet": {"path": next(iter(paths)), "port": server.port}})
        assert asked["httpGet"]["path"] in paths
        assert asked["httpGet"]["port"] == server.port


def test_what_kserve_and_production_stack_add_to_a_command_is_taken() -> None:
    kserve = documents("kserve.yaml")["LLMInferenceService"]["spec"]
    (container,) = kserve["template"]["containers"]
    (variable,) = container["env"]
    engine, server = parsed(["serve", "/mnt/models", *shlex.split(variable["value"])])
    assert engine.kv_tiers.kv_ram_bytes
    assert server.drain_timeout <= 45, "KServe's pods are given 60 s, of which preStop takes 15"

    runtime = documents("production-stack.yaml")["VLLMRuntime"]["spec"]
    engine, server = operators_command(runtime)
    assert server.port == runtime["vllmConfig"]["port"]
    assert engine.model.served_model_name == ("qwen",)
    assert engine.lora.max_loras == runtime["vllmConfig"]["maxLoras"]
    assert not runtime["lmCacheConfig"]["enabled"], "its --kv-transfer-config is another engine's"


def operators_command(spec: Document) -> tuple[EngineConfig, ServerConfig]:
    """What production-stack's operator makes of a VLLMRuntime, after `/opt/venv/bin/vllm`."""
    model, vllm = spec["model"], spec["vllmConfig"]
    words = ["serve", model["modelURL"], "--host", "0.0.0.0", "--port", str(vllm["port"])]
    words += ["--enable-lora"] * model["enableLoRA"]
    words += ["--no-enable-chunked-prefill", "--enable-prefix-caching"]
    words += ["--max-model-len", str(model["maxModelLen"]), "--dtype", model["dtype"]]
    words += ["--max-num-seqs", str(model["maxNumSeqs"]), "--max_loras", str(vllm["maxLoras"])]
    return parsed([*words, *vllm["extraArgs"]])


def test_the_images_have_vllm_where_operators_call_it() -> None:
    for dockerfile in ("Dockerfile.cpu", "Dockerfile.cuda"):
        text = (DOCKER / dockerfile).read_text()
        assert "COPY docker/vllm /opt/venv/bin/vllm" in text
        assert "ENV PATH=/opt/venv/bin:$PATH" in text.rpartition("FROM ")[2]
    assert (DOCKER / "vllm").stat().st_mode & 0o111 == 0o111


def test_the_endpoint_picker_scrapes_the_charts_port_and_chooses_by_plugins_it_has() -> None:
    kinds = documents("inference-pool.yaml")
    config = yaml.safe_load(kinds["ConfigMap"]["data"]["epp.yaml"])
    plugins = {each["type"]: each.get("parameters", {}) for each in config["plugins"]}
    assert plugins["metrics-data-source"] == {"port": PORT_OF_METRICS}
    (profile,) = config["schedulingProfiles"]
    assert {each["pluginRef"] for each in profile["plugins"]} <= plugins.keys()
    (source,) = config["dataLayer"]["sources"]
    assert {source["pluginRef"], source["extractors"][0]["pluginRef"]} <= plugins.keys()
    chart = (DEPLOY / "helm" / "lora-serve" / "templates" / "_helpers.tpl").read_text()
    assert f"--metrics-port={PORT_OF_METRICS}" in chart
    (port,) = kinds["InferencePool"]["spec"]["targetPorts"]
    assert f"--port={port['number']}" in chart
    (rule,) = kinds["HTTPRoute"]["spec"]["rules"]
    assert rule["backendRefs"][0]["name"] == kinds["InferencePool"]["metadata"]["name"]


def test_every_manifest_is_told_of_in_the_documents() -> None:
    page = (Path(DEPLOY).parent / "docs" / "gateways.md").read_text()
    for path in GATEWAYS.iterdir():
        assert f"deploy/gateways/{path.name}" in page
