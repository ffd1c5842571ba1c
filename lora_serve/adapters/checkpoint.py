"""Reads a PEFT LoRA checkpoint: checks all of it, then holds exactly the bytes it digested.

An adapter that needs more than `y += scale * (x @ a.T) @ b.T` is refused, with all findings at
once; no part of it is ever ignored in silence. Knows nothing of names, versions or memory, and
touches no tensor.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from lora_serve.adapter_checkpoint import AdapterCheckpoint, LoRAModule, RawTensor
from lora_serve.adapters.directory import AdapterDirectory, open_directory
from lora_serve.adapters.findings import listed, shown
from lora_serve.adapters.peft_config import LoRASettings, parse_settings
from lora_serve.adapters.strict_json import parse_object
from lora_serve.adapters.tensor_file import TensorFile, TensorSpec
from lora_serve.errors import (
    AdapterChangedError,
    AdapterError,
    AdapterFormatError,
    AdapterNotFoundError,
)
from lora_serve.identity import framed

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
DIGEST_NAME = "adapter_digest.txt"  # the digest that the adapter must have, if it lies there
_MODEL_CONFIG = "config.json"
_PICKLES = ("adapter_model.bin", "adapter_model.pt")
_MAX_DIGEST_BYTES = 256
_MAX_CONFIG_BYTES = 4 * 2**20
_SCHEME = b"lora-serve/adapter/1"

_TENSOR_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])\.weight", re.DOTALL)

Shapes = Mapping[str, tuple[int, int]]


def read_adapter(
    path: str, *, lora_modules: Shapes, max_lora_rank: int, allowed_roots: Sequence[str] = ()
) -> AdapterCheckpoint:
    """Read and check the adapter in directory `path`.

    Args:
        path: a directory with adapter_config.json and adapter_model.safetensors.
        lora_modules: (out_features, in_features) of each projection an adapter may change.
        max_lora_rank: highest rank of any module.
        allowed_roots: directories below which all that is read must lie; anywhere if empty.

    Returns:
        The adapter. Its tensors are read-only views of one buffer that is not shared.

    Raises:
        AdapterNotFoundError: there is no adapter at `path`.
        AdapterFormatError: it cannot be served; lists every finding.
        AdapterError: the system would not let us read it.
    """
    with _opened(path, allowed_roots) as directory:
        return _read(directory, lora_modules, max_lora_rank)


def check_adapter(
    path: str,
    *,
    lora_modules: Shapes | None,
    max_lora_rank: int,
    allowed_roots: Sequence[str] = (),
) -> None:
    """Check the adapter in directory `path` as `read_adapter` does, without its tensors' bytes.

    Args:
        path, max_lora_rank, allowed_roots: as of read_adapter.
        lora_modules: as of read_adapter; None where the model is not known, then only the config
            is checked.

    Raises:
        AdapterNotFoundError, AdapterFormatError, AdapterError: as read_adapter.
    """
    findings: list[str] = []
    with _opened(path, allowed_roots) as directory:
        settings = _read_settings(directory, findings)
        with _weights(directory, findings) as file:
            if file is not None and lora_modules is not None:
                _check_tensors(file, settings, lora_modules, max_lora_rank, findings)
    if findings:
        raise AdapterFormatError(path, findings)


def check_has_weights(path: str) -> None:
    """Raise for a directory whose weights other programs would look for in pickles, or elsewhere.

    Raises:
        AdapterNotFoundError, AdapterError: as read_adapter.
        AdapterFormatError: it has no safetensors file of weights.
    """
    findings: list[str] = []
    with _opened(path, ()) as directory, _weights(directory, findings):
        if findings:
            raise AdapterFormatError(path, findings)


def own_shapes(path: str) -> Shapes:
    """What `lora_modules` must hold for the tensors in directory `path`, as their shapes say.

    With them `read_adapter` finds all that can be found without the model.

    Raises:
        AdapterNotFoundError, AdapterError: as read_adapter.
    """
    shapes: dict[str, tuple[int, int]] = {}
    with _opened(path, ()) as directory, _weights(directory, []) as file:
        specs = None if file is None else file.read_header([])
    for name, spec in (specs or {}).items():
        match = _TENSOR_NAME.fullmatch(name)
        if match is not None and len(spec.shape) == 2:
            num_out, num_in = shapes.get(match[1], (0, 0))
            is_a = match[2] == "A"
            shapes[match[1]] = (num_out, spec.shape[1]) if is_a else (spec.shape[0], num_in)
    return shapes


@contextmanager
def _opened(path: str, allowed_roots: Sequence[str]) -> Iterator[AdapterDirectory]:
    """The adapter's directory; what the system refuses is told as an error of the adapter."""
    with ExitStack() as stack:
        try:
            directory = stack.enter_context(open_directory(path, allowed_roots))
        except (FileNotFoundError, NotADirectoryError, ValueError) as error:
            raise AdapterNotFoundError(
                f"No adapter found for {path}: there is no such directory"
            ) from error
        except OSError as error:
            raise AdapterError(f"{path}: cannot be read: {error.strerror or error}") from error
        with _told_as_adapter_errors(path):
            yield directory


