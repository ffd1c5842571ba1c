"""Two servers in memory that share a catalog's file, over HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from lora_serve.catalog import file_store, plan, replica
from lora_serve.catalog.changes import MAX_TRIES
from lora_serve.catalog.records import Record
from lora_serve.catalog.replica import CatalogReplica
from lora_serve.catalog.rollout import ReplicaState, Rollout, State
from lora_serve.cli.adapters_actions import _version_before
from lora_serve.config import CatalogConfig, EngineConfig, LoRAConfig, ModelConfig, ServerConfig
from lora_serve.errors import AdapterNotFoundError, CatalogUnavailableError, ConfigError
from lora_serve.server.adapter_names import opening
from lora_serve.server.adapter_names.catalogued import CataloguedNames
from lora_serve.server.adapter_names.local import LocalNames
from lora_serve.server.adapter_names.opening import member_of
from lora_serve.server.app import create_app
from tests.fakes.engine import FakeEngine, write_adapter
from tests.server.catalogued_servers import Fleet

PATIENCE = 60


async def load(client: httpx.AsyncClient, name: str, path: str, **fields: object) -> httpx.Response:
    body = {"lora_name": name, "lora_path": path, **fields}
    response = await client.post("/v1/load_lora_adapter", json=body)
    assert response.status_code == 200, response.text
    return response


async def said(client: httpx.AsyncClient, model: str) -> str:
    body = {"model": model, "prompt": "hi", "max_tokens": 5}
    response = await client.post("/v1/completions", json=body)
    if response.status_code != 200:
        return str(response.status_code)
    return str(response.json()["choices"][0]["text"])


async def until(is_true: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not is_true():
            await asyncio.sleep(0.01)


async def test_what_one_server_loads_replaces_and_unloads_the_other_does(
    fleet: Fleet, tmp_path: Path
) -> None:
    one, two = await fleet.start("one"), await fleet.start("two")
    loaded = await load(one, "tenant", write_adapter(tmp_path / "a", "ALPHA"))
    assert loaded.headers["X-LoRA-Rollout"] == "everywhere"
    assert (await said(one, "tenant"), await said(two, "tenant")) == ("ALPHA", "ALPHA")
    path = write_adapter(tmp_path / "b", "BETA")
    body = {"lora_name": "tenant", "lora_path": path, "load_inplace": True, "pinned": True}
    accept = {"Accept": "application/json"}
    replaced = (await two.post("/v1/load_lora_adapter", json=body, headers=accept)).json()
    assert replaced["rollout"]["everywhere"] is True
    assert {state["replica"] for state in replaced["rollout"]["replicas"]} == {"one", "two"}
    assert (await said(one, "tenant"))[:4] == "BETA"
    info = fleet.engines["one"].adapter("tenant")
    assert info is not None
    assert info.pinned
    (change, *_) = (await one.get("/adapter_changes")).json()["data"]
    assert change["by"].endswith(" at two")
    assert (change["old_path"], change["new_path"]) == (str(tmp_path / "a"), path)
    gone = await one.post("/v1/unload_lora_adapter", json={"lora_name": "tenant"})
    assert gone.text.startswith("Success: LoRA adapter 'tenant' removed successfully. It is every")
    assert (await said(one, "tenant"), await said(two, "tenant")) == ("404", "404")
    again = await two.post("/v1/unload_lora_adapter", json={"lora_name": "tenant"})
    assert again.status_code == 404


async def test_a_name_that_is_taken_on_one_server_is_taken_on_the_other(
    fleet: Fleet, tmp_path: Path
) -> None:
    one, two = await fleet.start("one"), await fleet.start("two")
    path = write_adapter(tmp_path / "a", "ALPHA")
    await load(one, "tenant", path)
    body = {"lora_name": "tenant", "lora_path": path}
    refused = await two.post("/v1/load_lora_adapter", json=body)
    assert (refused.status_code, "already been loaded" in refused.text) == (400, True)


async def test_a_reset_raises_the_generation_on_all(fleet: Fleet, tmp_path: Path) -> None:
    one, two = await fleet.start("one"), await fleet.start("two")
    await load(one, "tenant", write_adapter(tmp_path / "a", "ALPHA"))
    reset = await two.post("/reset_prefix_cache", json={"lora_name": "tenant"})
    assert reset.json() == {"success": True}
    for client in (one, two):
        assert (await client.get("/v1/models/tenant")).json()["generation"] == 1


async def test_a_restart_has_what_was_loaded(fleet: Fleet, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", "ALPHA")
    await load(await fleet.start("one"), "tenant", path)
    await fleet.stop()
    again = await fleet.start("one", lora_modules=(f"tenant={path}", f"other={path}"))
    assert (await said(again, "tenant"), await said(again, "other")) == ("ALPHA", "ALPHA")


@pytest.mark.parametrize("num_servers", [1, 2])
async def test_modules_are_there_once_the_server_is(
    num_servers: int, fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_store, "WATCH_SECONDS", 0.5)  # changes are heard of late
    modules = (f"tenant={write_adapter(tmp_path / 'a', 'ALPHA')}",)
    starts = (fleet.start(str(index), lora_modules=modules) for index in range(num_servers))
    clients = await asyncio.gather(*starts)
    answers = await asyncio.gather(*(said(client, "tenant") for client in clients))
    assert answers == ["ALPHA"] * num_servers


async def test_a_module_that_cannot_be_loaded_ends_the_start(fleet: Fleet, tmp_path: Path) -> None:
    with pytest.raises(AdapterNotFoundError):
        await fleet.start("one", lora_modules=(f"tenant={tmp_path}/nowhere",))


@pytest.mark.parametrize("is_named_first", [True, False])
async def test_a_module_that_was_unloaded_stays_so_for_servers_that_start_later(
    is_named_first: bool, fleet: Fleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_adapter(tmp_path / "a", "ALPHA")
    modules = {"lora_modules": (f"tenant={path}",)}
    one = await fleet.start("one", **(modules if is_named_first else {}))
    if not is_named_first:
        await load(one, "tenant", write_adapter(tmp_path / "b", "BETA"))
        await fleet.start("two", **modules)
        assert f"the catalog has this name from {tmp_path}/b, which stays" in caplog.text
    gone = await one.post("/v1/unload_lora_adapter", json={"lora_name": "tenant"})
    assert gone.status_code == 200
    late = await fleet.start("three", **modules)
    assert await said(late, "tenant") == await said(one, "tenant") == "404"
    serial = gone.headers["X-LoRA-Serial"]
    assert f"tenant={path}: this name was unloaded (serial {serial}, by " in caplog.text
    caplog.clear()
    again = await load(late, "tenant", path)
    assert int(again.headers["X-LoRA-Serial"]) > int(serial)
    latest = await fleet.start("four", **modules)
    answers = [await said(client, "tenant") for client in (one, late, latest)]
    assert answers == ["ALPHA"] * 3
    assert "--lora-modules" not in caplog.text


async def test_a_module_that_is_unloaded_while_a_server_reads_it_stays_unloaded(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_adapter(tmp_path / "a", "ALPHA")
    modules = {"lora_modules": (f"tenant={path}",)}
    examine = FakeEngine.examine_lora_adapter

    async def examine_slowly(engine: FakeEngine, *arguments: str) -> object:
        """Another server loads it, and it is unloaded, before this one has read it."""
        monkeypatch.setattr(FakeEngine, "examine_lora_adapter", examine)
        other = await fleet.start("other", **modules)
        gone = await other.post("/v1/unload_lora_adapter", json={"lora_name": "tenant"})
        assert gone.status_code == 200
        return await examine(engine, *arguments)

    monkeypatch.setattr(FakeEngine, "examine_lora_adapter", examine_slowly)
    one = await fleet.start("one", **modules)
    assert await said(one, "tenant") == "404"
    await load(one, "tenant", path)


async def test_a_name_that_no_module_has_leaves_nothing_when_it_is_unloaded(
    fleet: Fleet, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "a", "ALPHA")
    one = await fleet.start("one")
    await load(one, "tenant", path)
    await one.post("/v1/unload_lora_adapter", json={"lora_name": "tenant"})
    two = await fleet.start("two", lora_modules=(f"tenant={path}",))
    assert await said(two, "tenant") == "ALPHA"


async def test_what_one_server_resolves_the_other_has(fleet: Fleet, tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapters" / "tenant", "ALPHA")
    resolver = {"lora_resolver": (f"dir:{tmp_path}/adapters",)}
    one, two = await fleet.start("one", **resolver), await fleet.start("two", **resolver)
    assert await asyncio.gather(*(said(one, "tenant") for _ in range(5))) == ["ALPHA"] * 5
    await until(lambda: fleet.engines["two"].adapter("tenant"))
    assert await said(two, "tenant") == "ALPHA"
    assert await said(two, "nobody") == "404"


async def test_what_cannot_be_resolved_since_the_catalog_is_lost_does_not_tell_its_place(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_adapter(tmp_path / "adapters" / "tenant", "ALPHA")
    one = await fleet.start("one", lora_resolver=(f"dir:{tmp_path}/adapters",))
    store = type(fleet.names["one"].replica._store)  # type: ignore[attr-defined]

    def gone(*_: object) -> None:
        raise CatalogUnavailableError(f"the catalog {fleet.catalog}: gone")

    monkeypatch.setattr(store, "get", gone)
    answer = await one.post("/v1/completions", json={"model": "tenant", "prompt": "hi"})
    assert (answer.status_code, str(tmp_path) in answer.text) == (503, False)
    assert "the catalog cannot take up this adapter now" in answer.text


async def test_a_rollback_knows_a_change_that_was_made_though_its_answer_was_lost(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await fleet.start("one")
    paths = [write_adapter(tmp_path / name, name) for name in ("ALPHA", "BETA", "GAMMA")]
    bodies = [{"lora_name": "tenant", "lora_path": path, "load_inplace": True} for path in paths]
    for body in bodies[:2]:
        await one.post("/v1/load_lora_adapter", json=body)
    store = type(fleet.names["one"].replica._store)  # type: ignore[attr-defined]
    put = store.put

    def put_and_go(self: object, record: Record, expected: int) -> object:
        put(self, record, expected)
        raise CatalogUnavailableError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(store, "put", put_and_go)
        answer = await one.post("/v1/load_lora_adapter", json=bodies[2])
        assert answer.json()["error"]["type"] == "ChangeUnknownError"
    await until(lambda: fleet.engines["one"].adapter("tenant").path == paths[2])
    changes = (await one.get("/adapter_changes")).json()["data"]
    (made, told) = (changes[0], changes[1])
    assert (made["old_path"], made["new_path"], made["error"]) == (paths[1], paths[2], None)
    assert told["error"] is not None
    assert _version_before(changes, "tenant")["old_path"] == paths[1]


async def test_a_start_without_the_catalog_says_what_is_served_and_what_will_be(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lora_serve")
    path = write_adapter(tmp_path / "a", "ALPHA")
    monkeypatch.setattr(opening, "START_SECONDS", 0.1)
    monkeypatch.setattr(replica, "ASK_SECONDS", 0.1)

    def gone(store: object) -> None:
        raise CatalogUnavailableError("the catalog is gone")

    with monkeypatch.context() as patch:
        patch.setattr(file_store.FileStore, "snapshot", gone)
        one = await fleet.start("one", lora_modules=(f"tenant={path}", f"other={path}"))
        assert opening.STARTS_WITHOUT in caplog.text
        assert "/health and requests for adapters get 503, and the base model" in caplog.text
        assert fleet.names["one"].loaded == "not known until the catalog answers"
        assert (await one.get("/health")).status_code == 503
        asked = [await said(one, name) for name in ("tenant", "base/model")]
        assert (asked[0], asked[1].isdigit()) == ("503", False)
    await until(lambda: fleet.names["one"].loaded == "2 loaded")
    assert (await one.get("/health")).status_code == 200
    assert await said(one, "tenant") == "ALPHA"
    assert f"the catalog at {fleet.catalog} answers, and has 0 adapters" in caplog.text


async def test_a_start_counts_what_of_the_catalog_it_has_loaded_so_far(
    fleet: Fleet, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "a", "ALPHA")
    one = await fleet.start("one")
    assert fleet.names["one"].loaded == ""
    for name in ("x", "y"):
        await load(one, name, path)
    write_adapter(tmp_path / "a", "BETA")  # which the next server refuses
    await fleet.start("two")
    await until(lambda: len(fleet.names["two"].unable) == 2)
    assert fleet.names["two"].loaded == "2 in the catalog, of which 0 are loaded so far"


async def test_a_start_says_nothing_of_a_catalog_that_answers(
    fleet: Fleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    modules = (f"tenant={write_adapter(tmp_path / 'a', 'ALPHA')}",)
    await fleet.start("one", lora_modules=modules)
    assert fleet.names["one"].loaded == "1 loaded"
    assert opening.STARTS_WITHOUT not in caplog.text


async def test_without_a_catalog_a_resolver_loads_for_its_own_server(tmp_path: Path) -> None:
    write_adapter(tmp_path / "tenant", "ALPHA")
    lora = LoRAConfig(enable_lora=True, lora_resolver=(f"dir:{tmp_path}",))
    model = ModelConfig(model="/models/tiny", served_model_name=("base/model",))
    app = create_app(FakeEngine(EngineConfig(model=model, lora=lora)), ServerConfig())
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert [await said(client, name) for name in ("tenant", "..", "no")] == [
            "ALPHA", "404", "404",
        ]  # fmt: skip


@pytest.mark.parametrize("is_told", [True, False])
async def test_a_change_during_which_the_store_is_lost_is_not_told_as_refused(
    is_told: bool,
    fleet: Fleet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The store writes the change, and is gone before it says so or before servers report."""
    caplog.set_level(logging.INFO, "lora_serve.server.admin.audit")
    one = await fleet.start("one")
    alpha = await load(one, "tenant", write_adapter(tmp_path / "a", "ALPHA"))
    store = type(fleet.names["one"].replica._store)  # type: ignore[attr-defined]
    put = store.put

    def gone(*_: object) -> None:
        raise CatalogUnavailableError("the catalog is gone")

    def put_and_go(self: object, record: Record, expected: int) -> object:
        written = put(self, record, expected)
        monkeypatch.setattr(store, "standings", gone)
        return written if is_told else gone()

    monkeypatch.setattr(store, "put", put_and_go)
    b = write_adapter(tmp_path / "b", "BETA")
    body = {"lora_name": "tenant", "lora_path": b, "load_inplace": True}
    answer = await one.post("/v1/load_lora_adapter", json=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "ChangeUnknownError")
    line = [one.getMessage() for one in caplog.records if one.name.endswith("audit")][-1]
    old, new = alpha.headers["X-LoRA-Digest"], hashlib.sha256(b"BETA").hexdigest()
    (change, *_) = (await one.get("/adapter_changes")).json()["data"]
    if is_told:
        assert f"digest {old} -> {new}, made, but not known where: " in line
        assert (change["new_digest"], change["new_path"], change["error"]) == (new, b, None)
    else:
        assert f"digest {old} -> unknown, not known whether made: " in line
        assert "whether 'tenant' was changed is not known" in change["error"]
    assert "unchanged" not in line
    assert "failed" not in line


