"""Prometheus' own tool reads the alert rules, and each alert comes when it shall."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

HERE = Path(__file__).parent
RULES = HERE.parents[1] / "deploy" / "prometheus" / "alerts.yaml"
DASHBOARD = HERE.parents[1] / "deploy" / "grafana" / "lora-serve.json"
UNIT_TESTS = HERE / "alerts.test.yaml"

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="*** NO PROMTOOL: the alerts are not tried; apt-get install prometheus ***",
)


def promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_the_rules_are_rules() -> None:
    promtool("check", "rules", str(RULES))


@needs_promtool
def test_each_alert_comes_when_it_shall_and_not_before() -> None:
    promtool("test", "rules", str(UNIT_TESTS))


def test_every_alert_has_a_unit_test_and_says_what_to_do() -> None:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    tried = UNIT_TESTS.read_text()
    for rule in group["rules"]:
        assert f'alertname="{rule["alert"]}"' in tried
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_what_an_alert_looks_at_is_on_the_dashboard() -> None:
    """Who is called sees at once since when, and on which servers."""
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    board = json.loads(DASHBOARD.read_text())
    shown = " ".join(target["expr"] for panel in board["panels"] for target in panel["targets"])
    for rule in group["rules"]:
        for series in re.findall(r"\b(?:lora_serve|vllm):\w+", rule["expr"]):
            assert series in shown, f"{rule['alert']}: {series}"
