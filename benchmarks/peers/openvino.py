"""OpenVINO GenAI's continuous batching, exported by optimum-intel; servers/ has its HTTP.

optimum-intel asks for torchvision, which would choose another torch: it is installed alone,
after what a text model's export needs.
"""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.peers.environment import REPOSITORY, TORCH, Environment
from benchmarks.peers.peer import Deployment, Launch, Limits, version_of

VERSION = "2026.4.1.0"
GENAI = f"openvino-genai=={VERSION}"
OPTIMUM_INTEL = "optimum-intel==2.2.0"
EXPORT_NEEDS = ("optimum==2.3.0", "transformers<5.6", "huggingface-hub<1.22", "nncf>=3.3",
                "requests", "peft")  # fmt: skip
WEIGHT_FORMATS = {"": "fp16", "int8": "int8"}


class OpenVino:
    name = "openvino"
    recipe = f"{GENAI} {OPTIMUM_INTEL}"
    notes = (
        f"GenAI {VERSION}; computes in bf16, keeps KV in 8 bits, as it does by default; with "
        "adapters one request at a time"
    )
    limits = Limits(
        adapter_batching="one request at a time with adapters",
        many_adapters="all adapters must be known when the model is compiled",
        int4="not measured",
    )

    def install(self, environment: Environment) -> None:
        environment.pip("--upgrade", "pip")
        environment.pip(TORCH)
        environment.pip(TORCH, GENAI, *EXPORT_NEEDS)
        environment.pip("--no-deps", OPTIMUM_INTEL)

    def prepare(self, environment: Environment, deployment: Deployment) -> None:
        model = _model(environment, deployment)
        if (model / "openvino_model.bin").is_file():
            return
        export = [environment.program("optimum-cli"), "export", "openvino"]
        task = ["--task", "text-generation-with-past"]
        weights = ["--weight-format", WEIGHT_FORMATS[deployment.quantization]]
        unfinished = model.with_suffix(".unfinished")
        source = ["--model", str(deployment.checkpoint)]
        path = f"{environment.python.parent}:{os.environ['PATH']}"
        environment.run(
            [*export, *source, *task, *weights, str(unfinished)],
            variables={"PATH": path, "HF_HUB_OFFLINE": "1"},
        )
        unfinished.rename(model)

    def launch(self, environment: Environment, deployment: Deployment, port: int) -> Launch:
        module = "benchmarks.peers.servers.openvino_genai_server"
        adapters = (
            f"{name}={path / 'adapter_model.safetensors'}"
            for name, path in deployment.adapters.items()
        )
        model = str(_model(environment, deployment))
        command = (str(environment.python), "-m", module, model, str(port), *adapters)
        return Launch(command=command, variables={"PYTHONPATH": str(REPOSITORY)})


def _model(environment: Environment, deployment: Deployment) -> Path:
    version = version_of(deployment.checkpoint)
    return environment.root / f"model-{version}-{WEIGHT_FORMATS[deployment.quantization]}"
