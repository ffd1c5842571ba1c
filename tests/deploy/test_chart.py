"""The Helm chart: rendered by Helm, valid for Kubernetes, and agreed with the server."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import yaml

from lora_serve import __version__
from lora_serve.server.http.probes import LIVE_PATHS, READY_PATHS
from tests.deploy.command_lines import CHART, catalog_of, parsed
from tests.deploy.rendering import rendered

if find_spec("helm_python") is None or find_spec("kubernetes_validate") is None:
    pytest.skip(
        "*** THE HELM CHART IS NOT TESTED: pip install 'lora-serve[deploy]', whose wheels of "
        "Helm's library are for x86-64 ***",
        allow_module_level=True,
    )

KUBERNETES = ("1.27", "1.37")  # the oldest that Chart.yaml takes, and the newest with schemas
OF_OPERATORS = {"ScaledObject", "ServiceMonitor"}  # their schemas come with their operators
OPEN = {"auth": {"open": True}}
KEYS = {"auth": {"existingSecret": "keys"}}
CASES = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(CHART.glob("ci/*.yaml"))}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "the defaults, which have no keys": ({}, "auth.existingSecret is empty"),
    "a typo": ({**OPEN, "replica": 2}, "replica"),
    "a typo further in": ({**OPEN, "kv": {"disk": {"enable": True}}}, "enable"),
    "a text for a number": ({**OPEN, "replicas": "two"}, "replicas"),
    "a password in the URL": ({**OPEN, "kv": {"redis": {"url": "redis://:pw@cache"}}}, "url"),
    "a catalog's password in the URL": ({**OPEN, "catalog": {"url": "redis://:pw@c"}}, "url"),
    "a place that no adapter comes from": ({**OPEN, "adapters": {"resolver": ["/a"]}}, "resolver"),
    "the hub, and adapters of a volume alone": (
        {**OPEN, "adapters": {"resolver": ["hf"], "volume": {"emptyDir": {}}}},
        "adapters.resolver has hf",
    ),
    "signed KV without a secret": ({**OPEN, "kv": {"macKey": True}}, "kv.macKey"),
    "more replicas at least than at most": (
        {**OPEN, "autoscaling": {"enabled": True, "minReplicas": 9}},
        "above autoscaling.maxReplicas",
    ),
}
Document = dict[str, Any]


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    refused = {name: values for name, (values, _) in REFUSED.items()}
    more = {
        "slow": {**OPEN, "drain": {"delaySeconds": 20, "timeoutSeconds": 600}},
        "fixed": {**OPEN, "replicas": 3},
        "hub": {**OPEN, "adapters": {"resolver": ["hf"]}, "catalog": {"url": "redis://c/0"}},
        "scaled": {**OPEN, "autoscaling": {"enabled": True}},
    }
    return rendered({**CASES, **refused, **more})


def documents(results: dict[str, dict[str, Any]], case: str) -> list[Document]:
    assert "manifests" in results[case], results[case]
    texts = [t for name, t in results[case]["manifests"].items() if name.endswith(".yaml")]
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


def the(kind: str, found: list[Document]) -> Document:
    (document,) = [each for each in found if each["kind"] == kind]
    return document


def workload(found: list[Document]) -> Document:
    (document,) = [each for each in found if each["kind"] in ("Deployment", "StatefulSet")]
    return document


def pod(found: list[Document]) -> Document:
    return dict(workload(found)["spec"]["template"]["spec"])


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("case", CASES)
def test_kubernetes_takes_what_helm_makes(
    results: dict[str, dict[str, Any]], case: str, version: str
) -> None:
    import kubernetes_validate

    found = documents(results, case)
    assert len(found) >= 5
    for document in found:
        if document["kind"] not in OF_OPERATORS:
            kubernetes_validate.validate(document, version, strict=True)
    assert results[case]["lint"] == []


def test_a_misspelled_field_would_have_been_found(results: dict[str, dict[str, Any]]) -> None:
    import kubernetes_validate

    wrong = pod_of_misspelled(documents(results, next(iter(CASES))))
    with pytest.raises(kubernetes_validate.ValidationError, match="readinessProb"):
        kubernetes_validate.validate(wrong, KUBERNETES[1], strict=True)


def pod_of_misspelled(found: list[Document]) -> Document:
    document = workload(found)
    container = document["spec"]["template"]["spec"]["containers"][0]
    container["readinessProb"] = container.pop("readinessProbe")
    return document


@pytest.mark.parametrize("case", CASES)
def test_the_server_takes_the_command_and_listens_where_the_probes_ask(
    results: dict[str, dict[str, Any]], case: str
) -> None:
    found = documents(results, case)
    (container,) = pod(found)["containers"]
    engine, server = parsed(container["args"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": server.port, "metrics": server.metrics_port}
    assert server.host == server.metrics_host == "0.0.0.0"
    assert not server.allowed_hosts, "probes ask by the pod's address"
    assert engine.lora.enable_lora
    for probe, paths in {
        "startupProbe": LIVE_PATHS,
        "livenessProbe": LIVE_PATHS,
        "readinessProbe": READY_PATHS,
    }.items():
        assert container[probe]["httpGet"]["path"] in paths
        assert container[probe]["httpGet"]["port"] in ports
    for service in (each for each in found if each["kind"] == "Service"):
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= set(ports)


@pytest.mark.parametrize("case", [*CASES, "slow"])
def test_a_pod_is_given_longer_than_it_drains(
    results: dict[str, dict[str, Any]], case: str
) -> None:
    spec = pod(documents(results, case))
    (container,) = spec["containers"]
    _, server = parsed(container["args"])
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command[0] == "sleep"
    needed = int(command[1]) + server.drain_timeout
    assert spec["terminationGracePeriodSeconds"] >= needed + 10


@pytest.mark.parametrize("case", CASES)
def test_a_hole_in_the_server_gains_nothing(results: dict[str, dict[str, Any]], case: str) -> None:
    spec = pod(documents(results, case))
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    of_templates = {
        each["metadata"]["name"]
        for each in workload(documents(results, case))["spec"].get("volumeClaimTemplates", ())
    }
    assert set(mounts) == {volume["name"] for volume in spec["volumes"]} | of_templates
    writable = {name for name, mount in mounts.items() if not mount.get("readOnly")}
    assert writable <= {"tmp", "cache", "kv"}


def test_paths_in_the_command_are_mounted(results: dict[str, dict[str, Any]]) -> None:
    (container,) = pod(documents(results, "full-values"))["containers"]
    mounts = tuple(mount["mountPath"] + "/" for mount in container["volumeMounts"])
    engine, server = parsed(container["args"])
    tiers = engine.kv_tiers
    for path in (
        *(engine.model.model, server.api_key_file, server.admin_api_key_file),
        *(tiers.kv_disk_path, tiers.kv_mac_key_file, tiers.kv_redis_password_file),
        *(path + "/" for path in engine.lora.lora_allowed_roots),
        *(module.partition("=")[2] for module in engine.lora.lora_modules),
    ):
        assert str(path).startswith(mounts), path


def test_replicas_share_adapters_by_the_catalog_that_is_named(
    results: dict[str, dict[str, Any]],
) -> None:
    (container,) = pod(documents(results, "full-values"))["containers"]
    catalog = catalog_of(container["args"])
    assert catalog.lora_catalog == "rediss://catalog:6379/0"
    assert catalog.lora_catalog_name == "base"
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(catalog.lora_catalog_password_file).rpartition("/")[0] in mounts
    engine, _ = parsed(container["args"])
    assert engine.lora.lora_resolver == ("dir:/adapters", "s3://adapters/tenants")
    assert not engine.lora.lora_allow_hub
    (container,) = pod(documents(results, "hub"))["containers"]
    engine, _ = parsed(container["args"])
    assert (engine.lora.lora_resolver, engine.lora.lora_allow_hub) == (("hf",), True)
    catalog = catalog_of(container["args"])
    assert (catalog.lora_catalog, catalog.lora_catalog_password_file) == ("redis://c/0", None)
    (container,) = pod(documents(results, "fixed"))["containers"]
    assert catalog_of(container["args"]).lora_catalog is None


def test_kv_that_is_to_last_makes_it_a_stateful_set_with_room_to_spare(
    results: dict[str, dict[str, Any]],
) -> None:
    found = documents(results, "full-values")
    (claim,) = the("StatefulSet", found)["spec"]["volumeClaimTemplates"]
    engine, _ = parsed(pod(found)["containers"][0]["args"])
    assert int(claim["spec"]["resources"]["requests"]["storage"]) > engine.kv_tiers.kv_disk_bytes
    assert the("StatefulSet", found)["spec"]["serviceName"] in {
        each["metadata"]["name"] for each in found if each["kind"] == "Service"
    }
    assert the("Deployment", documents(results, "gpu-values"))


def test_the_autoscaler_alone_says_how_many_replicas_there_are(
    results: dict[str, dict[str, Any]],
) -> None:
    for case, kind in (("full-values", "ScaledObject"), ("gpu-values", "HorizontalPodAutoscaler")):
        found = documents(results, case)
        target = the(kind, found)["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) == (
            workload(found)["kind"],
            workload(found)["metadata"]["name"],
        )
        assert "replicas" not in workload(found)["spec"]
    assert workload(documents(results, "fixed"))["spec"]["replicas"] == 3


def test_the_autoscalers_query_asks_for_a_series_of_the_server(
    results: dict[str, dict[str, Any]],
) -> None:
    from lora_serve.observability.metrics import GAUGES

    found = documents(results, "full-values")
    (trigger,) = the("ScaledObject", found)["spec"]["triggers"]
    name = trigger["metadata"]["query"].removeprefix("sum(").partition("{")[0]
    assert name in GAUGES
    assert 'service="prod-lora-serve-pods"' in trigger["metadata"]["query"]


def test_selectors_find_the_pods_and_monitors_find_one_service(
    results: dict[str, dict[str, Any]],
) -> None:
    found = documents(results, "full-values")
    labels = workload(found)["spec"]["template"]["metadata"]["labels"].items()
    services = [each for each in found if each["kind"] == "Service"]
    selectors = [
        workload(found)["spec"]["selector"]["matchLabels"],
        the("PodDisruptionBudget", found)["spec"]["selector"]["matchLabels"],
        the("NetworkPolicy", found)["spec"]["podSelector"]["matchLabels"],
        *(service["spec"]["selector"] for service in services),
    ]
    assert all(selector.items() <= labels for selector in selectors)
    monitored = the("ServiceMonitor", found)["spec"]["selector"]["matchLabels"].items()
    chosen = [each for each in services if monitored <= each["metadata"]["labels"].items()]
    assert [each["metadata"]["name"] for each in chosen] == ["prod-lora-serve-pods"]


@pytest.mark.parametrize("case", REFUSED)
def test_values_that_cannot_be_meant_are_refused_by_name(
    results: dict[str, dict[str, Any]], case: str
) -> None:
    assert REFUSED[case][1] in results[case].get("error", "rendered")


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert str(chart["appVersion"]) == __version__