@contextmanager
def _told_as_adapter_errors(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise AdapterError(f"{path}: cannot be read: {error.strerror or error}") from error


def _read(
    directory: AdapterDirectory, lora_modules: Shapes, max_lora_rank: int
) -> AdapterCheckpoint:
    findings: list[str] = []
    settings = _read_settings(directory, findings)
    modules: tuple[LoRAModule, ...] = ()
    with _weights(directory, findings) as file:
        if file is not None:
            modules = _read_modules(file, settings, lora_modules, max_lora_rank, findings)
    if findings:
        raise AdapterFormatError(directory.path, findings)
    found = digest(modules, settings.invocation_tokens)
    _check_sidecar(directory, found)
    return AdapterCheckpoint(
        path=directory.path,
        digest=found,
        rank=max(module.rank for module in modules),
        num_bytes=sum(len(module.a.data) + len(module.b.data) for module in modules),
        base_model=settings.base_model,
        modules=modules,
        invocation_tokens=settings.invocation_tokens,
    )


def _check_sidecar(directory: AdapterDirectory, found: bytes) -> None:
    """Raise AdapterChangedError if a file beside the weights names another digest."""
    try:
        with directory.open_file(DIGEST_NAME) as file:
            wanted = file.read(_MAX_DIGEST_BYTES).decode("ascii", "replace").strip().lower()
    except FileNotFoundError:
        return
    if wanted != found.hex():
        raise AdapterChangedError(
            f"{directory.path} has the digest {found.hex()}, and its {DIGEST_NAME} says "
            f"{shown(wanted)}; restore the files, or write that file anew",
            found_digest=found.hex(),
        )


@contextmanager
def _weights(directory: AdapterDirectory, findings: list[str]) -> Iterator[TensorFile | None]:
    """The adapter's tensors, still unread; None, and a finding, where there is no such file."""
    try:
        weights = directory.open_file(WEIGHTS_NAME)
    except FileNotFoundError:
        findings.append(_missing_weights(directory))
        yield None
    else:
        with weights:
            yield TensorFile(weights)


def digest(modules: tuple[LoRAModule, ...], invocation_tokens: Sequence[int] = ()) -> bytes:
    """SHA-256 over all that shapes the delta: names, ranks, scales, dtypes, shapes and bytes.

    And, of an activated LoRA, over the tokens that say where it begins.
    """
    sha = hashlib.sha256(framed(_SCHEME))
    if invocation_tokens:
        sha.update(framed(b"from", struct.pack(f"<{len(invocation_tokens)}q", *invocation_tokens)))
    for module in sorted(modules, key=lambda module: module.name):
        scale = struct.pack("<d", module.scale)
        sha.update(framed(module.name.encode(), module.rank.to_bytes(8, "little"), scale))
        for tensor in (module.a, module.b):
            shape = struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape)
            sha.update(framed(tensor.dtype.encode(), shape))
            # `framed` once more, without a copy of what may be hundreds of megabytes.
            sha.update(len(tensor.data).to_bytes(8, "little"))
            sha.update(tensor.data)
    return sha.digest()


def _read_settings(directory: AdapterDirectory, findings: list[str]) -> LoRASettings:
    path = directory.path
    try:
        file = directory.open_file(CONFIG_NAME)
    except FileNotFoundError as error:
        message = f"No adapter found for {path}: the directory has no {CONFIG_NAME}"
        if directory.has(_MODEL_CONFIG):
            message += (
                f", but a {_MODEL_CONFIG}: it holds a model, which is served as MODEL; an adapter "
                "is what PEFT's save_pretrained writes"
            )
        raise AdapterNotFoundError(message) from error
    with file:
        data = file.read(_MAX_CONFIG_BYTES + 1)
    if len(data) > _MAX_CONFIG_BYTES:
        raise AdapterFormatError(path, [f"{CONFIG_NAME} is longer than {_MAX_CONFIG_BYTES} bytes"])
    config = parse_object(data, CONFIG_NAME, findings)
    if config is not None and "peft_type" not in config:
        # Not of PEFT, so none of its words is told to a caller who may not know them.
        findings.append(f"{CONFIG_NAME} has no peft_type, so it describes no adapter")
    if config is None or findings:
        raise AdapterFormatError(path, findings)  # without ranks, no tensor can be judged
    return parse_settings(config, findings)


