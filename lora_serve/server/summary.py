"""What a server tells of itself when it is ready: one line for each thing that was decided."""

from __future__ import annotations

import logging

from lora_serve.config import EngineConfig, ServerConfig
from lora_serve.config.limits import UNLIMITED
from lora_serve.engine.kv_event_sockets import binds_at
from lora_serve.messages import EngineReady
from lora_serve.observability.log import with_fields
from lora_serve.observability.sizes import shown_bytes, shown_count

logger = logging.getLogger(__name__)

Summary = dict[str, str]

NAME_WIDTH = 10
_NAMES = "their names stand in the catalog at"


def start_summary(
    config: EngineConfig,
    server: ServerConfig,
    engine: EngineReady,
    loaded: str,
    catalog: str | None = None,
) -> Summary:
    """A text by subject, in the order of a reader's interest.

    loaded, catalog: of `AdapterNames`.
    """
    summary = {
        "model": _model(config, engine),
        "runs on": _device(config, engine),
        "KV cache": _kv_cache(config, engine),
        "adapters": _adapters(config, loaded) + (f"; {_NAMES} {catalog}" if catalog else ""),
        "limits": _limits(config),
        "access": _access(config, server),
    }
    if config.speculative.is_enabled:
        summary["drafts"] = _drafts(config, engine)
    if config.kv_events.is_enabled:
        summary["KV events"] = _kv_events(config)
    if pages := _pages(server):
        summary["pages"] = pages
    return summary


def tell_summary(summary: Summary) -> None:
    """Log it: a line for each subject, in JSON one line with a value for each."""
    lines = [f"{name:{NAME_WIDTH}}{text}" for name, text in summary.items()]
    fields = {name.lower().replace(" ", "_"): text for name, text in summary.items()}
    logger.info("the server's settings\n  %s", "\n  ".join(lines), extra=with_fields(**fields))


def _drafts(config: EngineConfig, engine: EngineReady) -> str:
    speculative, model = config.speculative, engine.draft_model
    told = (
        f"by {speculative.method}, up to {speculative.speculative_num_speculative_tokens} tokens "
        f"of a request; a step with drafts has at most {speculative.max_draft_rows} rows"
    )
    if model is None:
        return told
    quantization = speculative.speculative_quantization
    return (
        f"{told}; {speculative.speculative_model}: {model.architecture}, "
        f"{shown_count(model.num_parameters)} parameters, {model.dtype} from {model.weights}"
        + f", linear layers in {quantization}"
        * bool(quantization)
        + f", with {shown_bytes(model.kv_bytes)} of KV for "
        f"{model.num_blocks * model.block_size:,} tokens"
    )


def _model(config: EngineConfig, engine: EngineReady) -> str:
    names = ", ".join(config.model.served_model_name or (config.model.model,))
    quantization = f", linear layers in {config.model.quantizes_to}" * bool(
        config.model.quantizes_to
    )
    return (
        f"{names}: {engine.architecture}, {shown_count(engine.num_parameters)} parameters, "
        f"{engine.dtype} from {engine.weights}{quantization}"
    )


def _device(config: EngineConfig, engine: EngineReady) -> str:
    size = config.parallel.tensor_parallel_size
    ranks = f", {size} ranks" if size > 1 else ""
    each = " each" if size > 1 else ""
    threads = f", {_counted(engine.num_threads, 'thread')}{each}" if engine.num_threads else ""
    return f"{engine.device}{ranks}{threads}, kernels {engine.kernels}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + "s" * (count != 1)


def _kv_cache(config: EngineConfig, engine: EngineReady) -> str:
    num_tokens = engine.num_blocks * config.cache.block_size
    sharing = "shared" if config.cache.enable_prefix_caching else "not shared"
    tiers = [
        name
        for name, is_there in (
            ("memory", config.kv_tiers.kv_ram_bytes),
            ("disk", config.kv_tiers.kv_disk_path),
            ("Redis", config.kv_tiers.kv_redis_url),
        )
        if is_there
    ]
    return (
        f"{shown_bytes(engine.kv_bytes)} for {num_tokens:,} tokens; the longest request has "
        f"{engine.max_request_tokens:,}, of which {engine.num_longest_requests:,} fit at once; "
        f"prefixes are {sharing}{_tiers(', '.join(tiers), config.kv_tiers.kv_role)}"
    )


def _tiers(names: str, role: str) -> str:
    if not names:
        return ""
    told = {
        "kv_producer": f"; also stored in {names}, never fetched (kv_producer)",
        "kv_consumer": f"; also fetched from {names}, never stored there (kv_consumer)",
    }
    return told.get(role, f"; also kept in {names}")


def _kv_events(config: EngineConfig) -> str:
    endpoint, replays = config.kv_events.kv_events_endpoint, config.kv_events.endpoints
    how = "published at" if binds_at(endpoint) else "sent to who listens at"
    replayed = replays.get("replay_endpoint")
    return f"{how} {endpoint}" + (f", replayed at {replayed}" if replayed else "")


def _adapters(config: EngineConfig, loaded: str) -> str:
    lora = config.lora
    if not lora.enable_lora:
        return "none (--enable-lora serves them)"
    places = ", ".join(lora.lora_resolver)
    return (
        f"{loaded}{'; ' * bool(loaded)}{lora.max_loras} in one step, {lora.cpu_lora_limit} in "
        f"memory, of rank {lora.max_lora_rank} at most"
        + (f"; others on their first request, from {places}" if places else "")
    )


def _limits(config: EngineConfig) -> str:
    scheduler, queued = config.scheduler, config.limits.max_num_queued_reqs
    waiting = "any number" if queued == UNLIMITED else f"{queued:,}"
    return (
        f"{scheduler.max_num_seqs} requests run at once, {waiting} wait; a step computes "
        f"{scheduler.max_num_batched_tokens:,} tokens"
    )


def _pages(server: ServerConfig) -> str:
    """What a browser finds at the server's address."""
    pages = {
        "/ui (load, adapters and requests, and a playground)": not server.disable_ui,
        "/docs (the API)": not server.disable_fastapi_docs,
    }
    return ", ".join(page for page, is_there in pages.items() if is_there)


def _access(config: EngineConfig, server: ServerConfig) -> str:
    changing = "change its adapters" if config.lora.enable_lora else "pause and reset it"
    if not server.has_keys:
        clients = "programs of this machine" if server.is_local else "every client that reaches it"
        may_change = server.is_local or server.allow_runtime_lora_updating
        changes = f"may {changing}" if may_change else "nothing over HTTP changes it"
        return f"{clients} may use it without a key, and {changes}"
    use = "needs an API key" if server.requires_api_key else "needs no key"
    has_admin = bool(server.admin_api_key or server.admin_api_key_file)
    if has_admin:
        change = f"an admin key may {changing}"
    elif server.allow_runtime_lora_updating:
        change = f"every key may {changing}"
    else:
        change = "nothing over HTTP changes it (--admin-api-key)"
    return f"using it {use}; {change}"
