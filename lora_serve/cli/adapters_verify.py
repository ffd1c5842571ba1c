"""`lora-serve adapters verify`: what a server would say of an adapter's files."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.adapters.checkpoint import CONFIG_NAME, own_shapes, read_adapter
from lora_serve.adapters.findings import listed
from lora_serve.cli.hub import is_hub_id, prepare_hub
from lora_serve.demo.smollm2 import named_model
from lora_serve.errors import AdapterFormatError, ConfigError, LoraServeError
from lora_serve.model_info import Vocabulary
from lora_serve.observability.sizes import shown_bytes

EXIT_REFUSED = 1

# (out_features, in_features) of each projection that adapters may change, and the vocabulary.
Shapes = tuple[Mapping[str, tuple[int, int]], Vocabulary | None]


def run_verify(args: argparse.Namespace) -> int:
    """Tell of each adapter all that is wrong, or what it is; 1 if any is refused.

    Raises:
        ConfigError: --base is no model that can be served.
    """
    shapes = shapes_of(args.base) if args.base else None
    reports = [_report(path, args, shapes) for path in args.paths]
    if args.json:
        print(json.dumps(reports, indent=1, ensure_ascii=False))
    else:
        for report in reports:
            _show(report)
    return EXIT_REFUSED if any(report["findings"] for report in reports) else 0


def shapes_of(model: str) -> Shapes:
    """What adapters may change of a model. Raises ConfigError."""
    from lora_serve.models.base import adapted_modules  # imports torch
    from lora_serve.models.source import load_spec, model_path

    prepare_hub([model], None)
    model = named_model(model, lambda line: print(f"lora-serve: {line}", file=sys.stderr))
    directory = model_path(model, None, "auto", with_weights=False)
    spec = load_spec(directory, "auto")
    return adapted_modules(spec), spec.vocabulary()


def _report(path: str, args: argparse.Namespace, shapes: Shapes | None) -> dict[str, object]:
    base = args.base
    if shapes is None:
        base, shapes = _own_base(path)
    found = os.path.realpath(os.path.expanduser(path))
    try:
        lora_modules, vocabulary = own_shapes(found) if shapes is None else shapes
        checkpoint = read_adapter(
            found,
            lora_modules=lora_modules,
            max_lora_rank=args.max_lora_rank,
            vocabulary=vocabulary,
        )
    except AdapterFormatError as error:
        return {"path": path, "base": base, "findings": error.findings}
    except LoraServeError as error:
        return {"path": path, "base": base, "findings": [str(error)]}
    return {"path": path, "base": base, "findings": [], **_facts(checkpoint)}


def _own_base(path: str) -> tuple[str | None, Shapes | None]:
    """The model that the adapter names and its shapes, where that lies on this machine."""
    try:
        config = json.loads((Path(path).expanduser() / CONFIG_NAME).read_bytes())
        name = config["base_model_name_or_path"]
    except (OSError, ValueError, TypeError, KeyError):
        return None, None
    if not isinstance(name, str) or is_hub_id(name) or not Path(name).is_dir():
        return None, None
    try:
        return name, shapes_of(name)
    except ConfigError:
        return None, None


def _facts(checkpoint: AdapterCheckpoint) -> dict[str, object]:
    return {
        "digest": checkpoint.digest.hex(),
        "rank": checkpoint.rank,
        "num_bytes": checkpoint.num_bytes,
        "trained_on": checkpoint.base_model or None,
        "modules": [module.name for module in checkpoint.modules],
        "token_rows": {rows.name: rows.rows.shape[0] for rows in checkpoint.token_rows},
        "biases": [bias.name for bias in checkpoint.biases],
        "ignored": list(checkpoint.ignored),
    }


def _show(report: Mapping[str, object]) -> None:
    findings, path = report["findings"], report["path"]
    assert isinstance(findings, list)
    if findings:
        print(f"{path}: refused")
        for finding in findings:
            print(f"  - {finding}")
        return
    modules, num_bytes = report["modules"], report["num_bytes"]
    assert isinstance(modules, list)
    assert isinstance(num_bytes, int)
    token_rows = report["token_rows"]
    assert isinstance(token_rows, dict)
    if report["base"] is None:
        print(f"{path}: good by itself; whether it fits a model is not known: add --base MODEL")
    else:
        print(f"{path}: good, for {report['base']}")
    print(f"  digest   {report['digest']}")
    print(f"  rank     {report['rank']}, {shown_bytes(num_bytes)}")
    if modules:
        print(f"  modules  {len(modules)}: {_kinds(modules)}")
    for name, count in token_rows.items():
        print(f"  rows     {count} of {name}")
    biases, ignored = report["biases"], report["ignored"]
    assert isinstance(biases, list)
    assert isinstance(ignored, list)
    if biases:
        print(f"  biases   {len(biases)}: {_kinds(biases)}")
    if ignored:
        print(f"  ignored  {len(ignored)} tensors, by its config as by PEFT: {listed(ignored)}")
    print(f"  trained  on {report['trained_on'] or 'a model that it does not name'}")


def _kinds(modules: Sequence[str]) -> str:
    """Such as "q_proj × 24, v_proj × 24"."""
    kinds: dict[str, int] = {}
    for module in modules:
        kind = module.rpartition(".")[2]
        kinds[kind] = kinds.get(kind, 0) + 1
    return ", ".join(f"{kind} × {count}" for kind, count in sorted(kinds.items()))
