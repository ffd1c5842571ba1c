"""Bodies of answers on the routes for operators."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class Success(msgspec.Struct, frozen=True):
    success: bool


class Version(msgspec.Struct, frozen=True):
    version: str


class Welcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where to go on from the address alone; docs and ui are left out where they are not served."""

    name: str
    version: str
    models: str
    health: str
    docs: str | None = None
    ui: str | None = None


class Load(msgspec.Struct, frozen=True):
    server_load: int


class Status(msgspec.Struct, frozen=True):
    status: str


class IsPaused(msgspec.Struct, frozen=True):
    is_paused: bool


class Aborted(msgspec.Struct, frozen=True):
    """aborted: how many prompts were being continued, and are not any more."""

    aborted: int
    status: str = "aborted"


class WorldSize(msgspec.Struct, frozen=True):
    world_size: int


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    served_model_name: list[str]
    dtype: str
    quantization: str | None
    max_model_len: int
    max_logprobs: int
    logprobs_mode: str


class CacheInfo(msgspec.Struct, frozen=True, kw_only=True):
    block_size: int
    num_gpu_blocks: int
    enable_prefix_caching: bool


class SchedulerInfo(msgspec.Struct, frozen=True, kw_only=True):
    max_num_seqs: int
    max_num_batched_tokens: int
    policy: str


class LoRAInfo(msgspec.Struct, frozen=True):
    max_lora_rank: int
    max_loras: int


class ParallelInfo(msgspec.Struct, frozen=True):
    """tensor_parallel_size: the processes that compute, each with threads of its own."""

    world_size: int = 1
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """lora_config: null if no adapters are served. weight_transfer_config: there is none."""

    model_config: ModelInfo
    cache_config: CacheInfo
    scheduler_config: SchedulerInfo
    lora_config: LoRAInfo | None
    parallel_config: ParallelInfo
    weight_transfer_config: None = None


class ServerInfo(msgspec.Struct, frozen=True):
    """vllm_config: as JSON in a text with config_format text, which is the default."""

    vllm_config: ServerSettings | str


class ReplicaState(msgspec.Struct, frozen=True):
    """What a replica makes of a name. state: as docs/catalog.md lists them. detail: why."""

    replica: str
    address: str
    state: str
    detail: str = ""


class RolloutCard(msgspec.Struct, frozen=True, kw_only=True):
    """How far the last change of a name came. replicas: all, in a list those that lack it.

    serial, by, at, time: of the change. everywhere: whether all replicas have it, so that none
    answers with an earlier version.
    """

    serial: int
    by: str
    at: str
    time: float
    everywhere: bool
    num_replicas: int
    replicas: list[ReplicaState]


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """A server of the catalog. serial: of the last change that it has told to know.

    loading, failed: how many names it is still to change, and refuses. silent_seconds: since the
    catalog heard from it.
    """

    id: str
    address: str
    serial: int
    loading: int
    failed: int
    silent_seconds: float


class ReplicaList(msgspec.Struct, frozen=True, kw_only=True):
    """The servers of the catalog; none without one. this: the one that answers."""

    object: str = "list"
    data: list[Replica]
    this: str | None = None


class LoadedAdapters(msgspec.Struct, frozen=True):
    """loaded_adapters: all, each with its path."""

    loaded_adapters: dict[str, str]
    success: bool = True
    error_message: str = ""


class LoadedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """message: vLLM's text. unchanged: the same bytes stood under the name before.

    rollout: how far it came, where there is a catalog.
    """

    message: str
    lora_name: str
    digest: str
    generation: int
    unchanged: bool
    rollout: RolloutCard | UnsetType = UNSET


class LoRAStatus(msgspec.Struct, frozen=True):
    lora_name: str
    status: str = "success"


class LoRAList(msgspec.Struct, frozen=True):
    """loras: all, each with its path."""

    loras: dict[str, str]
    count: int
    status: str = "success"


class ListedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that is being answered. id: as its client or the server chose it, for an abort.

    adapter: null for the base model. state: "running" if it has a part in the steps, else
    "waiting". age_seconds: since it arrived. num_computed_tokens: of its prompt and its answer,
    those found in a cache included.
    """

    id: str
    route: str
    adapter: str | None
    state: str
    age_seconds: float
    num_choices: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


class RequestList(msgspec.Struct, frozen=True, kw_only=True):
    """The newest requests, newest first.

    num_requests: how many there are. shows: whose they are: "all" callers', or those of the
    caller's "own key", or "none" for a caller that no key tells from others.
    """

    object: str = "list"
    data: list[ListedRequest]
    num_requests: int
    shows: str


class CallerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Who is asking. name: what the log calls it. may_change_server: what an admin may.

    may_read_metrics: whether /metrics of this port answers it.
    """

    object: str = "caller"
    name: str
    may_change_server: bool
    may_read_metrics: bool


class AdapterChange(msgspec.Struct, frozen=True, kw_only=True):
    """A load or an unload over HTTP, done or failed.

    time: seconds since 1970. by: what the log calls the caller. old_path, old_digest: of what stood
    under the name before; null if nothing did. new_path, new_digest: of what was loaded; null after
    an unload, and with a failure, whose text is `error`. serial: the change's place among all of a
    catalog; null without one.
    """

    time: float
    change: str
    by: str
    lora_name: str
    old_path: str | None
    old_digest: str | None
    new_path: str | None
    new_digest: str | None
    error: str | None
    serial: int | None = None


class AdapterChangeList(msgspec.Struct, frozen=True, kw_only=True):
    """Changes of adapters since the server began, newest first; only so many are kept."""

    object: str = "list"
    data: list[AdapterChange]
