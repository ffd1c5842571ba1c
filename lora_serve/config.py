"""What the user asked for: frozen parts, each the source of its command-line flags and their help.

What we found out (how many blocks, which end tokens) has its own types; nothing here changes.
A field's metadata holds the one sentence of help; `cli/arguments.py` makes the flags.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from typing import Any

from lora_serve.errors import ConfigError
from lora_serve.identity import HASH_ALGOS

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("int8", "int4")
SCHEDULING_POLICIES = ("fcfs", "priority")
FAIR_SHARES = ("none", "adapter", "key")
KV_STORE_POLICIES = ("all", "prompt-only", "after-n-hits")
KV_LOAD_FAILURE_POLICIES = ("recompute", "fail")
KV_CONNECTOR = "TieredConnector"  # what --kv-transfer-config may call it


def setting(help: str, default: Any, **metadata: Any) -> Any:
    """A field with its flag's help; `choices`, `metavar`, `repeat` go to the parser."""
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, in which arithmetic."""

    model: str = setting("Directory or hub id of the model; the demo's own if left out.", "")
    tokenizer: str | None = setting(
        "Directory or hub id of the tokenizer, if it is not the model's.", None, metavar="MODEL"
    )
    revision: str | None = setting("Branch, tag or commit of a hub model.", None, metavar="REV")
    served_model_name: tuple[str, ...] = setting(
        "Names the model answers to in the API; the model's path if left out.",
        (),
        repeat="nargs",
        metavar="NAME",
    )
    device: str = setting(
        "Where to compute; auto takes an NVIDIA GPU if torch sees one.", "auto", choices=DEVICES
    )
    dtype: str = setting(
        "Type of weights, activations and KV; auto takes the checkpoint's.", "auto", choices=DTYPES
    )
    quantization: str | None = setting(
        "Keep the weights of linear layers in 8 or 4 bits, quantised as they are loaded; adapters "
        "keep full precision.",
        None,
        choices=QUANTIZATIONS,
    )
    quantize_activations: bool = setting(
        "With --quantization, give linear layers their inputs in 8 bits, too: faster prompts, less "
        "precise.",
        False,
    )
    seed: int = setting("Seed of what has none of its own, such as dummy weights.", 0)
    max_model_len: int | None = setting(
        "Longest prompt and answer together, in tokens; the model's own limit if left out.", None
    )
    load_format: str = setting(
        "Where weights come from: the checkpoint's safetensors, or seeded random numbers.",
        "safetensors",
        choices=("safetensors", "dummy"),
    )
    generation_config: str = setting(
        "Take default sampling settings from the model's generation_config.json, or none.",
        "auto",
        choices=("auto", "none"),
    )
    enforce_eager: bool = setting(
        "Never record decode steps (on GPUs: CUDA graphs); run kernel by kernel.", False
    )
    batch_invariant: bool = setting(
        "On GPUs, sum in one order whatever the batch, so that answers are exact to the bit there, "
        "too; CPUs always do.",
        False,
    )
    enable_prompt_embeds: bool = setting(
        "Accept prompts as embedding tensors (prompt_embeds); off because they bypass the "
        "tokenizer.",
        False,
    )
    max_logprobs: int = setting("Most alternatives a request may ask logprobs for.", 20)
    override_op: tuple[str, ...] = setting(
        "Swap a kernel for another backend's, as in paged_attention=reference; repeatable.",
        (),
        repeat="append",
        metavar="OP=BACKEND",
    )
    cpu_threads: int | None = setting(
        "Threads for CPU kernels; if left out, one for each physical core that affinity and the "
        "container's quota allow, or OMP_NUM_THREADS if that is less.",
        None,
    )
    pin_cpu_threads: bool = setting(
        "Give each of these threads a core of its own, if they are as many as the cores.", True
    )

    def __post_init__(self) -> None:
        _require_at_least(1, "--max-model-len", self.max_model_len)
        _require_at_least(0, "--max-logprobs", self.max_logprobs)
        _require_at_least(1, "--cpu-threads", self.cpu_threads)
        if self.quantization not in (None, *QUANTIZATIONS):
            raise ConfigError(
                f"--quantization {self.quantization} must be one of {', '.join(QUANTIZATIONS)}"
            )
        if self.quantize_activations and self.quantization is None:
            raise ConfigError(
                "--quantize-activations needs --quantization, which says how weights are kept"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache and the prefix cache over it."""

    block_size: int = setting("Tokens in one KV block; a multiple of 16.", 16)
    gpu_memory_utilization: float = setting(
        "Share of the device's free memory that weights, a step, adapters and KV may take.", 0.9
    )
    kv_cache_memory_bytes: int | None = setting(
        "Bytes for the KV cache; on CPUs 4 GiB if left out.", None
    )
    num_gpu_blocks_override: int | None = setting(
        "Exact number of KV blocks, on any device, instead of sizing by memory.", None
    )
    enable_prefix_caching: bool = setting("Reuse KV of equal prompt prefixes.", True)
    prefix_caching_hash_algo: str = setting(
        "Hash of block identity; xxh3_128 is faster, for servers with one trusted tenant.",
        "sha256",
        choices=tuple(HASH_ALGOS),
    )

    def __post_init__(self) -> None:
        if self.block_size < 16 or self.block_size % 16:
            raise ConfigError(f"--block-size {self.block_size} is not a multiple of 16")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"--gpu-memory-utilization {self.gpu_memory_utilization} must be in (0, 1]"
            )
        _require_at_least(1, "--num-gpu-blocks-override", self.num_gpu_blocks_override)
        _require_at_least(1, "--kv-cache-memory-bytes", self.kv_cache_memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTierConfig:
    """Where KV lives beyond the device cache. No tier is used unless it is named here."""

    kv_ram_bytes: int | None = setting(
        "Keep KV in this many bytes of memory after it has left the device cache.", None
    )
    kv_disk_path: str | None = setting(
        "Keep KV in this directory, across restarts; several servers may share it.",
        None,
        metavar="DIR",
    )
    kv_disk_bytes: int = setting("Most bytes of KV below --kv-disk-path.", 16 * 2**30)
    kv_redis_url: str | None = setting(
        "Keep KV in this Redis or Valkey, which replicas share, as in redis://host:6379/0.",
        None,
        metavar="URL",
    )
    kv_store_policy: str = setting(
        "Which KV goes to the tiers: all, only that of prompts, or what requests asked for again.",
        "all",
        choices=KV_STORE_POLICIES,
    )
    kv_store_min_hits: int = setting(
        "With after-n-hits: how often KV must be asked for again before it is stored.", 1
    )
    kv_load_deadline_ms: int = setting(
        "Longest wait for KV from the tiers, in milliseconds; then it is recomputed.", 1000
    )
    kv_load_failure_policy: str = setting(
        "When a tier has KV but cannot give it: recompute it, or fail the request.",
        "recompute",
        choices=KV_LOAD_FAILURE_POLICIES,
    )
    kv_stale_version_seconds: int = setting(
        "How long the tiers keep the KV of an adapter version that was replaced.", 24 * 3600
    )
    kv_transfer_config: str | None = setting(
        "The settings above as JSON in vLLM's form, with kv_connector, kv_role and "
        "kv_connector_extra_config.",
        None,
        metavar="JSON",
    )

    def __post_init__(self) -> None:
        _require_at_least(1, "--kv-ram-bytes", self.kv_ram_bytes)
        _require_at_least(1, "--kv-disk-bytes", self.kv_disk_bytes)
        _require_at_least(1, "--kv-store-min-hits", self.kv_store_min_hits)
        _require_at_least(1, "--kv-load-deadline-ms", self.kv_load_deadline_ms)
        _require_at_least(0, "--kv-stale-version-seconds", self.kv_stale_version_seconds)
        _require_one_of(KV_STORE_POLICIES, "--kv-store-policy", self.kv_store_policy)
        _require_one_of(
            KV_LOAD_FAILURE_POLICIES, "--kv-load-failure-policy", self.kv_load_failure_policy
        )
        self.expanded()  # tells at once what is wrong with the JSON

    def expanded(self) -> KVTierConfig:
        """These settings with those of the JSON, and without the JSON.

        Raises:
            ConfigError: for JSON that says what is not known, or what a flag says as well.
        """
        if self.kv_transfer_config is None:
            return self
        given = _transfer_settings(self.kv_transfer_config)
        settings = {f.name: f for f in fields(self) if f.name != "kv_transfer_config"}
        for name, value in given.items():
            if name not in settings:
                raise ConfigError(f"--kv-transfer-config: no setting {name}; have {[*settings]}")
            kind = int if str(settings[name].type).startswith("int") else str
            if type(value) is not kind:
                raise ConfigError(f"--kv-transfer-config: {name} {value!r} is no {kind.__name__}")
            if getattr(self, name) != settings[name].default:
                raise ConfigError(f"--kv-transfer-config: {name} is given as a flag, too")
        return replace(self, kv_transfer_config=None, **given)


def _transfer_settings(text: str) -> dict[str, Any]:
    """The settings that vLLM-style JSON holds. Raises ConfigError for what it cannot mean here."""
    try:
        given = json.loads(text)
        settings = dict(given.pop("kv_connector_extra_config", {}))
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"--kv-transfer-config {text}: want a JSON object") from error
    for key, known in (("kv_connector", KV_CONNECTOR), ("kv_role", "kv_both")):
        if given.pop(key, known) != known:
            raise ConfigError(f'--kv-transfer-config: {key} must be "{known}"')
    return {**settings, **given}


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How much may run at once, and in which order."""

    max_num_seqs: int = setting("Most requests that run at once.", 128)
    max_num_batched_tokens: int = setting("Most tokens computed in one step.", 2048)
    scheduling_policy: str = setting(
        "Order of waiting requests: by arrival, or by priority (lower first) and then arrival.",
        "fcfs",
        choices=SCHEDULING_POLICIES,
    )
    fair_share: str = setting(
        "Give adapters, or API keys, equal shares of the tokens computed while they wait for each "
        "other; none serves in the order above alone.",
        "none",
        choices=FAIR_SHARES,
    )
    validate: bool = setting("Check the engine's invariants after every step (slow).", False)

    def __post_init__(self) -> None:
        _require_at_least(1, "--max-num-seqs", self.max_num_seqs)
        _require_at_least(1, "--max-num-batched-tokens", self.max_num_batched_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAConfig:
    """Adapters: how many, how large, from where."""

    enable_lora: bool = setting("Serve LoRA adapters, and allow loading them at run time.", False)
    max_loras: int = setting("Most different adapters in one step.", 8)
    max_cpu_loras: int | None = setting(
        "Most adapters kept in memory; the rest is read again when needed. 8 x max-loras if left "
        "out.",
        None,
    )
    max_lora_rank: int = setting("Highest rank an adapter may have.", 64)
    lora_modules: tuple[str, ...] = setting(
        'Adapters to load at start, as NAME=PATH or {"name": …, "path": …}.',
        (),
        repeat="nargs",
        metavar="NAME=PATH",
    )
    lora_allowed_roots: tuple[str, ...] = setting(
        "Only load adapters below these directories; anywhere if left out.",
        (),
        repeat="nargs",
        metavar="DIR",
    )

    def __post_init__(self) -> None:
        _require_at_least(1, "--max-loras", self.max_loras)
        _require_at_least(1, "--max-lora-rank", self.max_lora_rank)
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"--max-cpu-loras {self.max_cpu_loras} is below --max-loras {self.max_loras}; "
                "adapters of one step must all be in memory"
            )
        names = [name for name, _ in self.modules]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"--lora-modules names {name!r} {names.count(name)} times")
        if self.lora_modules and not self.enable_lora:
            raise ConfigError("--lora-modules needs --enable-lora")

    @property
    def modules(self) -> list[tuple[str, str]]:
        """(name, path) of each of `lora_modules`.

        Raises:
            ConfigError: for one that is neither NAME=PATH nor such JSON.
        """
        return [_name_and_path(module) for module in self.lora_modules]

    @property
    def max_resident(self) -> int:
        return self.max_cpu_loras if self.max_cpu_loras is not None else 8 * self.max_loras


def _name_and_path(module: str) -> tuple[str, str]:
    name, _, path = module.partition("=")
    if module.startswith("{"):
        try:
            entry = json.loads(module)
            name, path = entry["name"], entry["path"]
        except (ValueError, KeyError):
            name = path = ""
    if not (name and path):
        raise ConfigError(f'--lora-modules {module}: want NAME=PATH or {{"name": …, "path": …}}')
    return name, path


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """How much is taken on before requests are refused, and how long an engine may stand still."""

    max_num_queued_reqs: int | None = setting(
        "Most requests that may wait beyond the --max-num-seqs that run; more are refused with "
        "503.",
        None,
    )
    max_num_queued_tokens: int | None = setting(
        "Most prompt tokens of all requests that wait for their first output; more are refused "
        "with 503.",
        None,
    )
    max_stream_backlog: int = setting(
        "Pieces of a streamed answer that may wait for a slow reader; with more the answer is "
        "given up.",
        4096,
    )
    step_timeout: float = setting(
        "Seconds without a finished step, while requests wait, after which /health fails; 0 for "
        "never.",
        120.0,
    )

    def __post_init__(self) -> None:
        _require_at_least(0, "--max-num-queued-reqs", self.max_num_queued_reqs)
        _require_at_least(1, "--max-num-queued-tokens", self.max_num_queued_tokens)
        _require_at_least(1, "--max-stream-backlog", self.max_stream_backlog)
        _require_at_least(0, "--step-timeout", self.step_timeout)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP server."""

    host: str = setting("Address to listen on.", "0.0.0.0", metavar="ADDRESS")
    port: int = setting("Port to listen on.", 8000)
    api_key: tuple[str, ...] = setting(
        "Keys that may use the API; open to all if left out.", (), repeat="nargs", metavar="KEY"
    )
    admin_api_key: tuple[str, ...] = setting(
        "Keys that may also load and unload adapters and reset caches; every key may if left out.",
        (),
        repeat="nargs",
        metavar="KEY",
    )
    isolate_api_keys: bool = setting("Never share cached KV between API keys.", False)
    ignore_unknown_fields: bool = setting(
        "Ignore unknown fields of request bodies instead of refusing them by name.", False
    )
    chat_template: str | None = setting(
        "File with a chat template to use instead of the tokenizer's.", None, metavar="FILE"
    )
    max_body_bytes: int = setting("Largest request body accepted, in bytes.", 256 * 2**20)
    request_body_timeout: float = setting(
        "Seconds in which a request's body must have been sent; 0 for any.", 60.0
    )
    drain_timeout: float = setting(
        "Seconds that answers may still take after SIGTERM before they are ended.", 30.0
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port} must be in [0, 65535]")
        if self.isolate_api_keys and not (self.api_key or self.admin_api_key):
            raise ConfigError("--isolate-api-keys needs --api-key")
        _require_at_least(1, "--max-body-bytes", self.max_body_bytes)
        _require_at_least(0, "--request-body-timeout", self.request_body_timeout)
        _require_at_least(0, "--drain-timeout", self.drain_timeout)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All that an engine needs; the server has its own part."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    kv_tiers: KVTierConfig = field(default_factory=KVTierConfig)

    def __post_init__(self) -> None:
        served = self.model.served_model_name or (self.model.model,)
        for name, _ in self.lora.modules:
            if any(name == base or name.startswith(f"{base}:") for base in served):
                raise ConfigError(
                    f"--lora-modules {name}: the model itself is served as {', '.join(served)}; "
                    "choose another name"
                )


def _require_at_least(low: float, flag: str, value: float | None) -> None:
    if value is not None and value < low:
        raise ConfigError(f"{flag} {value} must be at least {low}")


def _require_one_of(choices: tuple[str, ...], flag: str, value: str) -> None:
    if value not in choices:
        raise ConfigError(f"{flag} {value} must be one of {', '.join(choices)}")
