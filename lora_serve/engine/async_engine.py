"""An engine for asyncio: prompts in, deltas out, adapters by name. What the server sees.

Owns the engine process through its client, and the choices that are still growing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence

from lora_serve.config import EngineConfig
from lora_serve.engine.client import EngineClient
from lora_serve.engine.input import InputProcessor
from lora_serve.engine.output import OutputProcessor
from lora_serve.engine.replies import error_from_info
from lora_serve.errors import EngineDeadError, LoraServeError
from lora_serve.messages import (
    AbortRequests,
    AdapterInfo,
    CallReply,
    EngineMessage,
    EngineReady,
    EngineReply,
    EngineRequest,
    EngineStats,
    GetStats,
    ListAdapters,
    LoadAdapter,
    ResetPrefixCache,
    StepOutputs,
    UnloadAdapter,
)
from lora_serve.observability.metrics import EngineMetrics
from lora_serve.outputs import OutputDelta
from lora_serve.prompts import Prompt
from lora_serve.sampling_params import SamplingParams
from lora_serve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

DeltaQueue = asyncio.Queue[OutputDelta | LoraServeError]


class AsyncEngine:
    """Use `AsyncEngine.start`; end with `shutdown`."""

    def __init__(
        self,
        config: EngineConfig,
        client: EngineClient,
        model_info: EngineReady,
        tokenizer: Tokenizer,
        metrics: EngineMetrics,
    ) -> None:
        self.config = config
        self.model_info = model_info
        self.tokenizer = tokenizer
        self.metrics = metrics
        self._client = client
        self._inputs = InputProcessor(
            model_info,
            config.cache.block_size,
            tuple(tokenizer.eos_token_ids),
            config.model.max_logprobs,
        )
        self._outputs = OutputProcessor(tokenizer)
        self._queues: dict[str, DeltaQueue] = {}  # by the engine's request id
        self._calls: dict[int, asyncio.Future[CallReply]] = {}
        self._num_calls = 0
        self._reader = asyncio.create_task(self._read_replies(), name="engine-replies")

    @classmethod
    async def start(cls, config: EngineConfig) -> AsyncEngine:
        """Start an engine process, load its model and the adapters of --lora-modules.

        Raises:
            ConfigError: the model cannot be served as asked.
            AdapterError: one of --lora-modules cannot be loaded.
        """
        client = EngineClient()
        source = config.model.tokenizer or config.model.model
        try:
            tokenizer, model_info = await asyncio.gather(
                asyncio.to_thread(
                    Tokenizer, source, config.model.revision, model=config.model.model
                ),
                client.start(config),
                return_exceptions=True,
            )
            if isinstance(model_info, BaseException):
                raise model_info
            if isinstance(tokenizer, BaseException):
                raise tokenizer
        except BaseException:  # also when the caller gives up: a process must not be left behind
            await client.close()
            raise
        names = config.model.served_model_name or (config.model.model,)
        engine = cls(config, client, model_info, tokenizer, EngineMetrics(names[0], config))
        try:
            for name, path in config.lora.modules:
                await engine.load_lora_adapter(name, path)
        except BaseException:
            await engine.shutdown()
            raise
        return engine

    @property
    def is_alive(self) -> bool:
        """False once no answer can come any more."""
        return self._client.is_alive and not self._reader.done()

    @property
    def engine_pid(self) -> int | None:
        return self._client.pid

    @property
    def num_unfinished(self) -> int:
        """Choices that are still growing."""
        return self._outputs.num_unfinished

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        lora_name: str | None = None,
        cache_salt: str = "",
        priority: int = 0,
    ) -> AsyncGenerator[OutputDelta, None]:
        """Continue a prompt params.n times; deltas of all choices as they come.

        Closing the iterator aborts what is still growing.

        Raises:
            InvalidRequestError, AdapterNotFoundError: before the first delta.
            EngineDeadError: at any time.
        """
        requests = self._inputs.requests(
            prompt,
            params,
            request_id=request_id,
            lora_name=lora_name,
            cache_salt=cache_salt,
            priority=priority,
        )
        deltas: DeltaQueue = asyncio.Queue()
        self._outputs.add(requests)
        self._queues.update((request.request_id, deltas) for request in requests)
        try:
            for request in requests:
                await self._send(request)
            num_growing = len(requests)
            while num_growing:
                delta = await deltas.get()
                if isinstance(delta, LoraServeError):
                    raise delta
                num_growing -= delta.finish_reason is not None
                yield delta
        finally:
            await self._forget(requests)

    async def load_lora_adapter(
        self, name: str, path: str, load_inplace: bool = False, pinned: bool = False
    ) -> AdapterInfo:
        reply = await self._call(
            lambda call_id: LoadAdapter(call_id, name, path, load_inplace, pinned)
        )
        return reply.adapters[0]

    async def unload_lora_adapter(self, name: str) -> None:
        await self._call(lambda call_id: UnloadAdapter(call_id, name))

    async def list_adapters(self) -> list[AdapterInfo]:
        return list((await self._call(ListAdapters)).adapters)

    async def reset_prefix_cache(self, lora_name: str | None = None) -> bool:
        return (await self._call(lambda call_id: ResetPrefixCache(call_id, lora_name))).success

    async def get_stats(self) -> EngineStats:
        """Gauges and totals of this moment; the metrics see them too."""
        stats = (await self._call(GetStats)).stats
        assert stats is not None, "the engine answered GetStats without stats"
        self.metrics.observe(StepOutputs((), stats=stats))
        return stats

    async def shutdown(self) -> None:
        """End the engine process; whoever still waits for it gets EngineDeadError."""
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        self._fail_all(EngineDeadError("the server is shutting down"))
        await self._client.close()

    async def _call(self, message: Callable[[int], EngineMessage]) -> CallReply:
        self._num_calls += 1
        call_id = self._num_calls
        future = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            await self._send(message(call_id))
            reply: CallReply = await future
        finally:
            del self._calls[call_id]
        if reply.error is not None:
            raise error_from_info(reply.error)
        return reply

    async def _send(self, message: EngineMessage) -> None:
        if not self.is_alive:
            raise EngineDeadError("the engine has died; restart the server")
        await self._client.send(message)

    async def _forget(self, requests: Sequence[EngineRequest]) -> None:
        """Drop a caller's choices; abort in the engine those that were still growing."""
        growing = []
        for request in requests:
            del self._queues[request.request_id]
            if self._outputs.discard(request.request_id):
                growing.append(request.request_id)
        await self._abort(growing)

    async def _abort(self, request_ids: Sequence[str]) -> None:
        if request_ids and self._client.is_alive:
            await self._client.send(AbortRequests(tuple(request_ids)))

    async def _read_replies(self) -> None:
        try:
            while True:
                await self._take_in(await self._client.receive())
        except EngineDeadError as error:
            logger.error("the engine process has died; %d answers are lost", self.num_unfinished)
            self._fail_all(error)
        except Exception:  # a bug; without this, everybody would wait for ever
            logger.exception("a reply cannot be read; %d answers are lost", self.num_unfinished)
            self._fail_all(EngineDeadError("the engine's replies cannot be read; see the log"))

    async def _take_in(self, reply: EngineReply) -> None:
        if isinstance(reply, StepOutputs):
            self.metrics.observe(reply)
            stopped = []
            for output in reply.outputs:
                delta, must_abort = self._outputs.process(output)
                if delta is not None:
                    self._queues[output.request_id].put_nowait(delta)
                if must_abort:
                    stopped.append(output.request_id)
            await self._abort(stopped)
        elif isinstance(reply, CallReply):
            future = self._calls.get(reply.call_id)
            if future is not None and not future.done():  # its caller may just have given up
                future.set_result(reply)

    def _fail_all(self, error: LoraServeError) -> None:
        for deltas in set(self._queues.values()):
            deltas.put_nowait(error)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
