"""The software: Python, packages, and the kernels that this machine's processor would run."""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version

from lora_serve.bench.machine import describe_machine
from lora_serve.cli.doctor_finding import Finding, Level

NATIVE = "lora_serve.ops._cpu"
COMPILERS = ("c++", "g++", "clang++")
# The kernels' paths, best first, with what a processor must have besides the next one's.
PATHS: Mapping[str, tuple[str, ...]] = {
    "amx": ("amx_tile", "amx_bf16"),
    "avx512bf16": ("avx512_bf16", "avx512_vbmi"),
    "avx512vnni": ("avx512_vnni",),
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq"),
    "avx2": ("avx2", "fma"),
    "scalar": (),
}
_NAME = re.compile(r"^[\w.-]+")
EXTRAS: Mapping[str, tuple[str, str]] = {  # by package: the extra, and what it is for
    "redis": ("redis", "KV in Redis or Valkey"),
    "xgrammar": ("xgrammar", "--structured-outputs-config.backend xgrammar"),
    "triton": ("cuda", "NVIDIA GPUs"),
    "matplotlib": ("bench", "lora-serve bench --plot"),
    "opentelemetry-sdk": ("otel", "--otlp-traces-endpoint"),
    "obstore": ("s3", "--lora-resolver s3://"),
    "ray": ("fleet", "--replicas"),
    "ai-dynamo": ("dynamo", "python -m lora_serve.dynamo"),
}


def software_findings() -> list[Finding]:
    return [*_python(), *_packages(), *_kernels(), *_extras()]


def _python() -> Iterator[Finding]:
    yield Finding(
        "Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    )


def _packages() -> Iterator[Finding]:
    needed = [_NAME.findall(each)[0] for each in requires("lora-serve") or () if ";" not in each]
    missing = [package for package in needed if _version(package) is None]
    if missing:
        yield Finding(
            "packages",
            f"{', '.join(missing)} cannot be found",
            Level.ERROR,
            "install lora-serve again: make install, or pip install lora-serve",
        )
    else:
        shown = [f"{name} {_version(name)}" for name in ("torch", "transformers", "peft")]
        yield Finding("packages", ", ".join(shown))


def _kernels() -> Iterator[Finding]:
    if importlib.util.find_spec(NATIVE) is None:
        compiler = next((name for name in COMPILERS if shutil.which(name)), None)
        has_compiler = (
            f"there is a compiler ({compiler})" if compiler else "there is no C++ compiler"
        )
        yield Finding(
            "kernels",
            "the reference kernels in plain torch, many times slower than native ones; "
            f"{has_compiler}",
            Level.WARNING,
            ("" if compiler else "apt-get install g++; then ") + "install lora-serve again",
        )
        return
    try:
        from lora_serve.ops._cpu import usable_paths
    except ImportError as error:
        yield Finding(
            "kernels",
            f"the native ones do not load: {error}",
            Level.WARNING,
            "install lora-serve again",
        )
        return
    path = usable_paths()[0]
    yield Finding("kernels", f"native, for {path}{_why_not_better(path)}")


def _why_not_better(path: str) -> str:
    """What the processor lacks of the best path, if it is not the best."""
    has = set(describe_machine(()).cpu_features)
    better = [each for each in PATHS if list(PATHS).index(each) < list(PATHS).index(path)]
    lacking = [flag for each in reversed(better) for flag in PATHS[each] if flag not in has]
    if not lacking:
        return ""
    return f"; faster ones need {', '.join(lacking)}, which this processor or its hypervisor lacks"


def _extras() -> Iterator[Finding]:
    there = [package for package in EXTRAS if _version(package) is not None]
    if there:
        yield Finding("extras", ", ".join(f"{name} {_version(name)}" for name in there))
    for package in EXTRAS:
        if package not in there:
            extra, purpose = EXTRAS[package]
            yield Finding(
                "extras",
                f"{package} is missing, which is for {purpose}",
                Level.HINT,
                f"pip install 'lora-serve[{extra}]', if you want that",
            )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
