"""lora-serve itself, as this Python has it installed: nothing to build, nothing to convert."""

from __future__ import annotations

from importlib.util import find_spec

from benchmarks.peers.environment import Environment
from benchmarks.peers.peer import MODEL_NAME, Deployment, Launch, Limits
from lora_serve.bench.server import lora_serve_command

MAX_LORAS = 8  # in one step


class LoraServe:
    """All adapters stay in memory, as in S-LoRA's measurements."""

    name = "lora-serve"
    recipe = ""
    notes = "exact: every answer is bit for bit that of a cold server, alone"

    limits = Limits()

    def install(self, environment: Environment) -> None:
        assert find_spec("lora_serve"), "this module imports it"

    def prepare(self, environment: Environment, deployment: Deployment) -> None:
        pass

    def launch(self, environment: Environment, deployment: Deployment, port: int) -> Launch:
        arguments = [
            *("--served-model-name", MODEL_NAME),
            *("--max-num-seqs", str(deployment.max_running)),
            *("--max-model-len", str(deployment.max_model_len)),
            *("--cpu-threads", str(deployment.num_threads)),
        ]
        if deployment.quantization:
            arguments += ["--quantization", deployment.quantization]
        if deployment.quantize_activations:
            arguments.append("--quantize-activations")
        if deployment.adapters:
            modules = (f"{name}={path}" for name, path in deployment.adapters.items())
            in_memory = str(max(MAX_LORAS, len(deployment.adapters)))
            arguments += ["--enable-lora", "--max-loras", str(MAX_LORAS)]
            arguments += ["--max-cpu-loras", in_memory, "--lora-modules", *modules]
        command = lora_serve_command(str(deployment.checkpoint), port, arguments)
        return Launch(command=tuple(command))
