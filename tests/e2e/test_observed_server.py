"""What a server with tiers and adapters shows: its series, as dashboards ask for them; its log."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from lora_serve.demo.server_process import ServerProcess, free_port
from tests.e2e.conftest import StartServer, ready

DEPLOY = Path(__file__).parents[2] / "deploy"
OF_PROMETHEUS = frozenset({"instance", "job"})  # labels that a scrape adds
VARIABLES = {"$__rate_interval": "5m", "$instance": ".*"}
SECRET = "which nobody else may read"


@pytest.fixture(scope="module")
def observed(
    model_path: Path,
    adapter_paths: list[Path],
    tmp_path_factory: pytest.TempPathFactory,
    start_server: StartServer,
) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("observed")
    flags = (
        *("--enable-lora", "--lora-modules", f"a={adapter_paths[0]}"),
        *("--lora-catalog", str(directory / "catalog")),
        *("--kv-ram-bytes", "16MiB", "--kv-disk-path", str(directory / "kv")),
        *("--log-format", "json", "--log-stats-interval", "0.2", "--kv-cache-memory-bytes", "8MiB"),
    )
    with start_server(model_path, directory / "log", *flags) as process:
        yield ready(process)


@pytest.fixture(scope="module")
def samples(observed: ServerProcess) -> dict[str, set[str]]:
    """The names of all samples at /metrics, with their labels' names."""
    with httpx.Client(base_url=observed.base_url) as client:
        body = {"model": "a", "prompt": SECRET * 4, "max_tokens": 100}
        assert client.post("/v1/completions", json=body).status_code == 200
        client.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "/nothing"})
        time.sleep(1.1)  # a page is kept for a second
        page = client.get("/metrics").text
    found: dict[str, set[str]] = {"up": set(OF_PROMETHEUS)}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, set(OF_PROMETHEUS)).update(sample.labels)
    return found


@dataclass
class Asked:
    """What an expression asks for: labels by series, and those that it groups by."""

    series: dict[str, set[str]] = field(default_factory=dict)
    grouped: set[str] = field(default_factory=set)

    def read(self, node: Any) -> Asked:
        if isinstance(node, promql.VectorSelector):
            labels = self.series.setdefault(node.name, set())
            labels.update(matcher.name for matcher in node.matchers.matchers)
        elif isinstance(node, promql.MatrixSelector):
            self.read(node.vector_selector)
        elif isinstance(node, promql.BinaryExpr):
            self.read(node.lhs).read(node.rhs)
        elif isinstance(node, promql.Call):
            for argument in node.args:
                self.read(argument)
        elif isinstance(node, promql.AggregateExpr):
            self.grouped.update(node.modifier.labels if node.modifier else ())
            self.read(node.expr)
        else:
            assert isinstance(node, promql.NumberLiteral), f"{node} is not looked into"
        return self


def rules() -> dict[str, str]:
    (group,) = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"]
    return {rule["alert"]: rule["expr"] for rule in group["rules"]}


def panels() -> dict[str, str]:
    board = json.loads((DEPLOY / "grafana" / "lora-serve.json").read_text())
    return {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in board["panels"]
        for target in panel["targets"]
    }


@pytest.mark.parametrize("expression", [*rules().values(), *panels().values()])
def test_dashboard_and_alerts_ask_for_what_a_server_shows(
    expression: str, samples: dict[str, set[str]]
) -> None:
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    asked = Asked().read(promql.parse(expression))
    assert asked.series
    for series, labels in asked.series.items():
        assert series in samples, f"{series} is not at /metrics"
        missing = (labels | asked.grouped) - samples[series]
        assert not missing, f"{series} has no label {missing}"


def test_texts_of_the_dashboard_name_labels_that_their_queries_keep() -> None:
    board = json.loads((DEPLOY / "grafana" / "lora-serve.json").read_text())
    for panel in board["panels"]:
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                grouped = f"by ({label})" in target["expr"]
                is_bare = "by (" not in target["expr"] and "sum(" not in target["expr"]
                assert grouped or is_bare, target


def test_the_log_tells_of_requests_and_throughput_and_never_of_prompts(
    observed: ServerProcess, samples: object
) -> None:
    text = Path(observed.log_path).read_text()
    assert SECRET not in text
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    (access,) = [line for line in lines if line.get("route") == "/v1/completions"]
    assert (access["status"], access["lora_name"], access["by"]) == (200, "a", "no key")
    assert access["generated_tokens"] > 0
    assert 0 <= access["queue_seconds"] <= access["first_token_seconds"] <= access["total_seconds"]
    assert any("generation_throughput" in line for line in lines)


def test_a_log_that_nobody_reads_stops_no_answer(model_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "lora_serve.cli.main", "serve", str(model_path)]
    command += ["--port", str(port), "--log-prompts", "--max-log-len", "1000"]
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert server.stdout is not None
    assert server.stderr is not None
    try:
        assert b"ready" in server.stdout.readline()
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            body = {"prompt": "x" * 900, "max_tokens": 1}
            for _ in range(200):  # some 200 KiB: more than a pipe keeps
                assert client.post("/v1/completions", json=body).status_code == 200
    finally:
        server.terminate()
        server.stdout.close()
        assert server.wait(30) == 0
        server.stderr.close()
