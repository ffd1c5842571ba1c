"""Check a server of the demo's model: python -m benchmarks.check SERVER [-- flags of check].

The server is started for it, with adapters and a prefix cache. vLLM is allowed to load adapters at
run time; llama.cpp, which cannot, serves two that are made up as the check makes them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.peers.environment import Environment, create_venv, ensure_environment
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.peer import MODEL_NAME, Deployment, Launch, Peer
from benchmarks.peers.vllm import Vllm
from lora_serve.bench.server import lora_serve_command, running_server
from lora_serve.check.adapters import ModelShape, write_adapter
from lora_serve.demo.model import ensure_demo
from lora_serve.demo.server_process import free_port

CACHE = Path.home() / ".cache" / "lora-serve"
PATIENCE_SECONDS = 900.0
NUM_THREADS = 2
VLLM_FLAGS = (
    *("--enable-lora", "--max-loras", "4", "--max-cpu-loras", "8", "--enforce-eager"),
    *("--enable-prompt-tokens-details", "--enable-prompt-embeds"),
)
# With threads bound to cores, vLLM waits for itself on a machine that others use.
VLLM_VARIABLES = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True)
class Checked:
    """A server to check. flags: what the check must be told of it."""

    launch: Launch
    flags: tuple[str, ...] = field(default=())


def ours(model: Path, port: int) -> Checked:
    flags = ("--served-model-name", MODEL_NAME, "--enable-lora", "--enable-prompt-embeds")
    return Checked(Launch(command=tuple(lora_serve_command(str(model), port, flags))))


def vllm(model: Path, port: int) -> Checked:
    peer, environment = _installed(Vllm())
    deployment = Deployment(checkpoint=model, max_running=32, max_model_len=4096)
    launch = peer.launch(environment, deployment, port)
    variables = {**launch.variables, **VLLM_VARIABLES}
    return Checked(replace(launch, command=(*launch.command, *VLLM_FLAGS), variables=variables))


def llama_cpp(model: Path, port: int) -> Checked:
    peer, environment = _installed(LlamaCpp())
    data = CACHE / "check"
    checkpoint = _named(model, data / "model")
    shape = ModelShape.read(model)
    adapters = {}
    for seed, name in enumerate("ab"):
        write_adapter(data / name, shape, str(model), seed, gain=2.0)
        adapters[name] = _named(data / name, data / f"adapter-{name}")
    deployment = Deployment(
        checkpoint=checkpoint, adapters=adapters, num_threads=NUM_THREADS, max_model_len=4096
    )
    peer.prepare(environment, deployment)
    launch = peer.launch(environment, deployment, port)
    fields = (json.dumps(launch.adapter_fields[name]) for name in adapters)
    flags = [word for one in fields for word in ("--served-adapter", f"{MODEL_NAME}={one}")]
    return Checked(launch, (*flags, "--model-path", str(model)))


SERVERS: dict[str, Callable[[Path, int], Checked]] = {
    "lora-serve": ours,
    "vllm": vllm,
    "llama.cpp": llama_cpp,
}


def _installed(peer: Peer) -> tuple[Peer, Environment]:
    environment = Environment(CACHE / "peers" / peer.name)
    ensure_environment(environment.root, peer.recipe, peer.install, create_venv)
    return peer, environment


def _named(source: Path, target: Path) -> Path:
    """A copy with a recipe, by which what is converted from it is named."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    (target / "recipe").write_text(str(source.resolve()))
    return target


async def check(name: str, flags: list[str]) -> int:
    """The exit code of the check."""
    model = ensure_demo(lambda line: print(line, file=sys.stderr)).model
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    checked = SERVERS[name](model, port)
    log = CACHE / f"check-{name}.log"
    variables = {**os.environ, **checked.launch.variables}
    ready = checked.launch.ready_path
    async with running_server(checked.launch.command, url, log, variables, ready, PATIENCE_SECONDS):
        words = (sys.executable, "-m", "lora_serve.cli.main", "check", url, *checked.flags, *flags)
        return await (await asyncio.create_subprocess_exec(*words)).wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("server", choices=sorted(SERVERS))
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="of lora-serve check, after --")
    args = parser.parse_args()
    return asyncio.run(check(args.server, args.flags))


if __name__ == "__main__":
    sys.exit(main())
