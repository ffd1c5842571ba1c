"""A pytest plugin, run in vLLM's environment: its tests' servers are ours, their models SmolLM2.

Reads COMPAT_COMMAND (how our server is started), COMPAT_MODEL (the checkpoint's directory) and
COMPAT_ADAPTER (an adapter's, in place of any that a test would download). Imports nothing of ours.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MODEL, ADAPTER = os.environ["COMPAT_MODEL"], os.environ["COMPAT_ADAPTER"]
NOT_OURS = {  # and the number of their values
    "--seed": 1,
    "--gpu-memory-utilization": 1,
    "--hf-overrides": 1,  # of a config.json that is not ours
    "--load-format": 1,
    "--structured-outputs-config.backend": 1,
}
SPELLED = {"--lora-module": "--lora-modules"}  # argparse takes beginnings of flags
NAMES = ("pretrained_model_name_or_path", "tokenizer_name")  # of a hub id, as arguments
HUB_MODULE = re.compile(r"^(\w+)=[\w-]+/[\w.-]+$")  # NAME=OWNER/REPOSITORY
PR_SET_PDEATHSIG = 1
LONGEST = 8192  # tokens that SmolLM2 has positions for


def pytest_configure(config: pytest.Config) -> None:
    from tests import utils

    server = utils.RemoteVLLMServer
    server._pre_download_model = lambda self, model, args: None
    server._wait_for_gpu_memory_release = lambda self, *args, **settings: None
    server._get_gpu_memory_used = lambda self: None
    for kind in (server, utils.RemoteOpenAIServer):
        kind._start_server = _start_ours


def _start_ours(
    self: Any, model: str, vllm_serve_args: list[str], env_dict: dict[str, str] | None
) -> None:
    named = () if "--served-model-name" in vllm_serve_args else ("--served-model-name", model)
    command = [
        *shlex.split(os.environ["COMPAT_COMMAND"]),
        MODEL,
        *named,
        *_ours(vllm_serve_args),
    ]
    print("started:", shlex.join(command))
    self.proc = subprocess.Popen(
        command,
        env={**os.environ, **(env_dict or {}), "PYTHONPATH": ""},
        stdout=sys.stdout,
        stderr=sys.stderr,
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )


def _ours(arguments: list[str]) -> list[str]:
    """The arguments as our server takes them, with our adapter in place of hub ids."""
    kept = [SPELLED.get(each, each) for each in _shortened(_without(arguments, NOT_OURS))]
    modules = "--lora-modules" in kept
    return [HUB_MODULE.sub(rf"\1={ADAPTER}", each) if modules else each for each in kept]


def _end_with_parent() -> None:
    """Let no server outlive a pytest that was killed: Linux sends it SIGTERM then."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _without(arguments: list[str], flags: dict[str, int]) -> list[str]:
    """The arguments but for these flags, each with its number of values."""
    kept, skipped = [], 0
    for argument in arguments:
        if skipped:
            skipped -= 1
        elif (flag := argument.partition("=")[0].replace("_", "-")) in flags:
            skipped = 0 if "=" in argument else flags[flag]
        else:
            kept.append(argument)
    return kept


def _shortened(arguments: list[str]) -> list[str]:
    """The arguments with each --max-model-len no longer than LONGEST."""
    flags = ["", *arguments]
    return [
        str(min(int(argument), LONGEST)) if flag == "--max-model-len" else argument
        for flag, argument in zip(flags, arguments, strict=False)
    ]


def _read_ours_for_any_hub_id() -> None:
    """Tokenizers, configs and snapshots of hub ids are SmolLM2's; adapters' are ours."""
    import huggingface_hub
    import transformers
    from vllm import tokenizers

    def local(read: Callable[..., Any]) -> Callable[..., Any]:
        def read_local(name: str | Path | None = None, *args: Any, **settings: Any) -> Any:
            name = name or next(settings.pop(key) for key in NAMES if key in settings)
            settings.pop("revision", None)
            return read(name if Path(name).is_dir() else MODEL, *args, **settings)

        return read_local

    model = transformers.AutoModelForCausalLM
    for auto in (transformers.AutoTokenizer, transformers.AutoConfig, model):
        auto.from_pretrained = local(auto.from_pretrained)
    tokenizers.get_tokenizer = local(tokenizers.get_tokenizer)
    huggingface_hub.snapshot_download = lambda *args, **settings: ADAPTER
    huggingface_hub.HfApi.snapshot_download = lambda self, *args, **settings: ADAPTER


_read_ours_for_any_hub_id()  # before the tests' own modules take these names
