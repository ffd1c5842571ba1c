"""What answers of completions and of chats have in common: which parts a body asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from lora_serve.config import ServerConfig
from lora_serve.sampling_params import SamplingParams
from lora_serve.server.engine_api import Tokenizer
from lora_serve.server.openai.chunks import ChunkPolicy
from lora_serve.server.openai.parameters import tokens_as_ids
from lora_serve.server.openai.protocol import GenerationBody

BodyT = TypeVar("BodyT", bound=GenerationBody)


@dataclass(frozen=True, slots=True)
class AnswerForm(Generic[BodyT]):
    """The parts of an answer that the body asked for."""

    tokenizer: Tokenizer
    body: BodyT
    params: SamplingParams
    config: ServerConfig

    @property
    def tokens_as_ids(self) -> bool:
        return tokens_as_ids(self.body, self.config)

    @property
    def chunk_policy(self) -> ChunkPolicy:
        return ChunkPolicy(
            self.body,
            self.params,
            always_includes_usage=self.config.enable_force_include_usage,
        )

    def token_ids(self, token_ids: Sequence[int]) -> list[int] | None:
        return list(token_ids) if self.body.return_token_ids else None
