"""The actions of `lora-serve adapters` that ask a server."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from lora_serve.cli.parser import did_you_mean
from lora_serve.cli.remote import (
    BrokenOffError,
    Json,
    Remote,
    RemoteError,
    Reply,
    ServedModel,
    UnreachableError,
)
from lora_serve.cli.server_arguments import chosen_key
from lora_serve.errors import ConfigError
from lora_serve.observability.escapes import escaped
from lora_serve.observability.sizes import shown_bytes
from lora_serve.observability.table import text_table

EXIT_REFUSED = 1
EXIT_NOT_EVERYWHERE = 3  # some server of the catalog has not confirmed it; 2 is a user's mistake
NOT_KNOWN = "ChangeUnknownError"  # the type of a server's error
SHORT_DIGEST = 12
HISTORY_PATH = "/adapter_changes"

Action = Callable[[Remote, argparse.Namespace], int]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What to tell of a name. is_everywhere: whether all servers of a catalog have confirmed it."""

    text: str
    is_everywhere: bool = True


Act = Callable[[str], Outcome]


def run_adapters(args: argparse.Namespace) -> int:
    """Do it; 1 if the server refused any of several, each of which is told, 3 if it is incomplete.

    Raises:
        LoraServeError: the server cannot be asked, or the arguments make no sense.
    """
    with Remote(args.url, chosen_key(args, os.environ)) as remote:
        return ACTIONS[args.action](remote, args)


def list_adapters(remote: Remote, args: argparse.Namespace) -> int:
    adapters = [one for one in remote.models(not_served=True) if one.is_adapter]
    adapters.sort(key=lambda one: one.name)
    if args.json:
        print(json.dumps([one.facts for one in adapters], indent=1))
    elif adapters:
        header = ["name", "digest", "gen", "rank", "size", "residency", "source"]
        rows = [[escaped(cell) for cell in _row(one)] for one in adapters]
        if any("rollout" in one.facts for one in adapters):
            header.insert(-1, "rolled out")
            for row, one in zip(rows, adapters, strict=True):
                row.insert(-1, escaped(_rolled_out(one)))
        table = text_table(header, rows, words=(0, 1, *range(5, len(header))))
        print(_fitted(table, header[-1]))
        for one in adapters:
            if "detail" in one.facts:
                print(escaped(f"{one.name} is not served by this server: {one.facts['detail']}"))
    else:
        print("no adapter is loaded")
    return 0


def list_replicas(remote: Remote, args: argparse.Namespace) -> int:
    try:
        replicas: list[Json] = [dict(each) for each in remote.get("/v1/replicas").json()["data"]]
        rows = [[escaped(cell) for cell in _replica_row(one)] for one in replicas]
    except (ValueError, KeyError, TypeError) as error:
        raise UnreachableError(f"{remote.url}/v1/replicas gives no list of servers") from error
    if args.json:
        print(json.dumps(replicas, indent=1))
    elif replicas:
        header = ("replica", "address", "serial", "loading", "failed", "heard from")
        print(text_table(header, rows, words=(0, 1)))
    else:
        print("the server shares its adapters with no other: it has no --lora-catalog")
    return 0


def forget(remote: Remote, args: argparse.Namespace) -> int:
    def act(name: str) -> Outcome:
        remote.delete(f"/v1/replicas/{quote(name, safe='')}")
        return Outcome(f"{name}: forgotten")

    return _each(args.names, act)


def load(remote: Remote, args: argparse.Namespace) -> int:
    paths = dict(_pairs(args.adapters))

    def act(name: str) -> Outcome:
        try:
            reply = _load(remote, name, paths[name], pinned=args.pinned)
        except RemoteError as error:
            if "load_inplace" not in str(error):
                raise
            raise ConfigError(
                "an adapter with this name is loaded already; to load another in its place: "
                f"lora-serve adapters replace {name} {paths[name]}"
            ) from error
        return _changed(f"{name}: loaded {_told(_now(remote, name))}", reply)

    return _each(paths, act)


def replace(remote: Remote, args: argparse.Namespace) -> int:
    paths = dict(_pairs(args.adapters))

    def act(name: str) -> Outcome:
        old = _adapter(remote, name)
        reply = _load(remote, name, paths[name], load_inplace=True, pinned=args.pinned)
        return _changed(f"{name}: {_change(old, _now(remote, name))}", reply)

    return _each(paths, act)


