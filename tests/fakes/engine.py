"""An engine without a model: its answers, logprobs and cache are functions of the prompt.

It continues a prompt with "You said: " and the prompt's text; with an adapter, whose weights are
any bytes in a file, it first says which bytes. Choice i ends in "#i". Checks what the real one
checks, with the same code. Weights that begin with "foreign" were trained on org/foreign.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from lora_serve.config import EngineConfig, LoRAConfig, ModelConfig
from lora_serve.engine.frontend.admission import RequestGroup
from lora_serve.engine.frontend.bad_words import BadWordEncoder
from lora_serve.engine.frontend.input import InputProcessor
from lora_serve.engine.frontend.requests_in_flight import RequestInFlight
from lora_serve.engine_stats import EngineStats
from lora_serve.errors import (
    AdapterChangedError,
    AdapterExistsError,
    AdapterFormatError,
    AdapterNotFoundError,
    EngineDeadError,
)
from lora_serve.generate_request import GenerateRequest
from lora_serve.identity import BASE_MODEL, EVERYTHING, AdapterRef, Everything, NoAdapter
from lora_serve.messages import AdapterInfo, EngineReady, PauseMode
from lora_serve.observability.metrics import EngineMetrics
from lora_serve.outputs import AnswerTimes, OutputDelta
from lora_serve.pooling import PoolingParams, embedding
from lora_serve.step import TokenLogprobs
from tests.fakes.tokenizer import EOS, VOCAB_SIZE, ByteTokenizer

WEIGHTS = "adapter_model.safetensors"
BLOCK_SIZE = 16
MODEL = "base/model"
CREATED = 1_700_000_000.5
TIMES = AnswerTimes(arrival=1.0, scheduled=1.5, first_token=2.0, last_token=4.0)


def fake_config(enable_lora: bool = True, **model: object) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model="/models/tiny", served_model_name=(MODEL, "alias"), **model),
        lora=LoRAConfig(enable_lora=enable_lora),
    )


def logprob_of(position: int, token_id: int) -> float:
    """Any number that depends on both, with all the bits that a float has."""
    return -1.0 / 3.0 - token_id / 7.0 - position / 1000.0


def logprobs_at(position: int, token_id: int, num_top: int) -> TokenLogprobs:
    likelier = [
        (other, logprob_of(position, 0) / (2 + i)) for i, other in enumerate(range(97, 117))
    ]
    top = sorted(likelier, key=lambda entry: -entry[1])[:num_top]
    return TokenLogprobs(token_id, logprob_of(position, token_id), 21, tuple(top))


class FakeEngine:
    """gate: cleared, it holds every answer back. error: raised instead of the first delta.

    fail_after: deltas after which an answer ends in EngineDeadError. abort_after: deltas after
    which a call aborts a choice. growing: ids of requests that are being answered. ended_early: ids
    of those whose caller went away. leased_paths: where the versions lie that requests alone have.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        tokenizer: ByteTokenizer | None = None,
        max_model_len: int = 512,
    ) -> None:
        self.config = config or fake_config()
        self.tokenizer = tokenizer or ByteTokenizer()
        self.model_info = EngineReady(
            fingerprint=b"\xab" * 32,
            dtype="float32",
            vocab_size=VOCAB_SIZE,
            hidden_size=8,
            max_model_len=max_model_len,
            num_blocks=64,
            max_request_tokens=max_model_len,
        )
        self.metrics = EngineMetrics(MODEL, self.config)
        self.pooling_defaults = PoolingParams()
        self.is_alive = True
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.fail_after: int | None = None
        self.abort_after: int | None = None
        self.growing: set[str] = set()
        self.ended_early: list[str] = []
        self.seen: list[GenerateRequest] = []
        self.groups: list[RequestGroup] = []  # the one of each prompt
        self.resets: list[str | Everything] = []
        self.was_shut_down = False
        self.is_paused = False
        self.pauses: list[PauseMode] = []
        self.leased_paths: set[str] = set()
        self._adapters: dict[str, AdapterInfo] = {}
        self._cached: set[tuple[object, ...]] = set()
        self._inputs = InputProcessor(
            self.model_info,
            BLOCK_SIZE,
            (EOS,),
            self.config.model.max_logprobs,
            self.config.model.max_n,
            BadWordEncoder(self.tokenizer.encode),
        )

    async def generate(
        self, request: GenerateRequest, group: RequestGroup | None = None
    ) -> AsyncGenerator[OutputDelta, None]:
        request = self._inputs.resolve(request).request
        request_id, lora_name = request.request_id, request.lora_name
        self.seen.append(request)
        if group is not None:
            self.groups.append(group)
        if lora_name is not BASE_MODEL and lora_name not in self._adapters:
            raise AdapterNotFoundError.of_model(
                lora_name, self._adapters, " Ask for the base model, or load this adapter first."
            )
        if self.error is not None:
            raise self.error
        self.growing.add(request_id)
        num_told = 0
        try:
            for index in range(request.params.n):
                for delta in self._answer(request, index):
                    await self.gate.wait()
                    await asyncio.sleep(0)
                    if not self.is_alive or num_told == self.fail_after:
                        raise EngineDeadError("the engine process has died")
                    if num_told == self.abort_after:
                        yield OutputDelta(index, finish_reason="abort")
                        break
                    yield delta
                    num_told += 1
        except (GeneratorExit, asyncio.CancelledError):
            self.ended_early.append(request_id)
            raise
        finally:
            self.growing.discard(request_id)

    def check_health(self) -> None:
        self._require_alive()

    async def load_lora_adapter(
        self,
        name: str,
        path: str,
        load_inplace: bool = False,
        pinned: bool = False,
        digest: str = "",
        generation: int = 0,
    ) -> AdapterInfo:
        self._require_alive()
        if name in self._adapters and not load_inplace:
            raise AdapterExistsError(
                f"The lora adapter '{name}' has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True."
            )
        info = await self.examine_lora_adapter(name, path, digest)
        self._adapters[name] = replace(info, pinned=pinned, generation=generation)
        return self._adapters[name]

    async def examine_lora_adapter(self, name: str, path: str, digest: str = "") -> AdapterInfo:
        self._require_alive()
        try:
            weights = (Path(path) / WEIGHTS).read_bytes()
        except OSError as error:
            raise AdapterNotFoundError(
                f"No adapter found for {path}: there is no such directory"
            ) from error
        if weights.startswith(b"broken"):
            raise AdapterFormatError(path, ["rank 1024 is above 64", "use_dora is not supported"])
        found = hashlib.sha256(weights).hexdigest()
        if digest not in ("", found):
            raise AdapterChangedError(f"{path} has another digest than {digest}", "digest", found)
        return AdapterInfo(
            name=name,
            path=path,
            digest=found,
            generation=0,
            rank=16,
            num_bytes=len(weights),
            residency="resident",
            pinned=False,
            num_leases=0,
            created=CREATED,
            base_model="org/foreign" if weights.startswith(b"foreign") else "",
        )

    def adapter(self, name: str) -> AdapterInfo | None:
        return self._adapters.get(name)

    async def unload_lora_adapter(self, name: str) -> None:
        self._require_alive()
        if self._adapters.pop(name, None) is None:
            raise AdapterNotFoundError(f"The lora adapter '{name}' cannot be found.", "lora_name")

    async def list_adapters(self) -> list[AdapterInfo]:
        self._require_alive()
        return list(self._adapters.values())

    async def adapter_paths(self) -> frozenset[str]:
        return frozenset(info.path for info in await self.list_adapters()).union(self.leased_paths)

    async def reset_prefix_cache(
        self, lora_name: str | Everything = EVERYTHING, generation: int = 0
    ) -> None:
        self._require_alive()
        if lora_name is not EVERYTHING and lora_name not in self._adapters:
            message = f"The lora adapter '{lora_name}' cannot be found."
            raise AdapterNotFoundError(message, "lora_name")
        self.resets.append(lora_name)
        if lora_name is not EVERYTHING:
            self._adapters[lora_name] = replace(
                self._adapters[lora_name], generation=max(generation, 0)
            )
        self._cached.clear()

    async def pause(self, mode: PauseMode) -> int:
        """Hold every answer back; what is being answered goes on afterwards, whatever the mode."""
        self._require_alive()
        self.pauses.append(mode)
        self.is_paused = True
        self.gate.clear()
        return len(self.growing)

    async def resume(self) -> None:
        self._require_alive()
        self.is_paused = False
        self.gate.set()

    async def abort_requests(self, is_meant: Callable[[GenerateRequest], bool]) -> int:
        """Count those that are meant; none ends."""
        self._require_alive()
        return sum(r.request_id in self.growing and is_meant(r) for r in self.seen)

    async def list_requests(
        self, is_meant: Callable[[GenerateRequest], bool], limit: int
    ) -> tuple[list[RequestInFlight], int]:
        """The last that are meant, as if each had half its prompt behind it."""
        self._require_alive()
        meant = [r for r in self.seen if r.request_id in self.growing and is_meant(r)]
        listed = [
            RequestInFlight(r, 0.0, True, r.prompt.num_tokens // 2, 0, 0)
            for r in meant[: -limit - 1 : -1]
        ]
        return listed, len(meant)

    async def get_stats(self) -> EngineStats:
        self._require_alive()
        stats = EngineStats(num_running=len(self.growing), num_blocks=64)
        self.metrics.observe_stats(stats)
        return stats

    async def shutdown(self) -> None:
        """Ends what is being answered, as the real one does."""
        self.was_shut_down = True
        self.is_alive = False
        self.gate.set()

    def _require_alive(self) -> None:
        if not self.is_alive:
            raise EngineDeadError("the engine process has died")

    def _answer(self, request: GenerateRequest, index: int) -> Iterator[OutputDelta]:
        adapter = self._adapter(request.lora_name)
        num_cached = self._look_up(request)
        prompt_logprobs = self._prompt_logprobs(request)
        if request.pooling is not None:
            yield OutputDelta(
                index,
                finish_reason="stop",
                num_cached_tokens=num_cached,
                adapter=adapter,
                embedding=self._embedding(request, request.pooling),
            )
            return
        text, finish_reason, stop_reason = self._text(request, index)
        if not text:
            yield OutputDelta(
                index,
                finish_reason=finish_reason,
                num_cached_tokens=num_cached,
                adapter=adapter,
                prompt_logprobs=prompt_logprobs,
            )
        for position, (token_id, piece) in enumerate(pieces := list(_pieces(text))):
            is_last = position == len(pieces) - 1
            yield OutputDelta(
                index,
                piece,
                token_ids=(token_id,),
                logprobs=self._logprobs(request, position, token_id),
                finish_reason=finish_reason if is_last else None,
                stop_reason=stop_reason if is_last else None,
                num_cached_tokens=num_cached,
                adapter=adapter,
                prompt_logprobs=prompt_logprobs if position == 0 else (),
                times=TIMES if is_last else None,
            )

    def _embedding(self, request: GenerateRequest, pooling: PoolingParams) -> bytes:
        """Made of a hidden state that depends on the prompt's tokens and the adapter's bytes."""
        weights = b""
        if request.lora_name is not BASE_MODEL:
            weights = Path(self._adapters[request.lora_name].path, WEIGHTS).read_bytes()
        said = hashlib.sha256(repr(request.prompt).encode() + weights).digest()
        hidden = np.frombuffer(said, np.int8)[: self.model_info.hidden_size].astype("<f4")
        if pooling.pooling_type == "ALL":
            num_tokens = request.prompt.num_tokens
            return embedding(np.tile(hidden, num_tokens).tobytes(), pooling, num_tokens)
        return embedding(hidden.tobytes(), replace(pooling, pooling_type="LAST"), 1)

    def _text(self, request: GenerateRequest, index: int) -> tuple[str, str, str | None]:
        """The answer up to its stop string or max_tokens bytes, and why it ended."""
        params = request.params
        said = (
            self.tokenizer.decode(request.prompt.token_ids)
            if request.prompt.token_ids
            else "embeddings"
        )
        weights = ""
        if request.lora_name is not BASE_MODEL:
            weights = Path(self._adapters[request.lora_name].path, WEIGHTS).read_text() + ": "
        text = f"{weights}You said: {said} #{index}"
        stop_reason = None
        for stop in params.stop:
            if stop in text:
                text, stop_reason = text[: text.index(stop)], stop
        assert params.max_tokens is not None, "the input processor resolved it"
        if len(text.encode()) > params.max_tokens:
            return text.encode()[: params.max_tokens].decode("utf-8", "ignore"), "length", None
        return text, "stop", stop_reason

    def _adapter(self, lora_name: str | NoAdapter) -> AdapterRef | NoAdapter:
        if lora_name is BASE_MODEL:
            return lora_name
        info = self._adapters[lora_name]
        return AdapterRef(info.name, bytes.fromhex(info.digest), info.generation)

    def _look_up(self, request: GenerateRequest) -> int:
        """Whole blocks of the prompt that were seen before, but never all of its tokens."""
        num_cached = 0
        for end in range(BLOCK_SIZE, len(request.prompt.token_ids) + 1, BLOCK_SIZE):
            key = (request.lora_name, request.cache_salt, request.prompt.token_ids[:end])
            if key in self._cached and end < len(request.prompt.token_ids):
                num_cached = end
            self._cached.add(key)
        return num_cached

    def _logprobs(
        self, request: GenerateRequest, position: int, token_id: int
    ) -> tuple[TokenLogprobs, ...]:
        num_top, listed = request.params.logprobs, request.params.logprob_token_ids
        if num_top is None:
            return ()
        told = logprobs_at(position, token_id, num_top)
        if listed:
            told = TokenLogprobs(
                token_id,
                told.logprob,
                told.rank,
                tuple((i, logprob_of(position, i)) for i in listed),
            )
        return (told,)

    def _prompt_logprobs(self, request: GenerateRequest) -> tuple[TokenLogprobs, ...]:
        num_top = request.params.prompt_logprobs
        if num_top is None:
            return ()
        return tuple(
            logprobs_at(position, token_id, num_top)
            for position, token_id in enumerate(request.prompt.token_ids)
            if position > request.params.prompt_logprob_start
        )


def _pieces(text: str) -> Iterator[tuple[int, str]]:
    """A text's tokens; a character comes with the last of its bytes."""
    for char in text:
        *begun, last = char.encode()
        yield from ((byte, "") for byte in begun)
        yield last, char


def write_adapter(directory: Path, weights: str) -> str:
    """An adapter that this engine can load; its path."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / WEIGHTS).write_text(weights)
    return str(directory)
