"""Renders the Helm chart, with Helm's own library, in a process of its own.

python -m tests.deploy.rendering reads a JSON object on stdin, values by a name, and writes one:
for each name `manifests`, the documents by template, or `error`, Helm's own words.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from tests.deploy.command_lines import CHART

Values = Mapping[str, Any]


def rendered(values: Mapping[str, Values]) -> dict[str, dict[str, Any]]:
    """What Helm makes of each. Its Go runtime brings threads and handlers of signals along."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.deploy.rendering"],
        input=json.dumps(values),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def main() -> None:
    import helm_python

    results: dict[str, dict[str, Any]] = {}
    with helm_python.Chart.load(CHART) as chart:
        for name, values in json.load(sys.stdin).items():
            try:
                chart.validate_schema(values)
                manifests = chart.render(values=values, name="prod", namespace="llm")
                results[name] = {"manifests": manifests}
                report = helm_python.chart.lint(CHART, values=values, strict=True)
                results[name]["lint"] = report["errors"]
            except helm_python.HelmError as error:
                results[name] = {"error": str(error)}
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