def roll_back(remote: Remote, args: argparse.Namespace) -> int:
    changes = _history(remote)

    def act(name: str) -> Outcome:
        old = _adapter(remote, name, must_be_there=False)
        before = _version_before(changes, name)
        path, digest = before["old_path"], before["old_digest"]
        try:
            reply = _load(remote, name, path, load_inplace=True, digest=digest)
        except RemoteError as error:
            if error.param != "digest":
                raise
            raise ConfigError(
                f"{path} no longer holds version {digest[:SHORT_DIGEST]}: its files have changed; "
                f"put that version's files back, or load what is there now: lora-serve adapters "
                f"replace {name} {path}"
            ) from error
        return _changed(f"{name}: {_change(old, _now(remote, name))}", reply)

    return _each(args.names, act)


def unload(remote: Remote, args: argparse.Namespace) -> int:
    def act(name: str) -> Outcome:
        reply = remote.post("/v1/unload_lora_adapter", {"lora_name": name})
        return _changed(f"{name}: unloaded", reply)

    return _each(args.names, act)


# ── one adapter ─────────────────────────────────────────────────────────────────────────────


def _each(names: Mapping[str, str] | Sequence[str], act: Act) -> int:
    """Tell what came of each; what is refused for one holds up no other."""
    num_refused = num_incomplete = 0
    for name in names:
        try:
            outcome = act(name)
            print(escaped(outcome.text, kept="\n"), flush=True)
            num_incomplete += not outcome.is_everywhere
        except BrokenOffError as error:
            num_incomplete += 1
            hint = "it may have been done: see `lora-serve adapters ls`"
            print(escaped(f"{name}: not known: {error}; {hint}"), file=sys.stderr)
        except (RemoteError, UnreachableError, ConfigError) as error:
            if isinstance(error, UnreachableError) and name == next(iter(names)):
                raise  # nothing was asked for
            is_refused = not (isinstance(error, RemoteError) and error.kind == NOT_KNOWN)
            num_refused += is_refused
            num_incomplete += not is_refused
            what = "refused" if is_refused else "not known"
            print(escaped(f"{name}: {what}: {error}"), file=sys.stderr)
    if num_refused:
        return EXIT_REFUSED
    return EXIT_NOT_EVERYWHERE if num_incomplete else 0


def _changed(told: str, reply: Reply) -> Outcome:
    """What to tell of a change that is made: a server's warning, too, and how far it came."""
    _, found, warning = reply.text.partition("Warning: ")
    rollout = reply.headers.get("X-LoRA-Rollout")
    is_everywhere = rollout in (None, "everywhere")
    told += ", everywhere" * (rollout == "everywhere")
    return Outcome(f"{told}\n  warning: {warning.strip()}" if found else told, is_everywhere)


def _load(remote: Remote, name: str, path: str, **options: Any) -> Reply:
    body: Json = {"lora_name": name, "lora_path": _absolute(path)}
    body |= {key: value for key, value in options.items() if value}
    return remote.post("/v1/load_lora_adapter", body)


def _adapter(remote: Remote, name: str, *, must_be_there: bool = True) -> ServedModel | None:
    models = remote.models(not_served=True)
    found = next((one for one in models if one.name == name and one.is_adapter), None)
    if found is None and must_be_there:
        names = [one.name for one in models if one.is_adapter]
        raise ConfigError(
            f"no adapter has this name{did_you_mean(name, names)}; `lora-serve adapters load` "
            "loads one under a new name"
        )
    return found


def _now(remote: Remote, name: str) -> ServedModel | None:
    """What a name stands for after a change, which is made also if this cannot be read."""
    with suppress(RemoteError, UnreachableError, ConfigError):
        return _adapter(remote, name)
    return None


