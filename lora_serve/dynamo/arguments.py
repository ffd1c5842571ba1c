"""The flags of a Dynamo worker: Dynamo's own, and those of `lora-serve serve` for an engine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from dynamo.common.configuration.groups.runtime_args import (
    DynamoRuntimeArgGroup,
    DynamoRuntimeConfig,
)
from dynamo.common.utils.runtime import parse_endpoint

from lora_serve.cli.arguments import engine_config
from lora_serve.cli.environment import with_settings
from lora_serve.cli.parser import OneLineParser
from lora_serve.cli.serve import add_arguments
from lora_serve.config import EngineConfig
from lora_serve.errors import ConfigError


class WorkerArguments(DynamoRuntimeConfig):
    """What Dynamo reads of it. component: the last but one word of the endpoint."""

    component: str


def worker_arguments(
    argv: Sequence[str] | None = None,
) -> tuple[WorkerArguments, EngineConfig]:
    """Read them. Raises ConfigError: no model is named, or a setting cannot be."""
    parser = argparse.ArgumentParser(prog="python -m lora_serve.dynamo", allow_abbrev=False)
    DynamoRuntimeArgGroup().add_arguments(parser)
    known, rest = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    dynamo: WorkerArguments = WorkerArguments.from_cli_args(known)
    dynamo.validate()
    endpoint = dynamo.endpoint or f"dyn://{dynamo.namespace}.backend.generate"
    dynamo.namespace, dynamo.component, dynamo.endpoint = parse_endpoint(endpoint)
    engine = OneLineParser(prog="python -m lora_serve.dynamo")
    add_arguments(engine)
    config = engine_config(with_settings(engine.parse_args(rest), os.environ))
    if not config.model.model:
        raise ConfigError("no model: give a directory or a hub id")
    return dynamo, config