def _missing_weights(directory: AdapterDirectory) -> str:
    for name in _PICKLES:
        if directory.has(name):
            source = os.path.join(directory.path, name)
            target = os.path.join(directory.path, WEIGHTS_NAME)
            script = (
                "import sys, torch, safetensors.torch as s; "
                "w = torch.load(sys.argv[1], map_location='cpu', weights_only=True); "
                "s.save_file({k: v.clone().contiguous() for k, v in w.items()}, sys.argv[2])"
            )
            command = shlex.join(["python", "-c", script, source, target])
            return f"{name} is a pickle, which can run code; convert it with: {command}"
    return f"there is no {WEIGHTS_NAME}"


def _read_modules(
    file: TensorFile,
    settings: LoRASettings,
    lora_modules: Shapes,
    max_lora_rank: int,
    findings: list[str],
) -> tuple[LoRAModule, ...]:
    """All modules by name, or findings. Reads no tensor while there are findings."""
    checked = _check_tensors(file, settings, lora_modules, max_lora_rank, findings)
    if checked is None or findings:
        return ()
    specs, pairs = checked
    tensors = file.read_tensors(specs, findings)
    return tuple(
        _module(name, settings, tensors[pair["A"]], tensors[pair["B"]])
        for name, pair in sorted(pairs.items())
    )


def _check_tensors(
    file: TensorFile,
    settings: LoRASettings,
    lora_modules: Shapes,
    max_lora_rank: int,
    findings: list[str],
) -> tuple[Mapping[str, TensorSpec], Mapping[str, Mapping[str, str]]] | None:
    """What the file's header says: all tensors, and their names by module and side."""
    specs = file.read_header(findings)
    if specs is None:
        return None
    pairs = _pair(specs, lora_modules, findings)
    ranks = {module: settings.rank_of(module) for module in pairs}
    _check_shapes(pairs, specs, ranks, lora_modules, findings)
    _check_ranks(ranks, max_lora_rank, findings)
    return specs, pairs


def _module(name: str, settings: LoRASettings, a: RawTensor, b: RawTensor) -> LoRAModule:
    rank = a.shape[0]  # as its settings say: the shapes were checked
    return LoRAModule(name, rank, settings.scale_of(name, rank), a, b)


def _pair(
    specs: Mapping[str, TensorSpec], lora_modules: Shapes, findings: list[str]
) -> dict[str, dict[str, str]]:
    """Tensor names by module and side ("A", "B"). Any other tensor is a finding."""
    pairs: dict[str, dict[str, str]] = {}
    strangers = []
    for name in specs:
        match = _TENSOR_NAME.fullmatch(name)
        if match is None or match[1] not in lora_modules:
            strangers.append(name)
        elif match[2] in pairs.setdefault(match[1], {}):
            findings.append(f"lora_{match[2]} of {match[1]} stands there twice")
        else:
            pairs[match[1]][match[2]] = name
    if strangers:
        served = sorted({module.rpartition(".")[2] for module in lora_modules})
        findings.append(
            f"tensors that are no lora_A or lora_B of a projection adapters may change here "
            f"({', '.join(served)} of this model's layers): {listed(sorted(strangers))}"
        )
    elif not specs:
        findings.append("it holds no tensor, so it would be the base model under another name")
    return pairs


def _check_shapes(
    pairs: Mapping[str, Mapping[str, str]],
    specs: Mapping[str, TensorSpec],
    ranks: Mapping[str, int],
    lora_modules: Shapes,
    findings: list[str],
) -> None:
    missing, misshapen = [], []
    for module, pair in sorted(pairs.items()):
        out_features, in_features = lora_modules[module]
        rank = ranks[module]
        for side, expected in (("A", (rank, in_features)), ("B", (out_features, rank))):
            if side not in pair:
                missing.append(f"{module}.lora_{side}.weight")
            elif (shape := specs[pair[side]].shape) != expected:
                misshapen.append(f"{module}.lora_{side}.weight: {shape}, not {expected}")
    if missing:
        findings.append(f"one of a pair is missing: {listed(missing)}")
    if misshapen:
        findings.append(
            f"shapes that do not fit this model and the ranks of {CONFIG_NAME}: {listed(misshapen)}"
        )


def _check_ranks(ranks: Mapping[str, int], max_lora_rank: int, findings: list[str]) -> None:
    rank = max(ranks.values(), default=0)
    if rank > max_lora_rank:
        findings.append(
            f"LoRA rank {rank} is greater than max_lora_rank {max_lora_rank}; raise "
            "--max-lora-rank, or retrain"
        )
