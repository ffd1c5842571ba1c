"""The reference, made from the code: flags, routes, metrics and errors, each a page of Markdown.

The pages are made when the site is built and are not kept in the repository, so none can be stale,
and no two changes meet in one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from importlib import import_module
from typing import get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from lora_serve.cli.main import COMMANDS
from lora_serve.cli.parser import OneLineParser
from lora_serve.engine_stats import RequestTimes, TierContents, TierFigures
from lora_serve.kv_tiers.base import Cause
from lora_serve.kv_tiers.breaker import Breaker
from lora_serve.kv_tiers.counters import TierCounters
from lora_serve.messages import AdapterInfo, StepOutputs
from lora_serve.observability.http import HTTPMetrics
from lora_serve.observability.kv_tier_series import kv_tier_series
from lora_serve.observability.metrics import EngineMetrics
from lora_serve.server.http.errors import HTTP_TYPES, STATUS_AND_TYPE
from lora_serve.server.operation import Access, Operation
from lora_serve.server.routes import OPERATIONS

ACCESS = {
    Access.OPEN: "everyone",
    Access.KEY: "API keys",
    Access.OPERATOR: "operators",
    Access.ADMIN: "admins",
}


def flags_page() -> str:
    """Every flag of every command, with its help, as `--help` has them."""
    lines = ["# Flags", "", "Made from the program: `lora-serve COMMAND --help` says the same.", ""]
    for name, what in COMMANDS.items():
        lines += [f"## lora-serve {name}", "", f"{_sentence(what)}", ""]
        for title, parser in _parsers(name):
            if title:
                lines += [f"### lora-serve {title}", "", *_described(parser)]
            lines += _groups(parser)
    return "\n".join(lines)


def routes_page() -> str:
    """Every route, who may use it, an example of its body, and its statuses."""
    lines = [
        *(
            "# Routes",
            "",
            "Made from the server's table of routes. A running server shows the same,",
        ),
        *("with every field of every body, at `/docs` and `/openapi.json`.", ""),
        *("| | who may use it |", "|---|---|"),
        *(f"| {ACCESS[access]} | {access.value} |" for access in Access),
        *(
            "",
            "Where there are no keys, [operations](../operations.md#who-may-do-what) says who is",
        ),
        *("who.", "", "| route | | for | answers |", "|---|---|---|---|"),
        *map(_route_row, OPERATIONS),
        *("", "## Examples", ""),
    ]
    for operation in OPERATIONS:
        if operation.example:
            body = json.dumps(dict(operation.example), indent=2)
            lines += [f"### {_call(operation)}", "", "```json", body, "```", ""]
    return "\n".join(lines)


def metrics_page() -> str:
    """Every family of series that a server may show at /metrics."""
    lines = ["# Metrics", "", "Made from a server's own registry: what `/metrics` shows.", ""]
    for title, families in metric_families().items():
        lines += [f"## {title}", "", "| series | kind | labels | |", "|---|---|---|---|"]
        for family in sorted(families, key=lambda family: family.name):
            if family.name.endswith("_created"):
                continue  # of each histogram, when it began
            labels = sorted({key for sample in family.samples for key in sample.labels} - {"le"})
            names = ", ".join(f"`{label}`" for label in labels)
            end = "_total" if family.type == "counter" else ""
            help = family.documentation
            lines.append(f"| `{family.name}{end}` | {family.type} | {names} | {_cell(help)} |")
        lines.append("")
    return "\n".join(lines)


def metric_families() -> Mapping[str, list[Metric]]:
    """The families by who has them, of an engine that knows an adapter, a request and a tier."""
    engine = EngineMetrics("MODEL")
    engine.observe_adapters([specimen(AdapterInfo)])
    engine.observe(StepOutputs(outputs=(), finished=(specimen(RequestTimes),)))
    engine.watch_refusals({"queue": 0})
    http = HTTPMetrics()
    http.observe("/health", "GET", 200, 0.0)
    tiers = list(kv_tier_series({"model_name": "", "engine": ""}, [tier_specimen()]))
    return {
        "Engine and adapters": _read(engine.render()),
        "KV tiers": tiers,
        "HTTP, and the server's process": _read(http.render()),
    }


def tier_specimen() -> TierFigures:
    """Figures of a tier with something to tell by cause."""
    counters = TierCounters()
    counters.miss(Cause.ABSENT)
    counters.unsaved(Cause.ABSENT, 1)
    contents = TierContents(quarantined={Cause.ABSENT.value: 1})
    return counters.figures("ram", contents, Breaker(), Breaker())


def specimen(kind: type[Struct]) -> Struct:
    """One with the least in every field that has no default."""
    hints = get_type_hints(kind)
    least: dict[object, object] = {
        str: "name",
        int: 0,
        float: 0.0,
        bool: False,
    }
    values: dict[str, object] = {}
    for field in msgspec.structs.fields(kind):
        if field.required:
            hint = hints[field.name]
            kinds = (hint, get_origin(hint), *get_args(hint))
            values[field.name] = next(least[each] for each in kinds if each in least)
    return kind(**values)


def _read(page: bytes) -> list[Metric]:
    return list(text_string_to_metric_families(page.decode()))


def errors_page() -> str:
    """Every error that has a status, by status."""
    lines = [
        *("# Errors", "", "Made from the server's table of errors. The body of every error is", ""),
        *("```json", '{"error": {"message": "…", "type": "…", "param": null, "code": 400}}', "```"),
        *("", "on all routes but Anthropic's, which have [their own](../api.md#anthropics-api)."),
        "`message` names the value, the limit and what to do. `param` names the field at fault,",
        *("where there is one. A 503 has `Retry-After` where a later try may succeed.", ""),
        *("| status | `type` | when |", "|---|---|---|"),
    ]
    rows = [(*STATUS_AND_TYPE[kind], _first_sentence(kind)) for kind in STATUS_AND_TYPE]
    rows += [(404, HTTP_TYPES[404], "There is no such route.")]
    rows += [(405, HTTP_TYPES[405], "The route has no such method; `Allow` names those it has.")]
    for status, name, when in sorted(rows):
        lines.append(f"| {status} {HTTPStatus(status).phrase} | `{name}` | {when} |")
    return "\n".join(lines) + "\n"


def _parsers(command: str) -> Iterator[tuple[str, OneLineParser]]:
    """The command's parser, and those of what it can be asked to do, each with its words."""
    parser = OneLineParser(prog=f"lora-serve {command}")
    import_module(f"lora_serve.cli.{command}").add_arguments(parser)
    yield "", parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield f"{command} {name}", below