def _history(remote: Remote) -> list[Json]:
    """Changes of adapters, newest first. Raises ConfigError where the server keeps none."""
    try:
        changes: list[Json] = [dict(each) for each in remote.get(HISTORY_PATH).json()["data"]]
    except RemoteError as error:
        if error.status != 404:
            raise
        raise ConfigError(
            f"{remote.url} keeps no history of adapters; name the files yourself: lora-serve "
            "adapters replace NAME PATH"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UnreachableError(f"{remote.url}{HISTORY_PATH} gives no list of changes") from error
    return changes


def _version_before(changes: Sequence[Json], name: str) -> Json:
    """The last change that took a version from this name. Raises ConfigError without one."""
    for change in changes:
        is_done = change["lora_name"] == name and change.get("error") is None
        if is_done and change["old_digest"] and change["old_digest"] != change["new_digest"]:
            return change
    raise ConfigError(
        "the server remembers no earlier version of it (it remembers its last changes, since it "
        "began); name the files yourself: lora-serve adapters replace NAME PATH"
    )


def _change(old: ServedModel | None, new: ServedModel | None) -> str:
    if old is None or "state" in old.facts:
        return f"loaded {_told(new)}"
    if _digest(old) == _digest(new):
        return f"unchanged, the same bytes, so cached KV stays warm: {_told(new)}"
    return f"{_digest(old)[:SHORT_DIGEST]} → {_told(new)}"


def _told(adapter: ServedModel | None) -> str:
    """What is served under a name now: the version, its size, whether it is pinned, from where."""
    if adapter is None:
        return "(the server does not tell what it has now)"
    facts = adapter.facts
    parts = [_digest(adapter)[:SHORT_DIGEST] or "(the server tells no digest)"]
    if "rank" in facts:
        parts.append(f"rank {facts['rank']}")
    if isinstance(facts.get("num_bytes"), int):
        parts.append(shown_bytes(facts["num_bytes"]))
    if facts.get("pinned"):
        parts.append("pinned in memory")
    if facts.get("root"):
        parts.append(f"from {facts['root']}")
    return ", ".join(parts)


def _digest(adapter: ServedModel | None) -> str:
    return str(adapter.facts.get("digest", "")) if adapter else ""


# ── words and columns ───────────────────────────────────────────────────────────────────────


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Names and paths, from NAME=PATH words or from the two words NAME PATH."""
    if len(words) == 2 and "=" not in words[0]:
        yield words[0], words[1]
        return
    for word in words:
        name, equals, path = word.partition("=")
        if not (name and equals and path):
            raise ConfigError(
                f"{word} is no NAME=PATH; write one adapter as NAME PATH, or as NAME=PATH"
            )
        yield name, path


def _absolute(path: str) -> str:
    """A directory here as the server would find it; what is none here is sent as it is."""
    return os.path.abspath(path) if os.path.isdir(path) else path


def _row(adapter: ServedModel) -> tuple[str, ...]:
    facts = adapter.facts
    residency = str(facts.get("state", facts.get("residency", "–")))
    return (
        adapter.name,
        _digest(adapter)[:SHORT_DIGEST] or "–",
        str(facts.get("generation", "–")),
        str(facts.get("rank", "–")),
        shown_bytes(facts["num_bytes"]) if "num_bytes" in facts else "–",
        f"{residency}, pinned" if facts.get("pinned") else residency,
        str(facts.get("root", "–")),
    )


def _rolled_out(adapter: ServedModel) -> str:
    """Whether all servers have it, or how many."""
    rollout = adapter.facts.get("rollout")
    if not isinstance(rollout, dict):
        return "–"
    if rollout.get("everywhere"):
        return "everywhere"
    num, missing = rollout.get("num_replicas"), rollout.get("replicas")
    if not (isinstance(num, int) and isinstance(missing, list)):
        return "–"
    return f"{num - len(missing)} of {num}"


def _replica_row(replica: Json) -> tuple[str, ...]:
    counts = (str(replica[name]) for name in ("serial", "loading", "failed"))
    heard = f"{float(replica['silent_seconds']):.0f} s ago"
    return str(replica["id"]), str(replica["address"]), *counts, heard


def _fitted(table: str, last: str) -> str:
    """On a terminal, cut the last column from the left: the end of a path tells most."""
    if not sys.stdout.isatty():
        return table
    header, *lines = table.splitlines()
    begins = header.index(last)
    most = max(shutil.get_terminal_size().columns - begins, len(last))
    cut = (
        line if len(line) - begins <= most else f"{line[:begins]}…{line[begins:][1 - most :]}"
        for line in lines
    )
    return "\n".join((header, *cut))


ACTIONS: Mapping[str, Action] = {
    "ls": list_adapters,
    "load": load,
    "replace": replace,
    "rollback": roll_back,
    "unload": unload,
    "replicas": list_replicas,
    "forget": forget,
}
