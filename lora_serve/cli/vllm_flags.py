"""Flags of `vllm serve` that change nothing here, so that its command lines start this server.

A flag stands here if leaving it out gives the same server. With a value that would ask for
something else it is refused by name. Every flag that was given is told of at the start.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class InertFlag:
    """neutral: the values that ask for nothing; None where any is one, () for a switch."""

    names: tuple[str, ...]
    why: str
    neutral: tuple[str, ...] | None = ()


_ONE_MACHINE = "a model is divided by --tensor-parallel-size alone, on one machine"
_KERNELS = "kernels are chosen for the machine"
_TEXT = "models read text"
_BOTH = "every model generates text and gives embeddings"

INERT_FLAGS = (
    InertFlag(
        ("--enable-chunked-prefill", "--no-enable-chunked-prefill"),
        "prompts are always computed in chunks",
    ),
    InertFlag(("--trust-remote-code",), "no code of a model is run, with this flag or without"),
    InertFlag(("--pipeline-parallel-size", "-pp"), _ONE_MACHINE, ("1",)),
    InertFlag(("--data-parallel-size", "-dp"), _ONE_MACHINE, ("1",)),
    InertFlag(("--decode-context-parallel-size", "-dcp"), _ONE_MACHINE, ("1",)),
    InertFlag(("--distributed-executor-backend",), _ONE_MACHINE, ("mp", "uni")),
    InertFlag(("--disable-custom-all-reduce",), "ranks add nothing up"),
    InertFlag(("--fully-sharded-loras",), _ONE_MACHINE),
    InertFlag(("--api-server-count",), "one process takes requests", ("1",)),
    InertFlag(("--runner",), _BOTH, ("auto", "generate", "pooling")),
    InertFlag(("--task",), _BOTH, ("auto", "generate", "embed", "embedding")),
    InertFlag(("--convert",), _BOTH, ("auto", "none", "embed")),
    InertFlag(("--tokenizer-mode",), "tokenizers are the fast ones", ("auto", "hf")),
    InertFlag(("--config-format",), "configurations are Hugging Face's", ("auto", "hf")),
    InertFlag(("--kv-cache-dtype",), "the KV cache has the model's dtype", ("auto",)),
    InertFlag(("--lora-dtype",), "adapters have the model's dtype", ("auto",)),
    InertFlag(("--stream-interval",), "each token is sent as it comes", ("1",)),
    InertFlag(("--long-prefill-token-threshold",), "no prompt is held back", ("0",)),
    InertFlag(("--cpu-offload-gb",), "weights stay where they are", ("0", "0.0")),
    InertFlag(("--swap-space",), "preempted requests are computed again", None),
    InertFlag(("--response-role",), "answers are the assistant's", ("assistant",)),
    InertFlag(("--chat-template-content-format",), "contents are text", ("auto", "string")),
    InertFlag(("--ssl-cert-reqs",), "--ssl-ca-certs asks for certificates", ("0",)),
    InertFlag(("--enable-prompt-tokens-details",), "usage always counts cached tokens"),
    InertFlag(("--enable-request-id-headers",), "each answer has X-Request-Id"),
    InertFlag(("--enable-server-load-tracking",), "GET /load always answers"),
    InertFlag(("--enable-scale-out",), "the server always allows it"),
    InertFlag(("--enable-log-requests",), "requests are logged, without --disable-log-requests"),
    InertFlag(
        ("--disable-access-log-for-endpoints",),
        "requests that generate have a line of the log, no others",
        None,
    ),
    InertFlag(
        ("--enable-ssl-refresh",), "new connections get the certificate that then lies there"
    ),
    InertFlag(("--uvicorn-log-level",), "--log-level holds for all lines", None),
    InertFlag(("--disable-frontend-multiprocessing",), "the engine is always a process of its own"),
    InertFlag(("--h11-max-incomplete-event-size",), "heads have bounds of their own", None),
    InertFlag(("--h11-max-header-count",), "heads have bounds of their own", None),
    InertFlag(("--optimization-level", "-O"), _KERNELS, None),
    InertFlag(("--compilation-config", "-cc"), _KERNELS, None),
    InertFlag(("--attention-backend",), _KERNELS, None),
    InertFlag(("--performance-mode",), _KERNELS, None),
    InertFlag(("--max-seq-len-to-capture",), _KERNELS, None),
    InertFlag(("--disable-cascade-attn",), _KERNELS),
    InertFlag(("--limit-mm-per-prompt",), _TEXT, None),
    InertFlag(("--mm-processor-cache-gb",), _TEXT, None),
    InertFlag(("--skip-mm-profiling",), _TEXT),
    InertFlag(("--allowed-local-media-path",), _TEXT, None),
    InertFlag(("--max-parallel-loading-workers",), "checkpoints are mapped, not read", None),
    InertFlag(("--safetensors-load-strategy",), "checkpoints are mapped, not read", None),
    InertFlag(("--ignore-patterns",), "only files that are read are downloaded", None),
    InertFlag(("--enable-expert-parallel",), _ONE_MACHINE),
    InertFlag(("--aggregate-engine-logging",), _ONE_MACHINE),
    InertFlag(("--renderer-num-workers",), "texts are tokenized in threads", None),
    InertFlag(("--enable-reasoning",), "--reasoning-parser alone says how"),
    InertFlag(
        ("--reasoning-config",),
        "a thinking_token_budget ends at the marker that --reasoning-parser knows",
        (
            '{"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}',
            '{"reasoning_start_str": "[THINK]", "reasoning_end_str": "[/THINK]"}',
        ),
    ),
    InertFlag(("--show-hidden-metrics-for-version",), "no metric is hidden", None),
)


_TOKENIZER = (
    "the server always has a tokenizer; /inference/v1/generate answers with token ids alone"
)
NOT_OFFERED: Mapping[str, str] = MappingProxyType(
    {
        "--config": "write its settings as flags",
        "--download-dir": "HF_HOME says where downloads lie",
        "--enable-sleep-mode": "a server gives its memory back when it ends",
        "--exclude-tools-when-tool-choice-none": "leave tools out of such a request",
        "--guided-decoding-backend": "--structured-outputs-config.backend names the library",
        "--hf-token": "HF_TOKEN holds the token, which a flag would show to other processes",
        "--return-sampling-mask": "ask for logprobs, under --logprobs-mode processed_logprobs",
        "--skip-tokenizer-init": _TOKENIZER,
        "--tokens-only": _TOKENIZER,
        "--watermark-config": "no answer is marked",
    }
)


def add_inert_arguments(parser: argparse.ArgumentParser) -> None:
    """Take the flags; `told_of` gives what is to be said of those that were given."""
    group = parser.add_argument_group("flags of vLLM's without effect")
    for flag in INERT_FLAGS:
        options: dict[str, Any] = {"nargs": 0} if flag.neutral == () else {"metavar": "VALUE"}
        group.add_argument(
            *flag.names,
            action=_Inert,
            dest="inert",
            default=argparse.SUPPRESS,
            const=flag,
            help=_help(flag),
            **options,
        )


def told_of(args: argparse.Namespace) -> Sequence[str]:
    """A line for each flag that was given."""
    return getattr(args, "inert", ())


def with_effect(actions: Mapping[str, argparse.Action]) -> list[str]:
    """The flags among these that change something, which alone are worth proposing."""
    return [
        flag
        for flag, action in actions.items()
        if not isinstance(action, _Inert) and action.help != argparse.SUPPRESS
    ]


class _Inert(argparse.Action):
    """Notes the flag, or refuses its value."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        flag = self.const
        assert isinstance(flag, InertFlag), f"{option_string} has no entry in INERT_FLAGS"
        if flag.neutral and _normalised(values) not in map(_normalised, flag.neutral):
            raise argparse.ArgumentError(
                self, f"{values} is not supported: {flag.why}; leave the flag out"
            )
        told = f"{option_string} changes nothing: {flag.why}"
        namespace.inert = (*told_of(namespace), told)


def _normalised(value: str) -> str:
    """An object with its keys in order; another value as it is."""
    try:
        return json.dumps(json.loads(value), sort_keys=True) if value.startswith("{") else value
    except ValueError:
        return value


def _help(flag: InertFlag) -> str:
    only = f" (only {' or '.join(flag.neutral)})" if flag.neutral else ""
    return f"Has no effect: {flag.why}{only}."