def _described(parser: argparse.ArgumentParser) -> list[str]:
    return [_cell(parser.description or ""), ""]


def _groups(parser: argparse.ArgumentParser) -> Iterator[str]:
    for group in parser._action_groups:
        rows = [_flag_row(each) for each in group._group_actions if _is_shown(each)]
        if rows:
            yield from (f"**{_sentence(group.title or '')}**", "")
            yield from ("| | |", "|---|---|", *rows, "")


def _is_shown(action: argparse.Action) -> bool:
    hidden = (argparse._HelpAction, argparse._SubParsersAction)
    return not isinstance(action, hidden) and action.help is not argparse.SUPPRESS


def _flag_row(action: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else "")
    value = " ".join(value) if isinstance(value, tuple) else value
    takes = f" `{value}`" if value and action.nargs != 0 else ""
    help = (action.help or "").replace("%%", "%").replace("%(default)s", str(action.default))
    return f"| {names}{takes} | {_cell(help)} |"


def _route_row(operation: Operation) -> str:
    statuses = ", ".join(map(str, (200, *sorted(operation.errors))))
    return (
        f"| `{_call(operation)}` | {_cell(operation.summary)} "
        f"| {ACCESS[operation.access]} | {statuses} |"
    )


def _call(operation: Operation) -> str:
    return f"{operation.method.upper()} {operation.path}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _first_sentence(kind: type[BaseException]) -> str:
    return _cell(kind.__doc__ or "").partition(". ")[0].rstrip(".") + "."


def _cell(text: str) -> str:
    """A text that fits a table's cell: one line, in which nothing is markup."""
    line = " ".join(text.split())
    for mark in ("\\", "|", "<", "*"):
        line = line.replace(mark, f"\\{mark}")
    return line


PAGES: Mapping[str, Callable[[], str]] = {
    "reference/flags.md": flags_page,
    "reference/routes.md": routes_page,
    "reference/metrics.md": metrics_page,
    "reference/errors.md": errors_page,
}
