"""The actions of `lora-serve kv`: look into a tier, and show it in a table or in JSON."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from lora_serve.errors import ConfigError
from lora_serve.identity import BASE_MODEL_NAME
from lora_serve.kv_tiers.base import TierError, TierNamespace
from lora_serve.kv_tiers.inspection import Inspection, Summary, Verdict
from lora_serve.kv_tiers.kind import InspectedPlace
from lora_serve.kv_tiers.kinds import PLACES, inspect
from lora_serve.kv_tiers.mac import read_mac_keys
from lora_serve.observability.escapes import escaped
from lora_serve.observability.table import text_table

EXIT_REFUSED = 1
SHORT_DIGEST = 12
SHOWN_BASE_MODEL = "(base model)"
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

Action = Callable[[Inspection, argparse.Namespace], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """How much is stored of one adapter, or of all. adapter: BASE_MODEL_NAME for the base."""

    adapter: str
    num_versions: int
    num_salts: int
    num_blocks: int
    num_bytes: int
    oldest: float | None
    newest: float | None


def run_kv(args: argparse.Namespace) -> int:
    """Raises LoraServeError when nothing can be found there."""
    try:
        keys = read_mac_keys(vars(args).get("mac_key_file"))
        password_file = args.redis_password_file
        inspection = inspect(
            InspectedPlace(where=args.where, keys=keys, password_file=password_file)
        )
        if inspection is None:
            raise ConfigError(
                f"{_without_password(args.where)} is no place of a KV tier; name {PLACES}"
            )
        try:
            return ACTIONS[args.action](inspection, args)
        finally:
            inspection.close()
    except (TierError, OSError) as error:
        what = f"{_without_password(args.where)}: {str(error).removesuffix('.')}"
        remedy = "; see that it runs, and that the address and the password are right"
        raise ConfigError(what + remedy * ("://" in args.where)) from error


def _without_password(where: str) -> str:
    scheme, separator, rest = where.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}" if separator else where


# ── actions ─────────────────────────────────────────────────────────────────────────────────


def list_namespaces(inspection: Inspection, args: argparse.Namespace) -> int:
    summaries = sorted(inspection.summaries(), key=lambda one: _order(one.namespace))
    if args.json:
        _print_json([_as_json(one.namespace) | _amounts(one) for one in summaries])
        return 0
    _print_namespaces(summaries)
    return 0


def verify(inspection: Inspection, args: argparse.Namespace) -> int:
    verdicts = sorted(inspection.verify(), key=lambda one: _order(one.namespace))
    num_refused = sum(one.refused.total() for one in verdicts)
    num_broken = inspection.num_broken()
    if args.json:
        _print_json([_as_json(one.namespace) | _judgement(one) for one in verdicts])
    else:
        header = ("adapter", "version", "gen", "salt", "model", "good", "size", "bad")
        rows = [
            (*_identity(one.namespace), f"{one.num_good:,}", size_text(one.num_bytes),
             ", ".join(f"{count:,} {cause}" for cause, count in one.refused.items()) or "none")
            for one in verdicts
        ]  # fmt: skip
        _print_table(header, rows)
        if num_refused:
            print(
                f"{num_refused:,} bad: no server will use them, each is recomputed when it is "
                "asked for, and then set aside",
                file=sys.stderr,
            )
    if num_broken:
        print(
            f"{num_broken:,} with a damaged descriptor: whose KV that is cannot be read, and "
            "no server will use it",
            file=sys.stderr,
        )
    return EXIT_REFUSED if num_refused or num_broken else 0


def clear(inspection: Inspection, args: argparse.Namespace) -> int:
    now = time.time()
    found = [one for one in inspection.summaries() if _is_chosen(one, args, now)]
    chooses_all = all(
        one is None for one in (args.adapter, args.version, args.salt, args.older_than)
    )
    num_blocks = sum(one.num_blocks for one in found)
    amount = f"{num_blocks:,} blocks, {size_text(sum(one.num_bytes for one in found))}"
    if args.dry_run:
        _print_namespaces(found)
        print(f"would delete {amount}")
        return 0
    if not args.yes and not _is_confirmed(found, amount, args.where):
        print("nothing was deleted")
        return EXIT_REFUSED
    if chooses_all:
        inspection.clear_everything()
    else:
        inspection.clear([one.namespace for one in found])
    print(f"deleted {amount}")
    return 0


def _is_confirmed(found: Sequence[Summary], amount: str, where: str) -> bool:
    """Ask on the terminal. Raises ConfigError where there is none."""
    place = _without_password(where)
    if not sys.stdin.isatty():
        raise ConfigError(
            f"{place}: this would delete {amount}, and there is no terminal to ask on; add --yes, "
            "or --dry-run to see what would go"
        )
    _print_namespaces(found)
    try:
        answer = input(f"Delete {amount}, from {place}? [y/N] ")
    except EOFError:
        return False
    return answer.strip().lower() in ("y", "yes")


def _is_chosen(summary: Summary, args: argparse.Namespace, now: float) -> bool:
    namespace, newest = summary.namespace, summary.newest or 0.0
    return (
        args.adapter in (None, namespace.lora_name)
        and namespace.digest.hex().startswith(args.version or "")
        and namespace.salt_digest.hex().startswith(args.salt or "")
        and (args.older_than is None or now - newest >= args.older_than)
    )


def show_stats(inspection: Inspection, args: argparse.Namespace) -> int:
    summaries, facts = inspection.summaries(), inspection.facts()
    by_name: dict[str, list[Summary]] = {}
    for one in summaries:
        by_name.setdefault(one.namespace.lora_name, []).append(one)
    totals = [_totals(name, by_name[name]) for name in sorted(by_name)]
    if args.json:
        _print_json({"adapters": totals, "tier": facts})
        return 0
    now = time.time()
    rows = [_totals_row(one, _shown_name(one.adapter), now) for one in totals]
    rows += [_totals_row(_totals("all", summaries), "all", now)] * (len(rows) > 1)
    _print_table(("adapter", "versions", "salts", "blocks", "size", "oldest", "newest"), rows)
    print()
    for name, value in facts.items():
        title, is_size = name.removesuffix("_bytes").replace("_", " "), name.endswith("_bytes")
        print(f"{title:<18}{size_text(value) if is_size and isinstance(value, int) else value}")
    return 0


# ── words and columns ───────────────────────────────────────────────────────────────────────


def size_text(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in UNITS[:-1]:
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} {UNITS[-1]}"


def age_text(written: float | None, now: float) -> str:
    if written is None:
        return "–"
    seconds = max(now - written, 0.0)
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _shown_name(lora_name: str) -> str:
    return SHOWN_BASE_MODEL if lora_name == BASE_MODEL_NAME else lora_name


def _identity(namespace: TierNamespace) -> tuple[str, str, str, str, str]:
    return (
        _shown_name(namespace.lora_name),
        namespace.digest.hex()[:SHORT_DIGEST] or "–",
        "–" if namespace.lora_name == BASE_MODEL_NAME else str(namespace.generation),
        namespace.salt_digest.hex()[:SHORT_DIGEST] or "–",
        namespace.model.hex()[:SHORT_DIGEST],
    )


def _order(namespace: TierNamespace) -> tuple[str, int, bytes, bytes]:
    return namespace.lora_name, namespace.generation, namespace.digest, namespace.salt_digest


def _as_json(namespace: TierNamespace) -> dict[str, object]:
    return {
        "adapter": None if namespace.lora_name == BASE_MODEL_NAME else namespace.lora_name,
        "digest": namespace.digest.hex() or None,
        "generation": namespace.generation,
        "salt_digest": namespace.salt_digest.hex() or None,
        "model": namespace.model.hex(),
        "layout": namespace.layout.hex(),
        "root": namespace.root.hex(),
        "block_bytes": namespace.block_bytes,
    }


def _amounts(summary: Summary) -> dict[str, object]:
    return {
        "num_blocks": summary.num_blocks,
        "num_bytes": summary.num_bytes,
        "oldest": summary.oldest,
        "newest": summary.newest,
    }


def _judgement(verdict: Verdict) -> dict[str, object]:
    return {
        "num_good": verdict.num_good,
        "num_bytes": verdict.num_bytes,
        "refused": dict(verdict.refused),
    }


def _totals(name: str, summaries: Sequence[Summary]) -> Totals:
    spaces = [one.namespace for one in summaries]
    return Totals(
        adapter=name,
        num_versions=len({(one.lora_name, one.digest, one.generation) for one in spaces}),
        num_salts=len({one.salt_digest for one in spaces if one.salt_digest}),
        num_blocks=sum(one.num_blocks for one in summaries),
        num_bytes=sum(one.num_bytes for one in summaries),
        oldest=min((one.oldest for one in summaries if one.oldest is not None), default=None),
        newest=max((one.newest for one in summaries if one.newest is not None), default=None),
    )


def _totals_row(totals: Totals, title: str, now: float) -> tuple[str, ...]:
    counts = (totals.num_versions, totals.num_salts, totals.num_blocks)
    ages = (age_text(totals.oldest, now), age_text(totals.newest, now))
    return (title, *(f"{count:,}" for count in counts), size_text(totals.num_bytes), *ages)


def _print_namespaces(summaries: Sequence[Summary]) -> None:
    header = ("adapter", "version", "gen", "salt", "model", "blocks", "size", "oldest", "newest")
    now = time.time()
    rows = [
        (*_identity(one.namespace), f"{one.num_blocks:,}", size_text(one.num_bytes),
         age_text(one.oldest, now), age_text(one.newest, now))
        for one in summaries
    ]  # fmt: skip
    _print_table(header, rows)


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print(escaped(text_table(header, rows), kept="\n") if rows else "nothing is stored here")


def _print_json(document: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(document), indent=1).decode())


ACTIONS: Mapping[str, Action] = {
    "ls": list_namespaces,
    "verify": verify,
    "clear": clear,
    "stats": show_stats,
}
