"""Reads a PEFT LoRA checkpoint: checks all of it, then holds exactly the bytes it digested.

An adapter that needs more than `y += scale * (x @ a.T) @ b.T` and rows of embeddings and LM head is
refused, with all findings at once. Only what PEFT ignores is ignored, and never in silence. Knows
nothing of names, versions or memory, and touches no tensor.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from lora_serve.adapter_checkpoint import (
    AdapterCheckpoint,
    LoRAModule,
    ModuleBias,
    RawTensor,
    num_tensor_bytes,
)
from lora_serve.adapters.adapter_tensors import (
    Adaptable,
    AdapterTensors,
    Shapes,
    check_tensors,
    own_shapes_of,
    read_tensors,
)
from lora_serve.adapters.directory import AdapterDirectory, open_directory
from lora_serve.adapters.experts import is_of_all_experts
from lora_serve.adapters.findings import shown
from lora_serve.adapters.peft_config import LoRASettings, parse_settings
from lora_serve.adapters.strict_json import parse_object
from lora_serve.adapters.tensor_file import TensorFile
from lora_serve.adapters.vocabulary import RowsInFile, find_rows, own_vocabulary, surely_kept
from lora_serve.errors import (
    AdapterChangedError,
    AdapterError,
    AdapterFormatError,
    AdapterNotFoundError,
)
from lora_serve.identity import framed
from lora_serve.model_info import Vocabulary

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
DIGEST_NAME = "adapter_digest.txt"  # the digest that the adapter must have, if it lies there
_MODEL_CONFIG = "config.json"
_PICKLES = ("adapter_model.bin", "adapter_model.pt")
_MAX_DIGEST_BYTES = 256
_MAX_CONFIG_BYTES = 4 * 2**20
_SCHEME = b"lora-serve/adapter/1"


def read_adapter(
    path: str,
    *,
    lora_modules: Shapes,
    max_lora_rank: int,
    vocabulary: Vocabulary | None = None,
    max_vocab_bytes: int | None = None,
    max_expert_rank: int | None = None,
    allowed_roots: Sequence[str] = (),
) -> AdapterCheckpoint:
    """Read and check the adapter in directory `path`.

    Args:
        path: a directory with adapter_config.json and adapter_model.safetensors.
        lora_modules, max_lora_rank, vocabulary, max_vocab_bytes, max_expert_rank: as of Adaptable.
        allowed_roots: directories below which all that is read must lie; anywhere if empty.

    Returns:
        The adapter. Its tensors are read-only views of one buffer that is not shared.

    Raises:
        AdapterNotFoundError: there is no adapter at `path`.
        AdapterFormatError: it cannot be served; lists every finding.
        AdapterError: the system would not let us read it.
    """
    adaptable = Adaptable(lora_modules, max_lora_rank, vocabulary, max_vocab_bytes, max_expert_rank)
    with _opened(path, allowed_roots) as directory:
        return _read(directory, adaptable)


def check_adapter(
    path: str,
    *,
    lora_modules: Shapes | None,
    max_lora_rank: int,
    vocabulary: Vocabulary | None = None,
    max_vocab_bytes: int | None = None,
    max_expert_rank: int | None = None,
    allowed_roots: Sequence[str] = (),
) -> None:
    """Check the adapter in directory `path` as `read_adapter` does, without its tensors' bytes.

    Args:
        path, max_lora_rank, vocabulary, max_vocab_bytes, max_expert_rank, allowed_roots: as of
            read_adapter.
        lora_modules: as of read_adapter; None where the model is not known, then only the config
            is checked.

    Raises:
        AdapterNotFoundError, AdapterFormatError, AdapterError: as read_adapter.
    """
    findings: list[str] = []
    with _opened(path, allowed_roots) as directory:
        settings = _lora_settings(directory, findings)
        with _weights(directory, findings) as file:
            if file is not None and lora_modules is not None:
                adaptable = Adaptable(
                    lora_modules, max_lora_rank, vocabulary, max_vocab_bytes, max_expert_rank
                )
                check_tensors(file, settings, adaptable, findings)
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


def own_shapes(path: str) -> tuple[Shapes, Vocabulary | None]:
    """What a model must have for the tensors in directory `path`, as their shapes say.

    With these `lora_modules` and this `vocabulary` `read_adapter` finds all that can be found
    without the model. Of LoRA of all experts together that is nothing.

    Raises:
        AdapterNotFoundError, AdapterError: as read_adapter.
        AdapterFormatError: it is LoRA of all experts together.
    """
    with _opened(path, ()) as directory, _weights(directory, []) as file:
        specs = (None if file is None else file.read_header([])) or {}
    if any(map(is_of_all_experts, specs)):
        told = "it has LoRA of all experts together, whose parts its model tells apart: name that"
        raise AdapterFormatError(path, [f"{told}, with --base MODEL"])
    return own_shapes_of(specs), own_vocabulary(specs)


def stored_rows(path: str, vocabulary: Vocabulary | None) -> list[RowsInFile]:
    """The rows of tokens in directory `path` that stand for themselves, however the rest is stored.

    Raises:
        AdapterNotFoundError, AdapterFormatError, AdapterError: as read_adapter, for its config.
    """
    with _opened(path, ()) as directory:
        settings = _read_settings(directory, [])
        with _weights(directory, []) as file:
            specs = None if file is None else file.read_header([])
    return surely_kept(find_rows(specs or {}, settings, vocabulary, []))


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


def _read(directory: AdapterDirectory, adaptable: Adaptable) -> AdapterCheckpoint:
    findings: list[str] = []
    settings = _lora_settings(directory, findings)
    tensors = AdapterTensors()
    with _weights(directory, findings) as file:
        if file is not None:
            tensors = read_tensors(file, settings, adaptable, findings)
    if findings:
        raise AdapterFormatError(directory.path, findings)
    found = digest(tensors.modules, settings.invocation_tokens, tensors.stored_rows, tensors.biases)
    _check_sidecar(directory, found)
    checkpoint = AdapterCheckpoint(
        path=directory.path,
        digest=found,
        rank=max((module.rank for module in tensors.modules), default=0),
        num_bytes=0,
        base_model=settings.base_model,
        modules=tensors.modules,
        invocation_tokens=settings.invocation_tokens,
        token_rows=tensors.token_rows,
        biases=tensors.biases,
        ignored=tensors.ignored,
    )
    return replace(checkpoint, num_bytes=num_tensor_bytes(checkpoint))


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


def digest(
    modules: Sequence[LoRAModule],
    invocation_tokens: Sequence[int] = (),
    stored_rows: Sequence[tuple[RowsInFile, RawTensor]] = (),
    biases: Sequence[ModuleBias] = (),
) -> bytes:
    """SHA-256 over all that shapes the delta: names, ranks, scales, dtypes, shapes and bytes.

    And, of an activated LoRA, over the tokens that say where it begins; and over rows of tokens, as
    the file has them: what they change depends on the model, which is in KV's identity by itself.
    """
    sha = hashlib.sha256(framed(_SCHEME))
    if invocation_tokens:
        sha.update(framed(b"from", _int64s(invocation_tokens)))
    for module in sorted(modules, key=lambda module: module.name):
        scale = struct.pack("<d", module.scale)
        sha.update(framed(module.name.encode(), module.rank.to_bytes(8, "little"), scale))
        _add_tensors(sha, (module.a, module.b))
    for rows, tensor in stored_rows:
        ids = b"all" if rows.token_ids is None else _int64s(rows.token_ids)
        sha.update(framed(b"rows", rows.matrix.encode(), rows.kind.value.encode(), ids))
        _add_tensors(sha, (tensor,))
    for bias in biases:
        scale = b"" if bias.scale is None else struct.pack("<d", bias.scale)
        sha.update(framed(b"bias", bias.name.encode(), scale))
        _add_tensors(sha, (bias.values,))
    return sha.digest()


def _int64s(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def _add_tensors(sha: hashlib._Hash, tensors: Sequence[RawTensor]) -> None:
    for tensor in tensors:
        shape = struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape)
        sha.update(framed(tensor.dtype.encode(), shape))
        # `framed` once more, without a copy of what may be hundreds of megabytes.
        sha.update(len(tensor.data).to_bytes(8, "little"))
        sha.update(tensor.data)


def _lora_settings(directory: AdapterDirectory, findings: list[str]) -> LoRASettings:
    """The settings of a LoRA.

    Raises:
        AdapterFormatError: it is of another method, whose tensors mean nothing.
    """
    settings = _read_settings(directory, findings)
    if not settings.is_lora:
        raise AdapterFormatError(directory.path, findings)
    return settings


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
