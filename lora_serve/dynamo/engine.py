"""The engine that a Dynamo worker drives: start, requests, adapters, KV events, end.

Dynamo's own hot swap waits until an adapter is idle and empties the prefix cache. Here a name is
replaced at once: requests that run keep their version, and no block of it is found by others.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any
from urllib.parse import unquote, urlsplit

from dynamo._core import Context
from dynamo.common.backend import EngineConfig as DynamoConfig
from dynamo.common.backend import LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.publisher import KvEventSource, ZmqSource
from dynamo.llm import (
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerType,
    lora_name_to_id,
    register_model,
    unregister_model,
)
from dynamo.llm.exceptions import DynamoException, EngineShutdown, InvalidArgument, Unknown

from lora_serve.config import EngineConfig
from lora_serve.dynamo.arguments import worker_arguments
from lora_serve.dynamo.requests import Chunk, Chunks, engine_request
from lora_serve.engine.frontend.async_engine import AsyncEngine
from lora_serve.engine.frontend.rank_checks import warn_of_shared_cores
from lora_serve.errors import (
    AdapterError,
    AdapterNotFoundError,
    EngineDeadError,
    InvalidRequestError,
    LoraServeError,
)

UPDATES = frozenset({"load_lora", "unload_lora", "list_loras"})


class DynamoEngine(LLMEngine):
    """`from_args` makes it, `start` loads the model."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._names = config.model.served_model_name or (config.model.model,)
        self._engine: AsyncEngine | None = None
        self._endpoint: Any = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[DynamoEngine, WorkerConfig]:
        """Raises ConfigError: the flags cannot be."""
        dynamo, config = worker_arguments(argv)
        engine = cls(config)
        worker = WorkerConfig.from_runtime_config(
            dynamo,
            model_name=config.model.model,
            served_model_name=engine._names[0],
            model_input=ModelInput.Tokens,
        )
        return engine, worker

    async def start(self, worker_id: int) -> DynamoConfig:
        warn_of_shared_cores(self._config)
        self._engine = await AsyncEngine.start(self._config)
        info = self._engine.model_info
        return DynamoConfig(
            model=self._config.model.model,
            served_model_name=self._names[0],
            model_aliases=[*self._names[1:]],
            llm=LlmRegistration(
                context_length=info.max_model_len,
                kv_cache_block_size=self._config.cache.block_size,
                total_kv_blocks=info.num_blocks,
                max_num_seqs=self._config.scheduler.max_num_seqs,
                max_num_batched_tokens=self._config.scheduler.max_num_batched_tokens,
            ),
        )

    async def generate(
        self, request: dict[str, object], context: Context
    ) -> AsyncGenerator[Chunk, None]:
        engine = self._running()
        try:
            asked = engine_request(request, context.id(), self._names)
            chunks = Chunks(asked, engine.tokenizer.token_text)
            async with aclosing(engine.generate(asked)) as deltas:
                async for delta in deltas:
                    yield chunks.chunk(delta)
        except LoraServeError as error:
            raise _as_dynamo(error) from error

    async def abort(self, context: Context) -> None:
        if self._engine is not None:
            await self._engine.abort_requests(lambda each: each.client_request_id == context.id())

    async def cleanup(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.shutdown()

    async def kv_event_sources(self) -> list[KvEventSource]:
        events = self._config.kv_events
        if not events.kv_events_enable_kv_cache_events:
            return []
        where = events.kv_events_endpoint.replace("*", "127.0.0.1")
        return [ZmqSource(endpoint=where, topic=events.kv_events_topic)]

    # ── adapters ────────────────────────────────────────────────────────────────────────────

    def supported_updates(self) -> set[str]:
        return {*UPDATES} if self._config.lora.enable_lora else set()

    async def on_endpoint_ready(self, endpoint: Any) -> None:
        self._endpoint = endpoint
        for name, _ in self._config.lora.modules:
            await self._publish(name)

    async def engine_update(self, update: str, body: dict[str, Any]) -> dict[str, Any]:
        calls: dict[str, Callable[[dict[str, Any]], Any]] = {
            "load_lora": self._load,
            "unload_lora": self._unload,
            "list_loras": self._list,
        }
        try:
            told = await calls[update](body)
        except (LoraServeError, ValueError) as error:
            return {"status": "error", "message": str(error)}
        return {"status": "success", **told}

    async def _load(self, body: dict[str, Any]) -> dict[str, Any]:
        """Load or replace an adapter: {"lora_name": NAME, "source": {"uri": URI}}."""
        name, engine = _name(body), self._running()
        source = body.get("source")
        if not isinstance(source, dict) or not isinstance(source.get("uri"), str):
            raise ValueError('source must be {"uri": "file:///…"}, or hf:// or s3://')
        is_new = engine.adapter(name) is None
        adapter = await engine.load_lora_adapter(name, _path(source["uri"]), load_inplace=True)
        if is_new:
            await self._publish(name)
        return {"lora_name": name, "lora_id": lora_name_to_id(name), "digest": adapter.digest}

    async def _unload(self, body: dict[str, Any]) -> dict[str, Any]:
        name = _name(body)
        await self._running().unload_lora_adapter(name)
        if self._endpoint is not None:
            await unregister_model(endpoint=self._endpoint, lora_name=name)
        return {"lora_name": name, "lora_id": lora_name_to_id(name)}

    async def _list(self, body: dict[str, Any]) -> dict[str, Any]:
        names = [adapter.name for adapter in await self._running().list_adapters()]
        return {"loras": {name: lora_name_to_id(name) for name in names}, "count": len(names)}

    async def _publish(self, name: str) -> None:
        """Let frontends know that this worker answers for an adapter."""
        if self._endpoint is None:
            return
        runtime = ModelRuntimeConfig()
        runtime.context_length = self._running().model_info.max_model_len
        await register_model(
            model_input=ModelInput.Tokens,
            model_type=ModelType.Chat | ModelType.Completions,
            endpoint=self._endpoint,
            model_path=self._config.model.model,
            kv_cache_block_size=self._config.cache.block_size,
            runtime_config=runtime,
            lora_name=name,
            base_model_path=self._config.model.model,
            user_data={"lora_adapter": True, "lora_id": lora_name_to_id(name)},
            worker_type=WorkerType.Aggregated,
            needs=[],
            ignore_weights=True,
            max_gpu_lora_count=self._config.lora.cpu_lora_limit,
        )

    def _running(self) -> AsyncEngine:
        if self._engine is None:
            raise EngineShutdown("the engine is not running")
        return self._engine


def _name(body: dict[str, Any]) -> str:
    name = body.get("lora_name")
    if not isinstance(name, str) or not name:
        raise ValueError("lora_name must be a name")
    return name


def _path(uri: str) -> str:
    """What a load takes: a directory, a hub id, or an s3:// URI as it is."""
    parts = urlsplit(uri)
    if parts.scheme == "file":
        return unquote(parts.path)
    return uri.removeprefix("hf://")


def _as_dynamo(error: LoraServeError) -> DynamoException:
    if isinstance(error, InvalidRequestError | AdapterError | AdapterNotFoundError):
        return InvalidArgument(str(error))
    return (EngineShutdown if isinstance(error, EngineDeadError) else Unknown)(str(error))
