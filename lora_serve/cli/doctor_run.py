"""A run of `lora-serve doctor`: all findings, worst last, where a reader looks first."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import asdict

from lora_serve import __version__
from lora_serve.cli.doctor_finding import Finding, Level
from lora_serve.cli.doctor_machine import machine_findings
from lora_serve.cli.doctor_software import software_findings
from lora_serve.errors import ConfigError

EXIT_CANNOT_START = 1
WIDTH, TITLE_WIDTH = 100, 14
MARKS = {Level.FACT: " ", Level.HINT: "·", Level.WARNING: "!", Level.ERROR: "✗"}
COLOURS = {Level.WARNING: "\x1b[33m", Level.ERROR: "\x1b[31m"}
PLAIN = "\x1b[0m"


def run_doctor(args: argparse.Namespace) -> int:
    """Show all findings; 1 if a server could not start."""
    num_ranks = args.tensor_parallel_size
    if num_ranks < 1:
        raise ConfigError(f"--tensor-parallel-size {num_ranks} must be at least 1")
    findings = [*machine_findings(), *software_findings()]
    if num_ranks > 1:
        from lora_serve.cli.doctor_ranks import place_findings  # imports torch

        findings += place_findings(num_ranks)
    if args.model:
        from lora_serve.cli.doctor_model import model_findings  # imports torch

        findings += model_findings(args.model, num_ranks)
    can_start = all(each.level is not Level.ERROR for each in findings)
    if args.json:
        listed = [asdict(each) | {"level": each.level.value} for each in findings]
        print(json.dumps({"can_start": can_start, "findings": listed}, indent=1))
    else:
        _show(findings)
    return 0 if can_start else EXIT_CANNOT_START


def _show(findings: Iterable[Finding]) -> None:
    print(f"lora-serve {__version__}")
    for each in findings:
        print(_line(each))
        if each.remedy:
            print(_indented(f"→ {each.remedy}"))
    levels = [each.level for each in findings]
    print()
    if Level.ERROR in levels:
        print(f"✗ A server cannot start here: {_number(levels, Level.ERROR)} to mend.")
    elif Level.WARNING in levels:
        print(f"! A server can start here; {_number(levels, Level.WARNING)} to look at.")
    else:
        print("A server can start here.")


def _number(levels: list[Level], level: Level) -> str:
    count = levels.count(level)
    return f"{count} thing{'s' * (count > 1)} (marked {MARKS[level]})"


def _line(finding: Finding) -> str:
    mark = MARKS[finding.level]
    if sys.stdout.isatty() and finding.level in COLOURS:
        mark = f"{COLOURS[finding.level]}{mark}{PLAIN}"
    return f"{mark} {finding.subject:<{TITLE_WIDTH}}{_indented(finding.told).lstrip()}"


def _indented(text: str) -> str:
    indent = " " * (TITLE_WIDTH + 2)
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent)
