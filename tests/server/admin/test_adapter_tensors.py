"""Adapters that come in bodies: what is read of a payload, and what becomes of the files."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import pickle
import shutil
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import safetensors.torch
import torch

from lora_serve.adapters.checkpoint import read_adapter
from lora_serve.config import EngineConfig, LoRAConfig, ServerConfig
from lora_serve.errors import AdapterError, AdapterUnavailableError
from lora_serve.server.admin.adapter_spool import AdapterSpool, reading_spool
from lora_serve.server.admin.adapter_tensors import check_checksums, read_tensors
from lora_serve.server.app import create_app
from tests.fakes.adapter_files import peft_config
from tests.fakes.engine import FakeEngine, write_adapter
from tests.server.clients import client_for, error_of

URL = "/load_lora_adapter_from_tensors"
A, B = "base_model.model.layers.0.q.lora_A.weight", "base_model.model.layers.0.q.lora_B.weight"
SHAPES = {"layers.0.q": (6, 4)}
CONFIG = peft_config({"r": 2, "target_modules": ["q"]})


def tensors(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        A: torch.randn(2, 4, generator=generator).to(dtype),
        B: torch.randn(6, 2, generator=generator).to(dtype),
    }


def saved(value: object) -> str:
    file = io.BytesIO()
    torch.save(value, file)
    return base64.b64encode(file.getvalue()).decode()


def as_safetensors(value: dict[str, torch.Tensor]) -> str:
    return base64.b64encode(safetensors.torch.save(value)).decode()


def checksums(value: dict[str, torch.Tensor]) -> dict[str, str]:
    return {
        name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in value.items()
    }


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[AdapterSpool]:
    spool = AdapterSpool(10_000, tmp_path)
    yield spool
    spool.close()


@pytest.fixture
async def client(engine: FakeEngine, spool: AdapterSpool) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(engine, ServerConfig(max_lora_body_bytes=50_000), spool=spool)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


def body(payload: str, **fields: object) -> dict[str, object]:
    given = {"lora_name": "policy", "config_dict": CONFIG, "serialized_named_tensors": [payload]}
    return {**given, **fields}


def files(spool: AdapterSpool) -> set[str]:
    return {entry.name for entry in os.scandir(spool.path) if entry.is_dir()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("write", [saved, as_safetensors])
def test_the_files_are_the_adapter_that_a_directory_would_be(
    spool: AdapterSpool, tmp_path: Path, dtype: torch.dtype, write: object
) -> None:
    assert callable(write)
    given = tensors(dtype=dtype)
    directory = tmp_path / "saved"
    directory.mkdir()
    safetensors.torch.save_file(given, directory / "adapter_model.safetensors")
    path = spool.write(CONFIG, read_tensors(write(given)))
    shutil.copy(Path(path) / "adapter_config.json", directory)
    read, expected = (
        read_adapter(str(place), lora_modules=SHAPES, max_lora_rank=8)
        for place in (path, directory)
    )
    assert read.digest == expected.digest
    assert read.modules == expected.modules


def test_views_and_parameters_are_read_as_the_values_that_they_show() -> None:
    transposed = {name: t.t().contiguous().t() for name, t in tensors().items()}
    parameters = torch.nn.ParameterDict({"a": tensors()[A]})
    check_checksums(read_tensors(saved(transposed)), checksums(tensors()))
    expected = checksums({"a": tensors()[A]})
    for given in (dict(parameters), parameters.state_dict()):
        check_checksums(read_tensors(saved(given)), expected)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ("", "neither a zip file"),
        ("a===", "no base64"),
        ("YQ==YQ==", "padding before its end"),
        ("ü", "no base64"),
        (base64.b64encode(pickle.dumps({"a": 1})).decode(), "MultiprocessingSerializer"),
        (base64.b64encode(pickle.dumps({"a": 1}, 2)).decode(), "MultiprocessingSerializer"),
        (base64.b64encode(b"PK\x03\x04" + bytes(100)).decode(), "does not end with its directory"),
        (saved({}), "holds 0 tensors"),
        (saved(torch.zeros(2)), "no dict"),
        (saved({"a": 1}), "no tensor"),
        (saved({"a": {"b": torch.zeros(1)}}), "no tensor"),
        (saved({1: torch.zeros(2)}), "no text"),
        (saved({"a": torch.zeros(0, 2)}), "has the shape (0, 2)"),
        (saved({"a": torch.tensor(1.0)}), "has the shape ()"),
        (saved({"a": torch.zeros(2, dtype=torch.int8)}), "adapters cannot have"),
        (saved({"a": torch.zeros(1).expand(2**40)}), "declare 4398046511104 bytes"),
        (saved({str(i): torch.zeros(8).expand(64, 8) for i in range(99)}), "were sent"),
        (base64.b64encode((2**60).to_bytes(8, "little") + b"{}").decode(), "neither a zip file"),
        (base64.b64encode((2).to_bytes(8, "little") + b"{]").decode(), "cannot be read"),
    ],
)
def test_what_is_no_adapter_is_refused(payload: str, message: str) -> None:
    with pytest.raises(AdapterError, match=r"serialized_named_tensors") as caught:
        read_tensors(payload)
    assert message in str(caught.value)


class Runs:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self._path),)


def test_nothing_in_a_payload_is_run(tmp_path: Path) -> None:
    for value in (Runs(tmp_path / "made"), {"a": Runs(tmp_path / "made")}):
        with pytest.raises(AdapterError):
            read_tensors(saved(value))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({A: "0" * 64}, f"1 different ('{A}')"),
        ({"other": "0" * 64}, "1 missing ('other')"),
    ],
)
def test_checksums_must_fit_every_tensor(change: dict[str, str], message: str) -> None:
    found = read_tensors(saved(tensors()))
    expected = checksums(tensors())
    check_checksums(found, expected)
    with pytest.raises(AdapterError) as caught:
        check_checksums(found, {**expected, **change})
    assert message in str(caught.value)
    del expected[B]
    with pytest.raises(AdapterError, match="1 not expected"):
        check_checksums(found, expected)


def test_files_are_their_users_alone_and_go_with_the_server(spool: AdapterSpool) -> None:
    path = Path(spool.write(CONFIG, read_tensors(saved(tensors()))))
    for directory in (path, path.parent):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}
    spool.close()
    assert not path.parent.exists()


def test_files_are_bounded_together(tmp_path: Path) -> None:
    given = read_tensors(saved(tensors()))
    spool = AdapterSpool(600, tmp_path)  # each has 40 bytes of tensors, and 249 of its config
    first = spool.write(CONFIG, given)
    spool.settle(first)
    spool.write(CONFIG, given)
    with pytest.raises(AdapterUnavailableError, match="--max-lora-spool-bytes 600"):
        spool.write(CONFIG, given)
    spool.remove(spool.settled)
    spool.write(CONFIG, given)
    spool.close()


async def test_a_replaced_or_unloaded_adapter_leaves_no_files(
    engine: FakeEngine, client: httpx.AsyncClient, spool: AdapterSpool, tmp_path: Path
) -> None:
    answer = (await client.post(URL, json=body(saved(tensors()), pinned=True))).json()
    (info,) = await engine.list_adapters()
    assert answer["loaded_adapters"] == {"policy": info.path}
    assert info.pinned
    assert len(files(spool)) == 1
    assert (await client.post(URL, json=body(saved(tensors(1))))).status_code == 200
    (newer,) = await engine.list_adapters()
    assert newer.digest != info.digest
    assert files(spool) == {Path(newer.path).name}
    error_of(await client.post(URL, json=body(saved(tensors()), load_inplace=False)), 400)
    assert files(spool) == {Path(newer.path).name}
    replaced = {"lora_name": "policy", "lora_path": write_adapter(tmp_path / "other", "OTHER")}
    assert (await client.post("/load_lora_adapter", json=replaced)).status_code == 200
    assert files(spool) == set()
    await client.post(URL, json=body(saved(tensors())))
    await client.post("/unload_lora_adapter", json={"lora_name": "policy"})
    assert files(spool) == set()


async def test_files_of_a_version_that_requests_still_have_stay(
    engine: FakeEngine, client: httpx.AsyncClient, spool: AdapterSpool
) -> None:
    await client.post(URL, json=body(saved(tensors())))
    (old,) = await engine.list_adapters()
    engine.leased_paths = {old.path}
    await client.post(URL, json=body(saved(tensors(1))))
    assert len(files(spool)) == 2
    engine.leased_paths = set()
    await client.post(URL, json=body(saved(tensors(2))))
    assert len(files(spool)) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"load_format": "flattened_bucket"}, "load_format"),
        ({"serialized_named_tensors": []}, "serialized_named_tensors"),
        ({"serialized_named_tensors": ["YQ==", "YQ=="]}, "serialized_named_tensors"),
        ({"added_tokens_config": {"a": 1}}, "added_tokens_config"),
        ({"expected_checksums": {A: "0"}}, "expected_checksums"),
        ({"serialized_named_tensors": ["AAAA"]}, "serialized_named_tensors"),
        ({"serialized_named_tensors": ["!"]}, "serialized_named_tensors"),
        ({"lora_name": ""}, "lora_name"),
        ({"lora_name": "base/model"}, "lora_name"),
    ],
)
async def test_what_cannot_be_loaded_is_refused_and_leaves_nothing(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    spool: AdapterSpool,
    fields: dict[str, object],
    param: str | None,
) -> None:
    error = error_of(await client.post(URL, json=body(saved(tensors()), **fields)), 400)
    assert error["param"] == param
    assert await engine.list_adapters() == []
    assert files(spool) == set()


async def test_a_body_has_a_limit_of_its_own(client: httpx.AsyncClient) -> None:
    large = saved({A: torch.zeros(9000)})
    error = error_of(await client.post(URL, json=body(large)), 413)
    assert "--max-lora-body-bytes" in error["message"]


async def test_it_may_be_larger_than_other_bodies(engine: FakeEngine, spool: AdapterSpool) -> None:
    config = ServerConfig(max_body_bytes=100, max_total_body_bytes=100)
    async with client_for(engine, config) as client:
        error = error_of(await client.post(URL, json=body("AAAA")), 400)
    assert "serialized_named_tensors" in error["message"]


def test_an_engine_with_roots_may_read_the_spool_and_one_without_needs_no_more(
    spool: AdapterSpool,
) -> None:
    held = EngineConfig(lora=LoRAConfig(enable_lora=True, lora_allowed_roots=("/adapters",)))
    assert reading_spool(held, spool).lora.lora_allowed_roots == ("/adapters", spool.path)
    free = EngineConfig(lora=LoRAConfig(enable_lora=True))
    assert reading_spool(free, spool) is free
