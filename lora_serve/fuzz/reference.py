"""The right answers: a cold engine in this process, without caches, with one request at a time.

It has the servers' kernels and text, and nothing that a fuzzer doubts: one request fills the batch,
prompts are computed in one piece, nothing is looked up or recorded.
"""

from __future__ import annotations

import argparse
import base64
import sys
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from lora_serve.config import EngineConfig, ParallelConfig, ServerConfig
from lora_serve.config.parallel import GATHER
from lora_serve.errors import InvalidRequestError
from lora_serve.fuzz.answers import Choice
from lora_serve.fuzz.bodies import rows
from lora_serve.fuzz.cold_chats import ColdChat, ColdChats
from lora_serve.fuzz.trace import Ask, Chat, Embeds, Text, Tokens
from lora_serve.identity import BASE_MODEL, NoAdapter
from lora_serve.llm import LLM
from lora_serve.outputs import CompletionOutput, RequestOutput
from lora_serve.pooling import PoolingParams
from lora_serve.prompts import EmbedsPrompt, Prompt, TokensPrompt
from lora_serve.sampling_params import SamplingParams
from lora_serve.server.openai.logprobs import (
    CompletionLogprobsWriter,
    chat_logprobs,
    prompt_logprobs,
)
from lora_serve.server.openai.models import SHORT_HEX

NUM_BLOCKS = 1024


@dataclass(frozen=True, slots=True)
class Right:
    """The right answer of one version: its choices, and the logprobs of the prompt."""

    choices: tuple[Choice, ...]
    prompt_logprobs: object


