"""A run of `lora-serve check`: the server, the probes, the table and the files."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import ssl
import sys

from lora_serve.check.adapters import Workspace
from lora_serve.check.catalog import chosen
from lora_serve.check.facts import discover
from lora_serve.check.files import save_json, save_junit
from lora_serve.check.lab import Lab
from lora_serve.check.report import Report, listing
from lora_serve.check.runner import exit_code, run
from lora_serve.check.server import Server, Target
from lora_serve.check.subjects import AskedModel, Settings
from lora_serve.cli.server_arguments import ADMIN_KEYS, chosen_key, key_in_file
from lora_serve.errors import ConfigError


def run_check(args: argparse.Namespace) -> int:
    """0 if every probe passed or is not supported, 1 if one failed, 2 if it could not be run."""
    probes = chosen(args.probe)
    if args.list:
        print(listing(probes))
        return 0
    if not args.url:
        raise ConfigError("name the server: lora-serve check http://localhost:8000")
    return asyncio.run(_check(args, _target(args), _settings(args)))


async def _check(args: argparse.Namespace, target: Target, settings: Settings) -> int:
    probes, outcomes = chosen(args.probe), []
    report = Report(sys.stdout, probes, colours=_wants_colours())
    with Workspace(args.workspace, args.workspace_on_server) as workspace:
        async with Server(target) as server:
            facts = await discover(server, args.model, settings.num_prompt_tokens, settings.nonce)
            report.start(target, facts, settings.tolerance)
            lab = Lab(server, facts, settings, workspace)
            try:
                async for outcome in run(lab, probes, target.timeout_seconds):
                    report.add(outcome)
                    outcomes.append(outcome)
            finally:
                await lab.forget_references()
    report.finish(outcomes, settings.tolerance)
    if args.json:
        save_json(args.json, target, facts, settings.tolerance, outcomes)
    if args.junit:
        save_junit(args.junit, target, outcomes)
    return exit_code(outcomes)


def _target(args: argparse.Namespace) -> Target:
    if args.timeout <= 0:
        raise ConfigError(f"--timeout {args.timeout:g} must be above 0")
    admin_key = os.environ.get(ADMIN_KEYS[0], "")
    if args.admin_api_key_file is not None:
        admin_key = key_in_file(args.admin_api_key_file, "--admin-api-key-file")
    return Target(
        url=args.url,
        api_key=chosen_key(args, os.environ) or "",
        admin_api_key=admin_key,
        verify=_verification(args),
        timeout_seconds=args.timeout,
    )


def _verification(args: argparse.Namespace) -> ssl.SSLContext | bool:
    if args.insecure:
        return False
    if args.cacert is None:
        return True
    try:
        return ssl.create_default_context(cafile=args.cacert)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--cacert {args.cacert}: {error}") from error


def _settings(args: argparse.Namespace) -> Settings:
    for flag, values in (("--adapter", args.adapter), ("--served-adapter", args.served_adapter)):
        if len(values) not in (0, 2):
            raise ConfigError(f"{flag} is given {len(values)} times; give it twice, or not at all")
    if not 0 <= args.tolerance < 1:
        raise ConfigError(f"--tolerance {args.tolerance:g} must be at least 0 and below 1")
    if args.prompt_tokens < 1 or args.pressure_requests < 1:
        raise ConfigError("--prompt-tokens and --pressure-requests must be at least 1")
    return Settings(
        tolerance=args.tolerance,
        adapters=tuple(args.adapter),
        served=tuple(map(_speaker, args.served_adapter)),
        model_path=args.model_path,
        num_prompt_tokens=args.prompt_tokens,
        num_pressing=args.pressure_requests,
        nonce=secrets.token_hex(4),
    )


def _speaker(text: str) -> AskedModel:
    """NAME, or NAME=JSON with the fields that ask for the adapter; NAME may be the model's."""
    name, _, fields = text.partition("=")
    try:
        more = json.loads(fields) if fields else {}
    except ValueError as error:
        raise ConfigError(f"--served-adapter {text}: no JSON after the =: {error}") from error
    if not name or not isinstance(more, dict):
        raise ConfigError(f"--served-adapter {text}: must be NAME or NAME=JSON, a JSON object")
    return AskedModel(name, more)


def _wants_colours() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