async def test_a_change_that_is_not_everywhere_is_a_warning_that_names_the_servers(
    fleet: Fleet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = await fleet.start("one")
    await load(one, "tenant", write_adapter(tmp_path / "a", "ALPHA"))
    states = (ReplicaState("two", "", State.SILENT, "for 11 s"),)

    async def rolled_out(replica: object, record: Record, seconds: float) -> Rollout:
        return Rollout(record, states)

    monkeypatch.setattr(CatalogReplica, "rolled_out", rolled_out)
    b = write_adapter(tmp_path / "b", "BETA")
    loaded = await load(one, "tenant", b, load_inplace=True)
    assert loaded.headers["X-LoRA-Rollout"] == "incomplete"
    await one.post("/reset_prefix_cache", json={"lora_name": "tenant"})
    await one.post("/v1/unload_lora_adapter", json={"lora_name": "tenant"})
    warnings = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert warnings == [
        f"adapter tenant of the catalog: serial {serial} is on 0 of 1 replicas; not on two (not "
        "heard from: for 11 s)"
        for serial in (3, 4, 5)
    ]


async def test_a_name_that_failed_here_is_told_with_its_state_and_reason(
    fleet: Fleet, tmp_path: Path
) -> None:
    """Admins see all that is known, users what a request for it gets."""
    one = await fleet.start("one")
    loaded = await load(one, "tenant", write_adapter(tmp_path / "a", "ALPHA"))
    digest = loaded.headers["X-LoRA-Digest"]
    write_adapter(tmp_path / "a", "broken")
    two = await fleet.start("two", server=ServerConfig(api_key=("user",), admin_api_key=("boss",)))
    boss, user = ({"Authorization": f"Bearer {key}"} for key in ("boss", "user"))
    await until(lambda: "tenant" in fleet.names["two"].unable)
    while not (await fleet.names["two"].rollouts(["tenant"]))["tenant"].is_settled:
        await asyncio.sleep(0.01)  # until the other servers are told of it, too
    card = (await two.get("/v1/models/tenant", headers=boss)).json()
    assert (card["parent"], card["root"], card["digest"]) == (
        "base/model", str(tmp_path / "a"), digest,
    )  # fmt: skip
    assert (card["state"], "residency" in card) == ("failed", False)
    assert "rank 1024 is above 64" in card["detail"]
    states = {one["replica"]: one["state"] for one in card["rollout"]["replicas"]}
    assert states == {"one": "ready", "two": "failed"}
    listed = (await two.get("/v1/models", headers=boss)).json()["data"]
    assert "tenant" not in {each["id"] for each in listed}, "gateways send requests to what is"
    whole = (await two.get("/v1/models?not_served=true", headers=boss)).json()["data"]
    assert [each["state"] for each in whole if each["id"] == "tenant"] == ["failed"]
    of_users = (await two.get("/v1/models?not_served=true", headers=user)).json()["data"]
    assert "tenant" not in {each["id"] for each in of_users}
    body = {"model": "tenant", "prompt": "hi"}
    for refused in (
        await two.post("/v1/completions", json=body, headers=user),
        await two.get("/v1/models/tenant", headers=user),
    ):
        assert refused.status_code == 503
        assert "this server failed to load" in refused.text
        assert "its copy of the adapter cannot be served, and its log says why" in refused.text
        assert "rank 1024" not in refused.text, "the files' contents are not for users"
        assert str(tmp_path) not in refused.text


@pytest.mark.parametrize(
    "name",
    ["base/model", "base/model:tenant", "", "two\nlines", "n" * 2000],
    ids=lambda name: repr(name)[:20],
)
async def test_a_name_of_the_catalog_that_no_call_could_give_is_not_served(
    name: str, fleet: Fleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Others may write to it, or serve their model under another name."""
    path = write_adapter(tmp_path / "a", "ALPHA")
    one = await fleet.start("one")
    digest = (await load(one, "tenant", path)).headers["X-LoRA-Digest"]
    catalog = file_store.FileStore(fleet.catalog)
    try:
        written = catalog.put(Record(name=name, digest=digest, source=path), 0)
    finally:
        catalog.close()
    await until(lambda: name in fleet.names["one"].unable)
    listed = (await one.get("/v1/models")).json()["data"]
    assert [card["id"] for card in listed] == ["base/model", "tenant"]
    assert written is not None
    assert f"(serial {written.serial}) takes no requests here" in caplog.text
    assert max(len(record.getMessage()) for record in caplog.records) < 1000
    assert await said(one, "tenant") == await said(one, "base/model:tenant") != "404"


async def test_servers_are_listed_and_the_dead_forgotten(fleet: Fleet) -> None:
    one = await fleet.start("one")
    await fleet.start("two")
    listed = (await one.get("/v1/replicas")).json()
    assert ([each["id"] for each in listed["data"]], listed["this"]) == (["one", "two"], "one")
    alive = await one.delete("/v1/replicas/two")
    assert (alive.status_code, "may still answer" in alive.text) == (400, True)
    assert (await one.delete("/v1/replicas/three")).status_code == 404


async def test_the_metrics_tell_how_names_stand(fleet: Fleet, tmp_path: Path) -> None:
    one = await fleet.start("one")
    await load(one, "tenant", write_adapter(tmp_path / "a", "ALPHA"))
    page = (await one.get("/metrics")).text
    lines = {line.rpartition(" ")[0]: line.rpartition(" ")[2] for line in page.splitlines()}
    labels = 'engine="0",model_name="base/model"'
    assert lines[f"lora_serve:catalog_is_up{{{labels}}}"] == "1.0"
    for state, count in (("ready", "1.0"), ("loading", "0.0"), ("failed", "0.0")):
        assert lines[f'lora_serve:catalog_names{{{labels},state="{state}"}}'] == count


async def test_where_the_catalog_is_can_be_told_without_a_password(fleet: Fleet) -> None:
    await fleet.start("one")
    assert fleet.names["one"].catalog == f"{fleet.catalog}, as replica 'one'"
    assert LocalNames(fleet.engines["one"]).catalog is None


async def test_adapters_in_bodies_are_refused(fleet: Fleet) -> None:
    one = await fleet.start("one")
    body = {"lora_name": "a", "config_dict": {}, "serialized_named_tensors": ["AAAA"]}
    refused = await one.post("/load_lora_adapter_from_tensors", json=body)
    assert (refused.status_code, "load it from there" in refused.text) == (400, True)


def test_a_server_is_called_by_its_machine_and_port_or_socket() -> None:
    """Servers of two machines may have the same path."""
    member = member_of(ServerConfig(port=8123), CatalogConfig(lora_catalog="/c"))
    assert member.replica_id.endswith(":8123")
    assert member.address == f"http://{member.replica_id}"
    path = member_of(ServerConfig(uds="/run/s"), CatalogConfig(lora_catalog="/c"))
    machine = member.replica_id.removesuffix(":8123")
    assert (path.replica_id, path.address) == (f"{machine}:/run/s", "unix:/run/s")
    named = CatalogConfig(lora_replica_id="a", lora_replica_address="https://a.example")
    assert member_of(ServerConfig(), named).address == "https://a.example"


@pytest.mark.parametrize("where", ["http://redis:1", "s3://bucket"])
def test_a_catalog_of_an_unknown_kind_is_refused(where: str) -> None:
    with pytest.raises(ConfigError, match="must be a path, or a URL of redis://"):
        CatalogConfig(lora_catalog=where)


async def test_modules_give_up_on_a_catalog_that_has_another_record_at_each_try() -> None:
    tries: list[str] = []

    async def make(name: str, plan_of: plan.Plan) -> Record:
        tries.append(name)
        assert len(tries) < 1000, "it is tried for ever"
        raise plan.OtherStateError(name, loaded)

    loaded = Record(name="tenant", serial=7, digest="aa", source="/a")
    names = CataloguedNames.__new__(CataloguedNames)
    names.replica = SimpleNamespace(  # type: ignore[assignment]
        view=SimpleNamespace(last_record=lambda name: loaded), changes=SimpleNamespace(make=make)
    )
    with pytest.raises(CatalogUnavailableError, match="has another record of 'tenant' each time"):
        await names.load_modules([("tenant", "/a")])
    assert len(tries) == MAX_TRIES
