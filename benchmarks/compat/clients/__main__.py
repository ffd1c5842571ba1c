"""Try others' clients on our server: python -m benchmarks.compat.clients [CLIENT …].

Prints a table of clients and paths, writes it into docs/compatibility.md and, with the reason of
each failure, into benchmarks/results/compat_clients.json. Clients that are not run keep their rows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.common.facts import describe_machine, write_json
from benchmarks.common.make_checkpoint import AdapterShape, ensure_adapters
from benchmarks.common.page import folded, replace_between_marks
from benchmarks.compat.clients.inventory import CLIENTS, PATHS, Client, chosen_clients
from benchmarks.compat.clients.running import ClientResult, install_client, run_client
from benchmarks.compat.smollm2 import SHAPE, ensure_checkpoint
from benchmarks.peers.environment import InstallError
from lora_serve.bench.server import lora_serve_command, running_server
from lora_serve.demo.server_process import free_port

CACHE = Path.home() / ".cache" / "lora-serve"
MODEL, ADAPTER = "smollm2", "helper"
FLAGS = (
    *("--served-model-name", MODEL, "--max-model-len", "2048", "--max-num-seqs", "8"),
    *("--enable-tokenizer-info-endpoint", "--enable-auto-tool-choice"),
    *("--tool-call-parser", "hermes", "--enable-lora"),
)


def table(results: Sequence[ClientResult]) -> str:
    """A row a client; a path that it does not have is left empty."""
    paths = [path for path in PATHS if any(path in result.reasons for result in results)]
    heads = [path.replace("_", " ") for path in paths]
    lines = [f"| client | {' | '.join(heads)} |", "|---" + "|:-:" * len(heads) + "|"]
    for result in results:
        cells = [_cell(result.reasons.get(path)) for path in paths]
        lines.append(f"| {result.name} {result.version} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(reason: str | None) -> str:
    return "" if reason is None else "**fails**" if reason else "✓"


def section(results: Sequence[ClientResult]) -> str:
    """The table, and below it why what fails does."""
    fails = [
        f"- {result.name}, {path.replace('_', ' ')}: {reason}"
        for result in results
        for path, reason in result.reasons.items()
        if reason
    ]
    return folded("\n\n".join(part for part in (table(results), "\n".join(fails)) if part))


def merged(old: Sequence[ClientResult], new: Sequence[ClientResult]) -> list[ClientResult]:
    """Every client's latest result, in the order of the inventory."""
    latest = {result.name: result for result in (*old, *new)}
    return [latest[client.name] for client in CLIENTS if client.name in latest]


def read_results(path: Path) -> list[ClientResult]:
    if not path.is_file():
        return []
    return [ClientResult(**row) for row in json.loads(path.read_text())["results"]]


async def try_clients(
    clients: Sequence[Client], cache: Path, environments: Path, patience: float
) -> list[ClientResult]:
    """One client after the other on one server."""
    checkpoint = ensure_checkpoint(cache)
    (adapter,) = ensure_adapters(cache / "adapters", 1, AdapterShape(8), SHAPE).values()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    arguments = [*FLAGS, "--lora-modules", f"{ADAPTER}={adapter}"]
    variables = {"COMPAT_SERVER": url, "COMPAT_MODEL": MODEL, "COMPAT_ADAPTER": ADAPTER}
    variables |= {"COMPAT_CHECKPOINT": str(checkpoint), "HF_HUB_OFFLINE": "1"}
    results = []
    command = lora_serve_command(str(checkpoint), port, arguments)
    async with running_server(command, url, cache / "clients-server.log"):
        for client in clients:
            try:
                environment = await asyncio.to_thread(install_client, client, environments)
                result = await asyncio.to_thread(
                    run_client, client, environment, variables, patience
                )
            except InstallError as error:
                result = ClientResult(client.name, "", {"start": str(error)})
            print(section([result]), flush=True)
            results.append(result)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help="by the begin of its name")
    parser.add_argument("--cache", type=Path, default=CACHE / "compat", metavar="DIR")
    parser.add_argument("--environments", type=Path, default=CACHE / "clients", metavar="DIR")
    parser.add_argument(
        "--results", type=Path, default=Path("benchmarks/results/compat_clients.json")
    )
    parser.add_argument("--page", type=Path, help="markdown to put the table into")
    parser.add_argument("--patience", type=float, default=600, help="seconds for a client")
    args = parser.parse_args()
    clients = chosen_clients(args.clients)
    new = asyncio.run(try_clients(clients, args.cache, args.environments, args.patience))
    results = merged(read_results(args.results), new)
    rows = [asdict(result) for result in results]
    write_json(args.results, {"machine": describe_machine(), "results": rows})
    if args.page:
        page = args.page.read_text()
        args.page.write_text(replace_between_marks(page, "clients", section(results)))


if __name__ == "__main__":
    main()
