from __future__ import annotations

import ctypes
import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as GgmlType
from safetensors.torch import load_file, save_file

from lora_serve import file_identity
from lora_serve.config import CacheConfig, LoRAConfig, ModelConfig
from lora_serve.errors import ConfigError
from lora_serve.folders.folder import Folder
from lora_serve.identity import BASE_MODEL
from lora_serve.models.kept_weights.cache import SUFFIX, WeightsCache, key_of, open_cache
from lora_serve.models.kept_weights.file import Taken
from lora_serve.models.kept_weights.reader import KeptReader, NotingReader
from lora_serve.models.weights import RandomWeights
from lora_serve.ops._cpu import usable_paths
from lora_serve.ops.cpu.backend import CpuKernels
from lora_serve.ops.kept_packing import NotAsKeptError
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import SampleInput, ScheduledRequest, SchedulerOutput
from lora_serve.worker.worker import Worker
from tests.fakes.asked import sampling
from tests.fakes.gguf_files import save_gguf
from tests.fakes.tiny_models import ALL_MODELS, VOCAB_SIZE, save

PROMPT = [(11 * i + 3) % VOCAB_SIZE for i in range(40)]
ALL_LOGPROBS = SamplingParams(temperature=0.0, logprobs=VOCAB_SIZE)
Start = Callable[..., tuple[str, object, bytes]]
READ, MAPPED = "weights read and packed", "packed weights checked and mapped"


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints that a test has just written are kept."""
    monkeypatch.setattr(file_identity, "SETTLED_SECONDS", -1.0)


@pytest.fixture
def where(tmp_path: Path) -> Path:
    return tmp_path / "kept"


@pytest.fixture
def start(where: Path, caplog: pytest.LogCaptureFixture) -> Start:
    """Starts a worker; gives what was done for its weights, its answer, and its fingerprint."""

    def start(model: Path, path: Path | None = where, **settings: Any) -> tuple[str, object, bytes]:
        config = ModelConfig(
            model=str(model),
            tokenizer=str(model),
            weights_cache_path=None if path is None else str(path),
            **settings,
        )
        worker = Worker(
            config, CacheConfig(num_gpu_blocks_override=8), LoRAConfig(), 1, len(PROMPT)
        )
        caplog.clear()
        with caplog.at_level(logging.INFO):
            info = worker.load()
        (done,) = [
            line.partition(":")[0] for line in caplog.messages if line.startswith((READ, MAPPED))
        ]
        request = ScheduledRequest(
            request_id="r",
            adapter=BASE_MODEL,
            start=0,
            token_ids=PROMPT,
            block_tables=[range(3)] * len(info.kv_groups),
            asked=sampling(SampleInput(ALL_LOGPROBS, 0, len(PROMPT))),
        )
        worker.submit(SchedulerOutput(1, (request,)))
        return done, worker.collect().requests, info.fingerprint

    return start


def kept(where: Path, count: int = 1) -> list[Path]:
    """The files, once there are so many; a thread writes them."""
    deadline = time.monotonic() + 60
    while len(files := sorted(where.glob(f"*{SUFFIX}"))) != count:
        assert time.monotonic() < deadline, f"{len(files)} files, not {count}"
        time.sleep(0.005)
    return files


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return saved("qwen2-one-layer", tmp_path / "model")


def saved(name: str, directory: Path) -> Path:
    save(ALL_MODELS[name].make(), directory)
    return directory


# ── the same bits ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen2-one-layer", {"dtype": "bfloat16"}),
        ("qwen2-one-layer", {"quantization": "int4", "quantize_activations": True}),
        ("qwen2-moe-one-layer", {}),
        ("gpt-oss", {}),
        ("llama", {"quantization": "int8"}),
        ("gemma2-two-layers", {}),
        ("starcoder2", {"model_impl": "transformers"}),
    ],
    ids=str,
)
def test_the_second_start_maps_what_the_first_packed(
    name: str, settings: dict[str, Any], tmp_path: Path, where: Path, start: Start
) -> None:
    model = saved(name, tmp_path / "model")
    _, *alone = start(model, None, **settings)
    assert start(model, **settings) == (READ, *alone)
    kept(where)
    assert start(model, **settings) == (MAPPED, *alone)


def test_values_that_are_not_finite_are_told_at_each_start(
    model: Path, where: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, name = model / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(path)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, path)
    config = ModelConfig(model=str(model), tokenizer=str(model), weights_cache_path=str(where))
    for _ in range(2):
        caplog.clear()
        Worker(config, CacheConfig(num_gpu_blocks_override=8), LoRAConfig(), 1, 8).load()
        (line,) = [line for line in caplog.messages if "NaN" in line]
        assert line.startswith(f"the checkpoint has infinite or NaN values in {name}: answers")
    assert not list(where.glob(f"*{SUFFIX}"))


def test_codes_of_a_checkpoint_are_kept(tmp_path: Path, where: Path, start: Start) -> None:
    """The codes of experts are, too."""
    model = ALL_MODELS["olmoe"].make()
    file = save_gguf(model, tmp_path / "m.gguf", lambda _: GgmlType.Q4_0)
    _, *alone = start(file, None)
    assert start(file) == (READ, *alone)
    kept(where)
    assert start(file) == (MAPPED, *alone)


def test_a_screen_is_made_again_of_its_parts() -> None:
    packing = CpuKernels("avx2" if "avx2" in usable_paths() else usable_paths()[0], 1).packing
    weight = torch.randn(100, 64)
    noted = packing.note()
    screen, none = packing.screen(weight), packing.screen(torch.full((100, 64), torch.inf))
    assert screen is not None
    assert none is None
    packing.use(noted)
    again = packing.screen(weight.to("meta"))
    assert again is not None
    assert [contents(part) for part in again.parts] == [contents(part) for part in screen.parts]
    assert packing.screen(weight.to("meta")) is None


def contents(part: tuple[int, int]) -> bytes:
    address, count = part
    return bytes((ctypes.c_ubyte * count).from_address(address))


# ── what is not the same is not taken ───────────────────────────────────────────────────────────


def test_a_checkpoint_that_was_written_over_is_read_again(
    model: Path, where: Path, start: Start
) -> None:
    """Its names, size and time of writing are as before."""
    first = start(model)
    kept(where)
    file = model / "model.safetensors"
    before = file.stat()
    content = bytearray(file.read_bytes())
    part = len(content) // 4
    content[-2 * part :] = content[-part:] * 2
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    second = start(model)
    assert second == (READ, *start(model, None)[1:])
    assert second[1] != first[1]


def test_a_config_that_was_written_over_is_read_again(
    model: Path, where: Path, start: Start
) -> None:
    """It may say what codes mean, such as those of GPTQ."""
    start(model)
    kept(where)
    config = model / "config.json"
    config.write_text(config.read_text() + " ")
    assert start(model)[0] == READ


def test_settings_that_shape_packed_weights_have_files_of_their_own(
    model: Path, where: Path, start: Start
) -> None:
    for count, settings in enumerate(
        [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}], start=1
    ):
        assert start(model, **settings) == (READ, *start(model, None, **settings)[1:])
        kept(where, count)


@pytest.mark.parametrize("place", [0.001, 0.4, 0.95, -20.0, -2.0], ids=str)
def test_a_damaged_file_is_replaced(
    place: float, model: Path, where: Path, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """place: a part of the file, or so many bytes from its end."""
    _, *alone = start(model)
    (file,) = kept(where)
    content = bytearray(file.read_bytes())
    content[int(place * len(content)) if place > 0 else int(place)] ^= 1
    file.write_bytes(content)
    assert start(model) == (READ, *alone)
    assert "are not used, the checkpoint is read: " in caplog.text
    until_replaced(file, bytes(content))
    assert start(model) == (MAPPED, *alone)


@pytest.mark.parametrize("left", [0, 10, 70, 1000, -1], ids=str)
def test_a_file_that_was_cut_is_replaced(left: int, model: Path, where: Path, start: Start) -> None:
    _, *alone = start(model)
    (file,) = kept(where)
    cut = file.read_bytes()[:left]
    file.write_bytes(cut)
    assert start(model) == (READ, *alone)
    until_replaced(file, cut)


def until_replaced(file: Path, content: bytes) -> None:
    deadline = time.monotonic() + 60
    while not file.exists() or file.read_bytes() == content:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_checkpoint_that_changed_just_now_is_not_kept(
    model: Path, where: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_identity, "SETTLED_SECONDS", 3600.0)
    assert start(model)[0] == READ
    assert key_of([model / "model.safetensors"], []) is None
    assert not list(where.glob("*"))


def test_a_reader_gives_nothing_that_was_not_kept() -> None:
    shapes = {"a.weight": (4, 4), "norm.weight": (4,)}
    source = RandomWeights(shapes, 0, torch.float32)
    taken = Taken(digests={"norm.weight": "00"}, matrices={"b.weight": (4, 4)}, codes={})
    reader = KeptReader(source, torch.float32, taken, {})
    for take in (reader.take_matrix, reader.take_table, reader.take):
        with pytest.raises(NotAsKeptError, match=r"^a\.weight"):
            take("a.weight")
    with pytest.raises(NotAsKeptError, match=r"norm\.weight has other numbers than before"):
        reader.take("norm.weight")


def test_packing_gives_nothing_else_than_was_kept() -> None:
    packing = CpuKernels(usable_paths()[0], 1).packing
    noted = packing.note()
    packing.weight(torch.randn(8, 8))
    packing.stop()
    packing.use(noted)
    with pytest.raises(NotAsKeptError, match=r"torch.float32 \(8, 8\) was kept, not .*\(8, 9\)"):
        packing.weight(torch.empty(8, 9, device="meta"))
    with pytest.raises(NotAsKeptError, match="nothing was kept"):
        packing.weight(torch.empty(8, 8, device="meta"))


# ── bounds, and whose it is ─────────────────────────────────────────────────────────────────────


def test_what_was_used_longest_ago_gives_way(
    model: Path, where: Path, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    start(model, dtype="bfloat16")
    (first,) = kept(where)
    room = first.stat().st_size + 100
    os.utime(first, (1, 1))
    start(model, dtype="float16", weights_cache_bytes=room)
    until_gone(first)
    kept(where)
    start(model, weights_cache_bytes=room)
    deadline = time.monotonic() + 60
    while "--weights-cache-bytes allows" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert len(kept(where)) == 1


def until_gone(file: Path) -> None:
    deadline = time.monotonic() + 60
    while file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_full_disk_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Folder, "free_bytes", lambda _: 2**29)
    source = RandomWeights({}, 0, torch.float32)
    reader = NotingReader(source, torch.float32, lambda _: None, keeps_codes=False)
    cache = WeightsCache(open_cache(tmp_path / "new"), 2**40)
    other = tmp_path / "new" / f"other{SUFFIX}"
    other.write_bytes(b"of another model")
    cache.keep_later("key", reader, [])
    deadline = time.monotonic() + 60
    while not caplog.messages:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert caplog.messages == [
        "--weights-cache-path: packed weights are not kept for the next start: they take 0 bytes, "
        "and the disk has 512 MiB, of which 1.0 GiB stay free; make room on it, or name a "
        "directory of another disk"
    ]
    assert other.exists(), "deleted in vain"


def test_a_directory_that_cannot_be_written_to_is_used(
    model: Path, where: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(model)
    kept(where)

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Folder, "set_time", refuse)
    assert start(model)[0] == MAPPED


def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match=r"--weights-cache-path .* but weights must lie where"):
        open_cache(tmp_path)