class ColdEngine:
    """Answers of every version, each computed once. The files of `versions` must not change."""

    def __init__(
        self,
        config: EngineConfig,
        versions: Sequence[Path],
        server: ServerConfig | None = None,
        num_for_all: int | None = None,
    ) -> None:
        """server: how conversations are written and read. num_for_all: as `Scope` has it."""
        self._num_for_all = num_for_all
        self._config, self._versions = config, versions
        self._server = server or ServerConfig()
        self._others: dict[Hashable, ColdEngine] = {}  # under other flags than its own
        model = {name: getattr(config.model, name) for name in config.model.__slots__}
        self._llm = LLM(
            **{**model, "enforce_eager": True},
            block_size=config.cache.block_size,
            enable_prefix_caching=False,
            speculation="off",
            num_gpu_blocks_override=NUM_BLOCKS,
            max_num_seqs=1,
            enable_lora=True,
            max_loras=1,
            max_cpu_loras=max(1, len(versions)),
            max_lora_rank=config.lora.max_lora_rank,
            tensor_parallel_size=config.parallel.reduce.num_ranks_in_answers,
            tensor_parallel_reduce=config.parallel.tensor_parallel_reduce,
        )
        self._chats = ColdChats(self._llm, self._server)
        infos = [self._llm.load_lora_adapter(f"v{i}", str(p)) for i, p in enumerate(versions)]
        self._invocations = [info.invocation_tokens for info in infos]
        self.num_versions = len(versions)
        self.digests = [info.digest[:SHORT_HEX] for info in infos]
        self._memo: dict[Hashable, Right] = {}
        self.fingerprint = self._llm.model_info.fingerprint.hex()[:SHORT_HEX]
        self.hidden_size = self._llm.model_info.hidden_size
        self.vocab_size = self._llm.model_info.vocab_size

    def under(self, flags: Sequence[str]) -> ColdEngine:
        """The engine of those flags of a server that change its answers."""
        model, parallel = self._config.model, self._config.parallel
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--logprobs-mode", default=model.logprobs_mode)
        parser.add_argument("--model-impl", default=model.model_impl)
        parser.add_argument("--quantization", default=model.quantization)
        parser.add_argument("--tensor-parallel-reduce", default=parallel.tensor_parallel_reduce)
        parser.add_argument(
            *("--tensor-parallel-size", "-tp"), type=int, default=parallel.tensor_parallel_size
        )
        parser.add_argument(
            "--quantize-activations", action="store_true", default=model.quantize_activations
        )
        own, named = (_answering(parser, given) for given in ([], list(flags)))
        if named == own:
            return self
        key = tuple(named.values())
        if key not in self._others:
            num_versions = None
            if named["model_impl"] != model.model_impl:
                num_versions = self._num_for_all
            ranks = {name: named.pop(name) for name in [*named] if name.startswith("tensor_")}
            config = replace(
                self._config,
                model=replace(model, **named),
                parallel=replace(parallel, **ranks),
            )
            self._others[key] = ColdEngine(config, self._versions[:num_versions], self._server)
        return self._others[key]

    def close(self) -> None:
        self._llm.close()
        for engine in self._others.values():
            engine.close()

    @property
    def has_chat(self) -> bool:
        """Whether the model's tokenizer knows how a chat is written."""
        try:
            self._hello(SamplingParams())
        except InvalidRequestError:
            return False
        return True

    @property
    def marks_reasoning(self) -> bool:
        """Whether it has one token each that begins and ends the reasoning of a chat's answer."""
        if not self.has_chat:
            return False
        return self._hello(SamplingParams(thinking_token_budget=1)).params.reasoning is not None

    def _hello(self, params: SamplingParams) -> ColdChat:
        return self._chats.plan(Ask(prompt=Chat((("user", "Hello"),)), params=params), ())

    def version_of(self, fingerprint: str) -> int | NoAdapter:
        """Which version a `system_fingerprint` names.

        Raises:
            ValueError: another model, or an adapter that was never loaded.
        """
        model, _, adapter = fingerprint.partition("-")
        if model != self.fingerprint:
            raise ValueError(f"{model} is another model than {self.fingerprint}")
        return self.digests.index(adapter.partition("-")[0]) if adapter else BASE_MODEL

    def answer(self, ask: Ask, version: int | NoAdapter, history: Sequence[object] = ()) -> Right:
        """history: what a stored response puts before the messages, as items."""
        is_written_otherwise = ask.talk is not None and ask.is_streamed
        asked = (ask.prompt, ask.pooling or ask.params, ask.talk, history, is_written_otherwise)
        key = (version, msgspec.json.encode(asked))
        if key not in self._memo:
            lora_name = None if version is BASE_MODEL else f"v{version}"
            if ask.pooling is not None:
                self._memo[key] = self._embedding(self._prompt(ask), ask.pooling, lora_name)
            else:
                self._memo[key] = self._continued(ask, history, lora_name)
        return self._memo[key]

    def begins_at(
        self, ask: Ask, version: int | NoAdapter, history: Sequence[object]
    ) -> int | None:
        """Where in the prompt a version begins to act; None where it refuses the prompt.

        The base model acts nowhere: it begins behind the prompt's end.
        """
        if version is BASE_MODEL:
            return sys.maxsize
        tokens = list(self._invocations[version])
        if not tokens:
            return 0
        units = self.units(ask, history)
        places = range(len(units) + 1 - len(tokens))
        return max((p for p in places if units[p : p + len(tokens)] == tokens), default=None)

    def _continued(self, ask: Ask, history: Sequence[object], lora_name: str | None) -> Right:
        if isinstance(ask.prompt, Chat):
            chat = self._chats.plan(ask, history)
            return self._right(ask, self._chats.output(chat, lora_name), chat)
        (output,) = self._llm.generate(self._prompt(ask), ask.params, lora_name=lora_name)
        return self._right(ask, output, None)

    def _embedding(self, prompt: Prompt, pooling: PoolingParams, lora_name: str | None) -> Right:
        (output,) = self._llm.embed(prompt, pooling, lora_name=lora_name)
        data = array("f", output.embedding).tobytes()
        return Right((Choice(embedding=base64.b64encode(data).decode()),), None)

    def units(self, ask: Ask, history: Sequence[object] = ()) -> list[Hashable]:
        """The prompt as tokens or rows: where two prompts' units are equal, so is their KV."""
        if isinstance(ask.prompt, Embeds):
            return [(seed, row) for seed, count in ask.prompt.runs for row in range(count)]
        prompt = self._prompt(ask, history)
        assert isinstance(prompt, TokensPrompt), "all but embeddings are token ids by now"
        return list(prompt.token_ids)

    def _prompt(self, ask: Ask, history: Sequence[object] = ()) -> Prompt:
        tokenizer = self._llm.tokenizer
        match ask.prompt:
            case Tokens(token_ids):
                return TokensPrompt(token_ids)
            case Text(text):
                return TokensPrompt(tuple(tokenizer.encode(text)))
            case Chat():
                return self._chats.plan(ask, history).prompt
            case Embeds():
                return self._rows(ask.prompt)

    def _rows(self, prompt: Embeds) -> EmbedsPrompt:
        import torch  # slow to import; not for --help

        values = torch.from_numpy(rows(prompt, self.hidden_size))
        values = values.to(getattr(torch, self._llm.model_info.dtype))
        return EmbedsPrompt(len(values), values.view(torch.uint8).numpy().tobytes())

    def _right(self, ask: Ask, output: RequestOutput, chat: ColdChat | None) -> Right:
        told: object = None
        if ask.params.prompt_logprobs is not None:
            num_tokens = len(output.prompt_token_ids)
            told = _as_json(
                prompt_logprobs(self._llm.tokenizer, num_tokens, output.prompt_logprobs)
            )
        return Right(tuple(self._choice(ask, choice, chat) for choice in output.outputs), told)

    def _choice(self, ask: Ask, choice: CompletionOutput, chat: ColdChat | None) -> Choice:
        right = Choice(
            text=choice.text,
            token_ids=choice.token_ids,
            logprobs=self._logprobs(ask, choice, chat),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )
        if chat is not None:
            self._chats.read(ask, chat, choice, right)
        return right

    def _logprobs(self, ask: Ask, choice: CompletionOutput, chat: ColdChat | None) -> list[object]:
        if ask.params.logprobs is None:
            return []
        tokenizer = self._llm.tokenizer
        if chat is not None:
            listed = bool(ask.params.logprob_token_ids)
            positions = self._chats.told_logprobs(ask, chat, choice)
            told = chat_logprobs(tokenizer, positions, tells_drawn=listed)
            return [_as_json(one) for one in told.content]
        written = CompletionLogprobsWriter(tokenizer).write(choice.logprobs)
        columns = (written.tokens, written.token_logprobs, written.top_logprobs)
        return [list(row) for row in zip(*columns, strict=True)]


def _answering(parser: argparse.ArgumentParser, flags: list[str]) -> dict[str, Any]:
    """The parser's settings that change answers, by their names."""
    named = vars(parser.parse_known_args(flags)[0])
    ranks = {name: each for name, each in named.items() if name.startswith("tensor_")}
    reduce = ParallelConfig(**ranks).reduce
    return named | {
        "tensor_parallel_size": reduce.num_ranks_in_answers,
        "tensor_parallel_reduce": reduce.name if reduce.adds_segments else GATHER,
    }


def _as_json(value: object) -> object:
    """The value as it reads after a round trip through JSON."""
    decoded: object = msgspec.json.decode(msgspec.json.encode(value))
    return decoded
