"""Which routes are asked of every replica, and how their answers become one.

What changes adapters is none of them: the catalog brings it to all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import msgspec

from lora_serve.fleet.messages import AnswerHead, RawHeaders, WholeAnswer
from lora_serve.server.http.auth import METRICS_PATH
from lora_serve.server.operation import Access
from lora_serve.server.routes import OPERATIONS

RESPONSES_PREFIX = "/v1/responses/"


class Spread(Enum):
    """How an answer comes about.

    ONE: one replica's. SUM: all replicas', added up. PAGE: all replicas' metrics on one page.
    FINDER: of the replica that knows what is asked for; the others have not found it. REFUSED:
    one replica would do what all must, and no catalog tells the others.
    """

    ONE = "one"
    SUM = "sum"
    PAGE = "page"
    FINDER = "finder"
    REFUSED = "refused"


ASKED_OF_ALL: Mapping[str, Spread] = {
    "/reset_prefix_cache": Spread.SUM,
    "/pause": Spread.SUM,
    "/resume": Spread.SUM,
    "/abort_requests": Spread.SUM,
    "/inference/v1/abort_requests": Spread.SUM,
    "/v1/requests": Spread.SUM,
    "/load": Spread.SUM,
    "/adapter_changes": Spread.SUM,
    METRICS_PATH: Spread.PAGE,
}
# A request on any other path may be sent again when a replica is lost before it has answered.
CHANGES_ADAPTERS = frozenset(
    each.path
    for each in OPERATIONS
    if each.access is Access.ADMIN and each.method != "get" and each.path not in ASKED_OF_ALL
)


def spread_of(method: str, path: str, *, has_catalog: bool) -> Spread:
    """has_catalog: adapters that one replica changes are changed on all."""
    if not has_catalog and method not in ("GET", "HEAD") and changes_adapters(path):
        return Spread.REFUSED
    if path.startswith(RESPONSES_PREFIX):
        return Spread.FINDER
    return ASKED_OF_ALL.get(path, Spread.ONE)


def may_repeat(method: str, path: str) -> bool:
    """Whether a request may be done twice, because what it does the second time is the same."""
    return method in ("GET", "HEAD") or not changes_adapters(path)


def changes_adapters(path: str) -> bool:
    return any(
        path == known or ("{" in known and path.startswith(known.partition("{")[0]))
        for known in CHANGES_ADAPTERS
    )


def found(answers: Sequence[WholeAnswer]) -> WholeAnswer:
    """The answer of the replica that has found it, or one that says it was not found."""
    return min(answers, key=lambda answer: answer.head.status == 404)


def summed(answers: Sequence[WholeAnswer]) -> WholeAnswer:
    """One answer: numbers are added, lists joined, all else is the first one's; or an error."""
    worst = max(answers, key=lambda answer: answer.head.status)
    if worst.head.status >= 400 or len(answers) == 1:
        return worst
    try:
        bodies = [msgspec.json.decode(answer.body) for answer in answers]
    except msgspec.DecodeError:
        return answers[0]
    if not all(isinstance(body, dict) for body in bodies):
        return answers[0]
    return _with_body(answers[0], msgspec.json.encode(_sum(bodies)))


def _sum(bodies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    total = dict(bodies[0])
    for body in bodies[1:]:
        for name, value in body.items():
            before = total.get(name)
            if isinstance(before, list) and isinstance(value, list):
                total[name] = _in_order(before + value)
            elif _is_number(before) and _is_number(value):
                total[name] = before + value
    return total


def _in_order(items: list[Any]) -> list[Any]:
    """Events with a time by that, the newest first; anything else as it is.

    A change of the catalog, which every replica tells, comes once: as it is told where it was asked
    for, since the others add to `by` where that was.
    """
    if not all(isinstance(item, dict) and "time" in item for item in items):
        return items
    once: dict[object, dict[str, Any]] = {}
    for item in sorted(items, key=lambda item: len(str(item.get("by")))):
        serial = item.get("serial")
        once.setdefault(id(item) if serial is None else ("serial", serial), item)
    return sorted(once.values(), key=lambda item: item["time"], reverse=True)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def one_page(answers: Sequence[WholeAnswer]) -> WholeAnswer:
    """All replicas' metrics, each sample with the label `replica`."""
    worst = max(answers, key=lambda answer: answer.head.status)
    if worst.head.status != 200:
        return worst
    families: dict[str, list[str]] = {}
    for answer in answers:
        _add_page(families, answer.body.decode(), f'replica="{answer.head.replica_id}"')
    lines = [line for family in families.values() for line in family]
    return _with_body(answers[0], "".join(f"{line}\n" for line in lines).encode())


def _add_page(families: dict[str, list[str]], page: str, label: str) -> None:
    """Put a page's samples behind those of other pages: a family's must stand together."""
    family: list[str] = []
    for line in page.splitlines():
        if line.startswith("#"):
            name = line.split(" ", 3)[2]
            family = families.setdefault(name, [])
            if line not in family:
                family.append(line)
        elif line:
            name, brace, rest = line.partition("{")
            if brace:
                family.append(f"{name}{{{label},{rest}")
            else:
                name, _, value = line.partition(" ")
                family.append(f"{name}{{{label}}} {value}")


def _with_body(answer: WholeAnswer, body: bytes) -> WholeAnswer:
    head = answer.head
    kept = [each for each in head.headers if each[0].lower() != b"content-length"]
    headers: RawHeaders = (*kept, (b"content-length", str(len(body)).encode()))
    return WholeAnswer(AnswerHead(head.status, headers, head.replica_id), body)
