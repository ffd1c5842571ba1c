"""What `lora-serve convert` does: deltas from PEFT, low-rank factors of them, and an adapter."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.adapters.checkpoint import WEIGHTS_NAME, read_adapter, stored_rows
from lora_serve.adapters.findings import listed
from lora_serve.cli.hub import prepare_hub
from lora_serve.cli.low_rank import EXACT, Factors, spectrum
from lora_serve.cli.new_directory import check_is_new, new_directory
from lora_serve.cli.peft_model import adapter_config, check_is_adapter, refuse_activated
from lora_serve.cli.weight_changes import AdaptedModel
from lora_serve.config.model import AUTO
from lora_serve.errors import AdapterFormatError, ConfigError
from lora_serve.model_info import Vocabulary
from lora_serve.models.base import adapted_modules
from lora_serve.models.source import load_spec, model_path
from lora_serve.models.weights import TensorSource, open_weights
from lora_serve.observability.table import text_table

REPORT_NAME = "conversion.json"
_LAYER = re.compile(r".*?\.\d+(?=\.)")  # of "model.layers.3.mlp.up_proj": "model.layers.3"

Shapes = Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Base:
    """The model that an adapter is for: its directory, projections and weights as served."""

    name: str
    directory: Path
    projections: Shapes
    vocabulary: Vocabulary | None
    weights: TensorSource


@dataclass(frozen=True, slots=True)
class CarriedRows:
    """Rows of embeddings and LM head, which are written as they are.

    token_ids: of each matrix of which there are some. copies: the matrices that are there whole.
    tensors: by their names. weights: the model's tensors that they change.
    """

    token_ids: dict[str, list[int]] = field(default_factory=dict)
    copies: list[str] = field(default_factory=list)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    weights: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Converted:
    """One projection's delta as factors. needed_rank: for an error of at most --max-error."""

    name: str
    factors: Factors
    needed_rank: int


def run_convert(args: argparse.Namespace) -> int:
    """Leaves either the whole adapter in OUT, or nothing.

    Raises:
        ConfigError: the model cannot be read, or the adapter is plain LoRA already.
        AdapterFormatError: it cannot be expressed, or not nearly enough; lists all findings.
    """
    _check_numbers(args)
    check_is_new(args.out)
    check_is_adapter(args.adapter)
    base = _open_base(args.base or _own_base(args.adapter))
    _refuse_plain(args.adapter, base, args.rank)
    refuse_activated(args.adapter)
    adapted = AdaptedModel(str(base.directory), args.adapter, base.projections)
    rows = _carried_rows(args.adapter, base.vocabulary)  # PEFT has read the files by now
    converted = _converted(adapted, base, args.rank, args.max_error)
    others = [name for name in adapted.other_changes() if name not in rows.weights]
    findings = _findings(converted, others, args)
    if findings:
        raise AdapterFormatError(args.adapter, findings)
    kept = [each for each in converted if each.factors.rank]
    report = _report(adapted.method, base.name, kept, others)
    with new_directory(args.out) as directory:
        _write(directory, base.name, kept, rows, report)
        _read(str(directory), base, args.rank)
    if args.json:
        print(json.dumps(report, indent=1, ensure_ascii=False))
    else:
        _show(report, kept, args)
    return 0


# ── what there is ───────────────────────────────────────────────────────────────────────────


def _check_numbers(args: argparse.Namespace) -> None:
    if args.rank < 1:
        raise ConfigError(f"--rank {args.rank}: must be at least 1")
    if not 0 < args.max_error <= 1:
        raise ConfigError(f"--max-error {args.max_error:g}: must be above 0 and at most 1")


def _own_base(adapter: str) -> str:
    """The model that the adapter names. Raises ConfigError, and AdapterFormatError."""
    name = adapter_config(adapter).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{adapter} names no model that it is for; name it: --base MODEL")
    return name


def _open_base(model: str) -> Base:
    """Raises ConfigError where it is none that can be served."""
    prepare_hub([model], None)
    directory = model_path(model, None, AUTO, with_weights=True)
    spec = load_spec(directory)
    weights = open_weights(directory, spec, AUTO, 0, torch.float32)
    weights.will_read(spec.tensor_shapes())
    return Base(model, directory, adapted_modules(spec), spec.vocabulary(), weights)


def _read(adapter: str, base: Base, rank: int) -> AdapterCheckpoint:
    """What a server reads. Raises AdapterFormatError."""
    return read_adapter(
        adapter, lora_modules=base.projections, max_lora_rank=rank, vocabulary=base.vocabulary
    )


