"""Adapter directories: files that lie, that are no files, and that change while they are read."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from lora_serve.adapters.checkpoint import CONFIG_NAME, WEIGHTS_NAME, digest, read_adapter
from lora_serve.errors import AdapterError, AdapterNotFoundError
from tests.adapters.test_checkpoint_fuzz import JSON, KEYS, PATTERNS
from tests.fakes.adapter_files import header_of, lora_tensors, peft_config, safetensors_bytes
from tests.hostile.harness import run_long, run_quick
from tests.hostile.mutations import LITERALS, NUMBERS, harmed

MODULES = {"model.layers.0.self_attn.q_proj": (8, 8), "model.layers.0.mlp.up_proj": (12, 8)}
TENSORS = lora_tensors(MODULES, rank=2)
CONFIG = json.dumps(peft_config({"r": 2})).encode()
WEIGHTS = safetensors_bytes(TENSORS)
OTHER = safetensors_bytes(lora_tensors(MODULES, rank=2, seed=1))


@st.composite
def configs(draw: st.DrawFn) -> bytes:
    changed = draw(st.dictionaries(KEYS, JSON, max_size=3))
    return json.dumps(peft_config({"r": 2, "rank_pattern": draw(PATTERNS)} | changed)).encode()


OFFSETS = st.integers(0, 4).map(lambda i: [64 * i, 64 * i + 64])  # as long as most tensors are


@st.composite
def weights(draw: st.DrawFn) -> bytes:
    """Entries that overlap, leave gaps, or claim more than there is."""
    header = header_of(TENSORS.items())
    for name in draw(st.lists(st.sampled_from(sorted(TENSORS)), max_size=3)):
        key = draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
        value = draw(
            st.lists(NUMBERS, max_size=4) | OFFSETS | JSON | st.sampled_from(["F64", "I8", "F16"])
        )
        header[name] = {**header[name], key: value}  # type: ignore[dict-item]
    return safetensors_bytes(TENSORS, header)


@st.composite
def diverged(draw: st.DrawFn) -> bytes:
    """Weights of which one number is, or may be, none."""
    at = len(WEIGHTS) - 4 * draw(st.integers(1, 50))
    number = draw(st.sampled_from([b"\0\0\x80\x7f", b"\1\0\xc0\xff", b"\xff\xff\x7f\x7f"]))
    return WEIGHTS[:at] + number + WEIGHTS[at + 4 :]


CONTENTS = {
    CONFIG_NAME: st.just(CONFIG) | harmed(CONFIG) | configs() | LITERALS.map(str.encode),
    WEIGHTS_NAME: st.just(WEIGHTS)
    | harmed(WEIGHTS)
    | weights()
    | diverged()
    | st.binary(max_size=50),
}
KINDS = (
    "file",
    "file",
    "file",
    "fifo",
    "directory",
    "missing",
    "loop",
    "zeros",
    "link",
    "changing",
)
CASES = st.fixed_dictionaries(
    {name: st.tuples(st.sampled_from(KINDS), data) for name, data in CONTENTS.items()}
)


def place(path: Path, kind: str, content: bytes) -> None:
    match kind:
        case "file" | "changing":
            path.write_bytes(content)
        case "fifo":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "loop":
            path.symlink_to(path)
        case "zeros":
            path.symlink_to("/dev/zero")
        case "link":
            target = path.with_suffix(".target")
            target.write_bytes(content)
            path.symlink_to(target)


@contextmanager
def changing(paths: list[Path]) -> Iterator[None]:
    """Others write to these files, and put others in their place, all the time."""
    over = threading.Event()

    def write() -> None:
        while not over.is_set():
            for path in paths:
                for data in (WEIGHTS[:50], OTHER, WEIGHTS):
                    path.write_bytes(data)
                fresh = path.with_suffix(".fresh")
                fresh.write_bytes(OTHER)
                fresh.replace(path)

    writer = threading.Thread(target=write)
    if paths:
        writer.start()
    try:
        yield
    finally:
        over.set()
        if paths:
            writer.join()


def check(case: object) -> None:
    assert isinstance(case, dict)
    with tempfile.TemporaryDirectory() as directory:
        for name, (kind, content) in case.items():
            place(Path(directory, name), kind, content)
        moving = [Path(directory, name) for name, (kind, _) in case.items() if kind == "changing"]
        with changing(moving):
            try:
                checkpoint = read_adapter(directory, lora_modules=MODULES, max_lora_rank=4)
            except (AdapterError, AdapterNotFoundError) as error:
                check_refusal(error)
                return
        assert checkpoint.digest == digest(checkpoint.modules), "it is what was digested"
        kind, content = case[WEIGHTS_NAME]
        if kind != "changing":
            assert checkpoint.num_bytes == num_data_bytes(content), (
                "each byte belongs to one tensor"
            )
        for module in checkpoint.modules:
            for tensor in (module.a, module.b):
                if tensor.dtype == "F32":
                    assert np.isfinite(np.frombuffer(tensor.data, "<f4")).all()


def num_data_bytes(weights: bytes) -> int:
    return len(weights) - 8 - int.from_bytes(weights[:8], "little")


def check_refusal(error: Exception) -> None:
    assert 0 < len(str(error).encode()) < 10_000


def test_no_directory_harms_the_server() -> None:
    run_quick(CASES, check, 400)


@pytest.mark.slow
def test_no_directory_harms_the_server_for_minutes() -> None:
    assert run_long(CASES, check)
