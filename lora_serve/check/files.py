"""Outcomes as files for programs: JSON with every request, JUnit for continuous integration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from lora_serve import __version__
from lora_serve.check.facts import Facts
from lora_serve.check.findings import Exchange
from lora_serve.check.probe import Outcome, Verdict
from lora_serve.check.report import as_command
from lora_serve.check.server import Target, without_keys
from lora_serve.check.shown import shown
from lora_serve.errors import ConfigError

MAX_BODY_CHARS = 1_000_000
LINE_CHARS = 4000


def save_json(
    path: Path, target: Target, facts: Facts, tolerance: float, outcomes: Sequence[Outcome]
) -> None:
    """Raises ConfigError if the file cannot be written."""
    document = {
        "lora_serve": __version__,
        "server": without_keys(target).url,
        "facts": {**asdict(facts), "cold_way": facts.cold_way.name.lower()},
        "tolerance": tolerance,
        "probes": [_outcome(outcome) for outcome in outcomes],
    }
    _write(path, json.dumps(document, indent=1, default=str) + "\n")


def save_junit(path: Path, target: Target, outcomes: Sequence[Outcome]) -> None:
    """Raises ConfigError if the file cannot be written."""
    verdicts = [outcome.verdict for outcome in outcomes]
    suite = ElementTree.Element(
        "testsuite",
        name="lora-serve check",
        hostname=shown(without_keys(target).url),
        tests=str(len(outcomes)),
        failures=str(verdicts.count(Verdict.FAIL)),
        errors=str(verdicts.count(Verdict.ERROR)),
        skipped=str(verdicts.count(Verdict.UNSUPPORTED)),
        time=f"{sum(outcome.seconds for outcome in outcomes):.3f}",
    )
    for outcome in outcomes:
        _add_case(suite, outcome)
    text = ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)
    _write(path, text + "\n")


def _outcome(outcome: Outcome) -> dict[str, Any]:
    return {
        "name": outcome.probe.name,
        "proves": outcome.probe.proves,
        "needs": [need.value for need in outcome.probe.needs],
        "verdict": outcome.verdict.name.lower(),
        "seconds": round(outcome.seconds, 3),
        "note": outcome.note,
        "finding": asdict(outcome.violation) if outcome.violation else None,
        # Bodies of requests are for repeating what was found, and nothing is to be repeated else.
        "requests": [_exchange(one) for one in outcome.exchanges] if outcome.violation else [],
    }


def _exchange(exchange: Exchange) -> dict[str, Any]:
    body = json.dumps(exchange.body)
    is_whole = len(body) <= MAX_BODY_CHARS
    return {
        "method": exchange.method,
        "path": exchange.path,
        "body": exchange.body if is_whole else f"{body[:MAX_BODY_CHARS]}…",
        "status": exchange.status,
        "reply": exchange.reply,
    }


def _add_case(suite: ElementTree.Element, outcome: Outcome) -> None:
    case = ElementTree.SubElement(
        suite,
        "testcase",
        classname="lora-serve.check",
        name=outcome.probe.name,
        time=f"{outcome.seconds:.3f}",
    )
    note = shown(outcome.note, LINE_CHARS)
    if outcome.verdict is Verdict.UNSUPPORTED:
        ElementTree.SubElement(case, "skipped", message=note)
    elif outcome.verdict is Verdict.ERROR:
        ElementTree.SubElement(case, "error", message=note)
    elif outcome.violation is not None:
        violation, lines = outcome.violation, []
        for name, text in (
            ("first differ", violation.where),
            ("right", violation.right),
            ("answered", violation.wrong),
            ("hint", violation.hint),
        ):
            lines += [f"{name}: {shown(line, LINE_CHARS)}" for line in text.splitlines()]
        lines += [shown(as_command(one), LINE_CHARS) for one in outcome.exchanges[-12:]]
        failure = ElementTree.SubElement(case, "failure", message=note)
        failure.text = "\n".join(lines)
    else:
        ElementTree.SubElement(case, "system-out").text = note


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