def _carried_rows(adapter: str, vocabulary: Vocabulary | None) -> CarriedRows:
    """The rows that are stored as they are, whatever method the projections have."""
    if vocabulary is None:
        return CarriedRows()
    found = stored_rows(adapter, vocabulary)
    with safe_open(Path(adapter) / WEIGHTS_NAME, "pt") as file:
        tensors = {rows.tensor: file.get_tensor(rows.tensor) for rows in found}
    changed = {matrix for rows in found for matrix in rows.matrices_changed(found, vocabulary)}
    tokens = {rows.matrix: list(rows.token_ids) for rows in found if rows.token_ids is not None}
    copies = [rows.matrix for rows in found if rows.token_ids is None]
    return CarriedRows(tokens, copies, tensors, frozenset(f"{name}.weight" for name in changed))


def _refuse_plain(adapter: str, base: Base, rank: int) -> None:
    try:
        checkpoint = _read(adapter, base, rank)
    except AdapterFormatError:
        return
    raise ConfigError(
        f"{adapter} is a plain LoRA adapter of rank {checkpoint.rank} already; serve it as it is, "
        "or give a lower --rank"
    )


# ── what becomes of it ──────────────────────────────────────────────────────────────────────


def _converted(adapted: AdaptedModel, base: Base, rank: int, max_error: float) -> list[Converted]:
    converted = []
    for name, weight in adapted.merged_weights():
        delta = weight - base.weights.read(f"{name}.weight").double()
        found = spectrum(delta)
        converted.append(Converted(name, found.factors(rank), found.rank_for(max_error)))
    return converted


def _error(converted: Iterable[Converted]) -> float:
    """The relative error of all of them together."""
    factors = [each.factors for each in converted]
    norm = math.hypot(*(each.norm for each in factors))
    return math.hypot(*(each.error for each in factors)) / norm if norm else 0.0


def _findings(
    converted: Sequence[Converted], others: Sequence[str], args: argparse.Namespace
) -> list[str]:
    findings = []
    if not any(each.factors.rank for each in converted):
        findings.append("it changes no projection that adapters may change in this model")
    if others and not args.partial:
        findings.append(
            f"it changes what LoRA on projections cannot hold: {listed(others)}; --partial leaves "
            "that out"
        )
    if (error := _error(converted)) > args.max_error:
        needed = max(each.needed_rank for each in converted)
        findings.append(
            f"its relative error at rank {args.rank} would be {error:.2g}, above --max-error "
            f"{args.max_error:g}; --rank {needed} would do, or merge it into the model"
        )
    return findings


def _report(
    method: str, base: str, kept: Sequence[Converted], others: Sequence[str]
) -> dict[str, object]:
    return {
        "method": method,
        "base_model": base,
        "rank": max(each.factors.rank for each in kept),
        "relative_error": _error(kept),
        "left_out": list(others),
        "projections": [
            {"name": each.name, "rank": each.factors.rank, "relative_error": _error([each])}
            for each in kept
        ],
    }


def _write(
    directory: Path,
    base: str,
    kept: Sequence[Converted],
    rows: CarriedRows,
    report: Mapping[str, object],
) -> None:
    ranks = {each.name: each.factors.rank for each in kept}
    highest = max(ranks.values())
    lower = {name: rank for name, rank in ranks.items() if rank < highest}
    config = LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        r=highest,
        lora_alpha=highest,
        target_modules=sorted(ranks),
        rank_pattern=lower,
        alpha_pattern=lower,
        inference_mode=True,
        trainable_token_indices=rows.token_ids or None,
        modules_to_save=rows.copies or None,
    )
    directory.mkdir()
    config.save_pretrained(str(directory))
    tensors = {
        f"base_model.model.{each.name}.lora_{side}.weight": tensor
        for each in kept
        for side, tensor in (("A", each.factors.a), ("B", each.factors.b))
    }
    tensors |= rows.tensors
    save_file(tensors, directory / WEIGHTS_NAME, metadata={"format": "pt"})
    (directory / REPORT_NAME).write_text(json.dumps(report, indent=1) + "\n")


# ── what is told ────────────────────────────────────────────────────────────────────────────


def _show(
    report: Mapping[str, object], kept: Sequence[Converted], args: argparse.Namespace
) -> None:
    layers: dict[str, list[Converted]] = {}
    for each in kept:
        match = _LAYER.match(each.name)
        layers.setdefault(match[0] if match else each.name, []).append(each)
    rows = [_row(layer, of_layer) for layer, of_layer in layers.items()]
    print(text_table(("layer", "projections", "rank", "error"), [*rows, _row("all", kept)]))
    if others := report["left_out"]:
        assert isinstance(others, list)
        print(f"left out: {listed(others)}")
    is_exact = _error(kept) <= EXACT
    print(
        f"converted {args.adapter} ({report['method']}) to LoRA of rank {report['rank']}, "
        + ("exact to float32" if is_exact else "the nearest of that rank")
        + f": {args.out}"
    )


def _row(name: str, converted: Sequence[Converted]) -> tuple[str, ...]:
    rank = max(each.factors.rank for each in converted)
    return name, str(len(converted)), str(rank), f"{_error(converted):.1e}"
