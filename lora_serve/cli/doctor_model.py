"""Whether a model fits on this machine: its weights, and KV for how many tokens.

Reads the model's config alone, so what kernels add by packing weights is not counted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from lora_serve.cli.doctor_finding import Finding, Level
from lora_serve.cli.doctor_machine import available_bytes
from lora_serve.cli.doctor_ranks import share_findings
from lora_serve.cli.hub import prepare_hub
from lora_serve.config import CacheConfig, SchedulerConfig
from lora_serve.config.model import AUTO, SMOLLM2
from lora_serve.demo.smollm2 import DTYPE, named_model
from lora_serve.errors import ConfigError
from lora_serve.models.base import ModelSpec, num_parameters
from lora_serve.models.checkpoints.choose import format_of
from lora_serve.models.choices import dtype_name
from lora_serve.models.source import load_spec, model_path
from lora_serve.observability.sizes import shown_bytes, shown_count
from lora_serve.worker.memory import cpu_room

VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LENGTHS = (1024, 4096, 16_384, 65_536)
RESERVED_BYTES = 2**30  # of two processes, with what a step needs


def model_findings(model: str, num_ranks: int = 1) -> list[Finding]:
    """Findings for `lora-serve serve MODEL` on the CPU, with all other settings as they are."""
    try:
        prepare_hub([model], None)
        path = model_path(named_model(model, _tell), None, AUTO, with_weights=False)
        spec = load_spec(path)
        dtype = dtype_name(DTYPE if model == SMOLLM2 else AUTO, spec)
    except ConfigError as error:
        return [Finding("model", str(error), Level.ERROR, "see docs/models.md for what is served")]
    told = f"{model}: {spec.architecture} from {format_of(path, AUTO).name}"
    value_bytes = VALUE_BYTES[dtype]
    shares = share_findings(num_ranks, spec, value_bytes) if num_ranks > 1 else ()
    return [*_weights(told, spec, dtype), *_kv(spec, value_bytes), *shares]


def _tell(line: str) -> None:
    print(f"lora-serve: {line}", file=sys.stderr)


def _weights(model: str, spec: ModelSpec, dtype: str) -> Iterator[Finding]:
    """model: as it is told."""
    count = num_parameters(spec)
    size = count * VALUE_BYTES[dtype]
    told = f"{model}, {shown_count(count)} parameters, {dtype}; weights {shown_bytes(size)}"
    free = available_bytes()
    if size + RESERVED_BYTES > free:
        yield Finding(
            "model",
            f"{told}, with about {shown_bytes(RESERVED_BYTES)} for the processes: more than the "
            f"{shown_bytes(free)} that are available",
            Level.ERROR,
            "free memory, take a smaller model, or --quantization int8 (half) or int4 (a quarter)",
        )
    else:
        yield Finding("model", told)


def _kv(spec: ModelSpec, value_bytes: int) -> Iterator[Finding]:
    weights = num_parameters(spec) * value_bytes
    free = max(0, available_bytes() - weights - RESERVED_BYTES)
    longest = spec.max_positions
    most_needed = SchedulerConfig().max_num_seqs * kv_bytes(spec, value_bytes, longest)
    room = cpu_room(free, CacheConfig().gpu_memory_utilization, most_needed).num_bytes
    lengths = [length for length in (*LENGTHS, longest) if length <= longest]
    fits = [
        f"{room // kv_bytes(spec, value_bytes, length):,} of {length:,} tokens"
        for length in dict.fromkeys(lengths)
    ]
    per_token = kv_bytes(spec, value_bytes, LENGTHS[0]) // LENGTHS[0]
    told = (
        f"{shown_bytes(room)} by default, {shown_bytes(per_token)} a token: room for "
        f"{', or '.join(fits)}"
    )
    if room < kv_bytes(spec, value_bytes, longest):
        yield Finding(
            "KV cache",
            f"{told}; not for one request of the model's whole length",
            Level.HINT,
            "--max-model-len for shorter requests, or --kv-cache-memory-bytes for more memory",
        )
    else:
        yield Finding("KV cache", told)


def kv_bytes(spec: ModelSpec, value_bytes: int, num_tokens: int) -> int:
    """Bytes of KV that a request of this length holds at its end, of windows what they show."""
    return sum(
        2
        * layer.num_kv_heads
        * layer.head_size
        * value_bytes
        * min(num_tokens, layer.window or num_tokens)
        for layer in spec.kv_specs()
    )
