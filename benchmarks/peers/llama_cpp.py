"""llama.cpp's server, built from the sources that the llama-cpp-python sdist carries.

Adapters are fixed at launch and chosen by number in each request; requests with different
adapters never share a batch there.
"""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

from benchmarks.peers.environment import REPOSITORY, TORCH, Environment
from benchmarks.peers.peer import MODEL_NAME, Deployment, Launch, Limits, version_of

VERSION = "0.3.36"
BUILD = ("-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_BUILD_TESTS=OFF")
QUANTIZATIONS = {"": "BF16", "int8": "Q8_0", "int4": "Q4_K_M"}
# gcc 12 takes _tile_loadconfig to read 8 bytes and drops what is written behind them, so the first
# product on AMX ends the server with SIGILL; a barrier before it keeps them.
TILES = "ggml/src/ggml-cpu/amx/mmq.cpp"
LOADS_TILES = "    _tile_loadconfig(&tc);\n"
BARRIER = '    __asm__ volatile("" : : "r"(&tc) : "memory");\n'
CONVERT = "benchmarks.peers.servers.convert_to_gguf"


class LlamaCpp:
    name = "llama.cpp"
    recipe = f"llama-cpp-python {VERSION} with a barrier"
    notes = (
        f"as llama-cpp-python {VERSION} carries it, with a barrier that its AMX kernels need; "
        "requests of one adapter share a batch"
    )
    limits = Limits(many_adapters="every adapter must be converted, and named at launch")

    def install(self, environment: Environment) -> None:
        environment.pip("--upgrade", "pip")
        environment.pip("cmake", "ninja", "scikit-build-core", TORCH)
        environment.run(
            [str(environment.python), "-m", "pip", "download", "--no-deps", "--no-binary", ":all:",
             "--no-build-isolation", "--dest", "sdist", f"llama-cpp-python=={VERSION}"]
        )  # fmt: skip
        (archive,) = (environment.root / "sdist").glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(environment.root, filter="data")
        source = _source(environment)
        _keep_tile_configuration(source / TILES)
        needs = ("numpy", "sentencepiece", "transformers", "protobuf", str(source / "gguf-py"))
        environment.pip(*needs)
        cmake, build = environment.program("cmake"), str(environment.root / "build")
        release = "-DCMAKE_BUILD_TYPE=Release"
        environment.run([cmake, "-S", str(source), "-B", build, release, *BUILD])
        jobs, targets = str(os.cpu_count() or 1), ("llama-server", "llama-quantize")
        environment.run([cmake, "--build", build, "--parallel", jobs, "--target", *targets])

    def prepare(self, environment: Environment, deployment: Deployment) -> None:
        plain = _model(environment, deployment.checkpoint, "")
        if not plain.is_file():
            _convert(environment, "model", deployment.checkpoint, plain)
        quantized = _model(environment, deployment.checkpoint, deployment.quantization)
        if not quantized.is_file():
            environment.run([_binary(environment, "llama-quantize"), str(plain), str(quantized),
                             QUANTIZATIONS[deployment.quantization]])  # fmt: skip
        for name, path in deployment.adapters.items():
            converted = _adapter(environment, name, path)
            if not converted.is_file():
                base = ("--base", str(deployment.checkpoint))
                _convert(environment, "lora", path, converted, *base)

    def launch(self, environment: Environment, deployment: Deployment, port: int) -> Launch:
        model = _model(environment, deployment.checkpoint, deployment.quantization)
        running, threads = deployment.max_running, str(deployment.num_threads)
        command = [
            *(_binary(environment, "llama-server"), "--host", "127.0.0.1", "--port", str(port)),
            *("--model", str(model), "--alias", MODEL_NAME),
            *("--parallel", str(running), "--ctx-size", str(running * deployment.max_model_len)),
            *("--threads", threads, "--threads-batch", threads, "--no-webui"),
        ]
        for name, path in deployment.adapters.items():
            command += ["--lora", str(_adapter(environment, name, path))]
        if deployment.adapters:
            command.append("--lora-init-without-apply")
        numbers = enumerate(deployment.adapters)
        fields = {name: {"lora": [{"id": number, "scale": 1.0}]} for number, name in numbers}
        return Launch(command=tuple(command), adapter_fields=fields)


def _source(environment: Environment) -> Path:
    (source,) = environment.root.glob("llama_cpp_python-*/vendor/llama.cpp")
    return source


def _keep_tile_configuration(tiles: Path) -> None:
    text = tiles.read_text()
    assert text.count(LOADS_TILES) == 1, f"{tiles} loads tiles elsewhere"
    tiles.write_text(text.replace(LOADS_TILES, BARRIER + LOADS_TILES))


def _binary(environment: Environment, name: str) -> str:
    return str(environment.root / "build" / "bin" / name)


def _model(environment: Environment, checkpoint: Path, quantization: str) -> Path:
    name = f"model-{version_of(checkpoint)}-{QUANTIZATIONS[quantization]}.gguf"
    return environment.root / name


def _adapter(environment: Environment, name: str, checkpoint: Path) -> Path:
    return environment.root / "adapters" / f"{name}-{version_of(checkpoint)}.gguf"


def _convert(
    environment: Environment, what: str, source: Path, target: Path, *arguments: str
) -> None:
    target.parent.mkdir(exist_ok=True)
    unfinished = target.with_suffix(".unfinished")
    command = [str(environment.python), "-m", CONVERT, what, str(_source(environment)), str(source)]
    environment.run([*command, "--outtype", "bf16", "--outfile", str(unfinished), *arguments],
                    variables={"PYTHONPATH": str(REPOSITORY)})  # fmt: skip
    unfinished.rename(target)
