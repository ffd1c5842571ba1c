"""What the server needs of an engine and of its tokenizer; `AsyncEngine` and `Tokenizer` are such.

Nothing else of them is used here, so a test's engine has to be no more than this.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Protocol

from lora_serve.config import EngineConfig
from lora_serve.engine.frontend.admission import RequestGroup
from lora_serve.engine.frontend.requests_in_flight import RequestInFlight
from lora_serve.engine_stats import EngineStats
from lora_serve.generate_request import GenerateRequest
from lora_serve.identity import EVERYTHING, Everything
from lora_serve.messages import AdapterInfo, EngineReady, PauseMode
from lora_serve.observability.metrics import EngineMetrics
from lora_serve.outputs import OutputDelta
from lora_serve.pooling import PoolingParams


class Tokenizer(Protocol):
    """Text to token ids and back. Called from several threads."""

    @property
    def generation_defaults(self) -> Mapping[str, float]:
        """Sampling settings of the model's generation_config.json, by SamplingParams' names."""

    @property
    def max_token_chars(self) -> int:
        """Most characters that one token may stand for. The first call may take a while."""

    @property
    def vocab_size(self) -> int:
        """How many tokens have a text."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """The tokens that decoding leaves out, unless it is told not to."""

    @property
    def tokenizer_class(self) -> str: ...

    @property
    def chat_template(self) -> str | None:
        """The model's own, if it has just one."""

    def special_token(self, purpose: str) -> str | None:
        """The text of the token for "bos", "eos", "pad" or "unk"; None without one."""

    def added_tokens(self) -> dict[int, tuple[str, bool]]:
        """Each token added to the vocabulary, by id: its text, and whether it is special."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
        max_chars: int | None = None,
        trusts_template: bool = True,
    ) -> str:
        """A conversation as text, to be encoded without special tokens: it has them.

        trusts_template: or `chat_template` is a client's, which may take little time and memory.

        Raises InvalidRequestError when there is no template, or it refuses the messages, or writes
        more than `max_chars`, or takes more than it may.
        """

    def token_piece(self, token_id: int) -> str:
        """One token as the vocabulary writes it."""

    def template_source(self, chat_template: str | None = None) -> str:
        """The text of the template that chats with tools are written with; "" if there is none."""

    def special_token_id(self, text: str) -> int | None:
        """The special token with this text, which decoding may leave out."""

    def token_text(self, token_id: int) -> str:
        """One token, decoded; U+FFFD where it is a part of a character."""

    def token_bytes(self, token_id: int) -> bytes: ...


class Engine(Protocol):
    """See lora_serve.engine.frontend.async_engine.AsyncEngine for what each of these promises."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def model_info(self) -> EngineReady: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def metrics(self) -> EngineMetrics: ...

    @property
    def pooling_defaults(self) -> PoolingParams:
        """How embeddings are made where a request says nothing of it."""

    def check_health(self) -> None:
        """Raises EngineDeadError unless requests are being answered."""

    def generate(
        self, request: GenerateRequest, group: RequestGroup | None = None
    ) -> AsyncGenerator[OutputDelta, None]: ...

    async def load_lora_adapter(
        self,
        name: str,
        path: str,
        load_inplace: bool = False,
        pinned: bool = False,
        digest: str = "",
        generation: int = 0,
    ) -> AdapterInfo: ...

    async def examine_lora_adapter(self, name: str, path: str, digest: str = "") -> AdapterInfo: ...

    def adapter(self, name: str) -> AdapterInfo | None: ...

    async def unload_lora_adapter(self, name: str) -> None: ...

    async def list_adapters(self) -> list[AdapterInfo]: ...

    async def adapter_paths(self) -> frozenset[str]: ...

    async def reset_prefix_cache(
        self, lora_name: str | Everything = EVERYTHING, generation: int = 0
    ) -> None: ...

    @property
    def is_paused(self) -> bool: ...

    async def pause(self, mode: PauseMode) -> int: ...

    async def resume(self) -> None: ...

    async def abort_requests(self, is_meant: Callable[[GenerateRequest], bool]) -> int: ...

    async def list_requests(
        self, is_meant: Callable[[GenerateRequest], bool], limit: int
    ) -> tuple[list[RequestInFlight], int]: ...

    async def get_stats(self) -> EngineStats: ...

    async def shutdown(self) -> None: ...
