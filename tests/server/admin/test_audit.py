"""The log tells who changed which adapter, and never by which key or in whose own lines."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from lora_serve.config import ServerConfig
from lora_serve.observability.log import JsonFormatter
from lora_serve.server.operation import Access, Operation
from lora_serve.server.routes import OPERATIONS
from tests.fakes.engine import FakeEngine, write_adapter
from tests.server.clients import client_for

LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"
KEYS = ServerConfig(api_key=("tenant-secret",), admin_api_key=("root-secret", "second-secret"))


@pytest.fixture(autouse=True)
def told(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """What the audit has written so far."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lora_serve.server.admin.audit")
    with caplog.at_level(logging.INFO, logger.name):
        logger.addHandler(handler)
        yield lines
        logger.removeHandler(handler)


async def call(client: httpx.AsyncClient, url: str, key: str = "", **body: object) -> None:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    await client.post(url, json=body, headers=headers)


def digest_of(path: str) -> str:
    (file,) = Path(path).iterdir()
    return hashlib.sha256(file.read_bytes()).hexdigest()


async def test_a_change_asks_the_engine_for_no_list_of_all_adapters(
    tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be thousands, and a trainer makes such a call at each of its steps."""
    engine = FakeEngine()

    async def list_all() -> None:
        raise AssertionError("all adapters were listed")

    monkeypatch.setattr(engine, "list_adapters", list_all)
    path = write_adapter(tmp_path / "a", "ALPHA")
    async with client_for(engine) as client:
        await call(client, LOAD, lora_name="x", lora_path=path)
        await call(client, UNLOAD, lora_name="x")
    assert [line.rpartition(", ")[2] for line in told] == ["done", "done"]


async def test_every_change_is_one_line_with_both_digests(tmp_path: Path, told: list[str]) -> None:
    a = write_adapter(tmp_path / "a", "ALPHA")
    b = write_adapter(tmp_path / "b", "BETA")
    async with client_for(FakeEngine(), KEYS) as client:
        root, second = KEYS.admin_api_key
        await call(client, LOAD, root, lora_name="x", lora_path=a)
        await call(client, LOAD, second, lora_name="x", lora_path=b, load_inplace=True)
        await call(client, LOAD, second, lora_name="x", lora_path=b, load_inplace=True)
        await call(client, UNLOAD, root, lora_name="x")
    alpha, beta = digest_of(a), digest_of(b)
    assert told == [
        f"adapter load by admin key 1: name 'x', path {a!r}, digest none -> {alpha}, done",
        f"adapter load by admin key 2: name 'x', path {b!r}, digest {alpha} -> {beta}, done",
        f"adapter load by admin key 2: name 'x', path {b!r}, digest unchanged, done",
        f"adapter unload by admin key 1: name 'x', path {b!r}, digest {beta} -> none, done",
    ]


async def test_what_is_refused_is_told_of_and_changes_no_digest(
    tmp_path: Path, told: list[str]
) -> None:
    a = write_adapter(tmp_path / "a", "ALPHA")
    async with client_for(FakeEngine(), KEYS) as client:
        await call(client, LOAD, "tenant-secret", lora_name="x", lora_path=a)
        await call(client, LOAD, "root-secret", lora_name="x", lora_path=a)
        await call(client, LOAD, "root-secret", lora_name="x", lora_path="/nowhere")
        await call(client, UNLOAD, "root-secret", lora_name="y")
    refused, _, again, absent = told
    assert refused.startswith(
        "adapter load by key 1: name unknown, path unknown, digest unchanged, failed: "
    )
    assert "digest unchanged, failed: \"The lora adapter 'x' has already" in again
    assert absent.startswith("adapter unload by admin key 1: name 'y', path unknown, digest unch")


async def test_a_server_without_keys_tells_so(tmp_path: Path, told: list[str]) -> None:
    async with client_for(FakeEngine()) as client:
        await call(client, LOAD, lora_name="x", lora_path=write_adapter(tmp_path, "A"))
    assert told[0].startswith("adapter load by no key: name 'x', ")


async def test_no_body_and_no_key_writes_itself_into_the_log(told: list[str]) -> None:
    async with client_for(FakeEngine(), KEYS) as client:
        path = "/a\nadapter load by admin key 1" + "x" * 10_000
        await call(client, LOAD, "root-secret", lora_name="x", lora_path=path)
    (line,) = told
    assert "\n" not in line
    assert len(line) < 2_000
    assert "secret" not in line


async def test_programs_read_the_parts_of_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a = write_adapter(tmp_path / "a", "ALPHA")
    async with client_for(FakeEngine(), KEYS) as client:
        await call(client, LOAD, "root-secret", lora_name="x", lora_path=a)
        await call(client, LOAD, "root-secret", lora_name="x", lora_path=a)
    lines = [record for record in caplog.records if record.name.endswith(".audit")]
    loaded, refused = (json.loads(JsonFormatter("server").format(line)) for line in lines)
    assert loaded["change"] == "load"
    assert loaded["by"] == "admin key 1"
    assert (loaded["lora_name"], loaded["lora_path"]) == ("x", a)
    assert (loaded["old_digest"], loaded["new_digest"]) == ("none", digest_of(a))
    assert loaded["failure"] is None
    assert refused["old_digest"] == refused["new_digest"]
    assert "already been loaded" in refused["failure"]


async def test_calls_on_others_requests_and_caches_are_lines_too(told: list[str]) -> None:
    async with client_for(FakeEngine(), KEYS) as client:
        root = KEYS.admin_api_key[0]
        for path in ("/pause?mode=keep", "/resume", "/abort_requests", "/reset_prefix_cache"):
            await call(client, path, root)
        await call(client, "/abort_requests", root, request_ids=["a", "b"])
        await call(client, "/inference/v1/abort_requests", root, request_ids=["a"])
        await call(client, "/inference/v1/abort_requests", "tenant-secret", request_ids=["a"])
        await call(client, "/reset_prefix_cache", root, lora_name="x\ny")
        await call(client, "/pause", "tenant-secret")
    assert told[:6] == [
        "pause by admin key 1: mode 'keep', clear_cache false, num_held 0, done",
        "resume by admin key 1: done",
        "abort by admin key 1: num_named 'all', num_aborted 0, done",
        "cache reset by admin key 1: lora_name 'all', done",
        "abort by admin key 1: num_named 2, request_ids 'a' 'b', num_aborted 0, done",
        "abort by admin key 1: num_named 1, request_ids 'a', num_aborted 0, done",
    ]
    assert told[6].startswith("cache reset by admin key 1: lora_name 'x\\ny', failed: ")
    assert told[7].startswith("pause by key 1: failed: ")
    assert len(told) == 8


@pytest.mark.parametrize(
    "operation",
    [one for one in OPERATIONS if one.access is Access.ADMIN and one.method != "get"],
    ids=lambda one: f"{one.method} {one.path}",
)
async def test_every_call_that_changes_the_server_is_a_line(
    operation: Operation, told: list[str]
) -> None:
    """Whatever came of it. A new route for admins that writes none fails here."""
    url = operation.path.replace("{lora_name}", "a")
    headers = {"Authorization": f"Bearer {KEYS.admin_api_key[0]}"}
    body = dict(operation.example)
    async with client_for(FakeEngine(), KEYS) as client:
        await client.request(operation.method, url, json=body, headers=headers)
    (line,) = told
    assert " by admin key 1: " in line


async def test_a_refused_unload_names_the_adapter_of_its_path(told: list[str]) -> None:
    async with client_for(FakeEngine(), KEYS) as client:
        for key in ("tenant-secret", "wrong"):
            headers = {"Authorization": f"Bearer {key}"}
            await client.delete("/v1/loras/tenant-a", headers=headers)
    (refused,) = told
    assert refused.startswith("adapter unload by key 1: name 'tenant-a', ")


async def test_an_unload_of_a_name_with_a_line_break_is_a_line(told: list[str]) -> None:
    headers = {"Authorization": f"Bearer {KEYS.admin_api_key[0]}"}
    async with client_for(FakeEngine(), KEYS) as client:
        for path in ("/v1/loras/a%0Ab", "/adapters/a%0A"):
            await client.delete(path, headers=headers)
    assert told[0].startswith("adapter unload by admin key 1: name 'a\\nb', ")
    assert told[1].startswith("adapter unload by admin key 1: name 'a\\n', ")


async def test_what_failed_is_a_warning_and_names_the_requests_in_bounds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ids = [f"{number}" + "x" * 505 for number in range(20)]
    async with client_for(FakeEngine(), KEYS) as client:
        root, tenant = KEYS.admin_api_key[0], KEYS.api_key[0]
        await call(client, UNLOAD, root, lora_name="absent")
        await call(client, "/pause", tenant)
        await call(client, "/abort_requests", root, request_ids=ids)
    lines = [record for record in caplog.records if record.name.endswith(".audit")]
    assert [line.levelname for line in lines] == ["WARNING", "WARNING", "INFO"]
    told = json.loads(JsonFormatter("server").format(lines[-1]))
    assert told["num_named"] == 20
    assert told["request_ids"] == [one[:500] for one in ids[:10]]
