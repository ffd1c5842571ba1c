"""The right answers: a cold engine in this process, without caches, with one request at a time.

It has the servers' kernels and text, and nothing that a fuzzer doubts: one request fills the batch,
prompts are computed in one piece, nothing is looked up or recorded.
"""

from __future__ import annotations

import argparse
import base64
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from lora_serve.config import EngineConfig
from lora_serve.errors import InvalidRequestError
from lora_serve.fuzz.answers import Choice
from lora_serve.fuzz.bodies import rows
from lora_serve.fuzz.trace import Ask, Chat, Embeds, Text, Tokens
from lora_serve.identity import BASE_MODEL, NoAdapter
from lora_serve.llm import LLM
from lora_serve.outputs import CompletionOutput, RequestOutput
from lora_serve.pooling import PoolingParams
from lora_serve.prompts import EmbedsPrompt, Prompt, TokensPrompt
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

    def __init__(self, config: EngineConfig, versions: Sequence[Path]) -> None:
        self._config, self._versions = config, versions
        self._of_modes: dict[str, ColdEngine] = {}  # of logprobs, other than this one's
        model = {name: getattr(config.model, name) for name in config.model.__slots__}
        self._llm = LLM(
            **{**model, "enforce_eager": True},
            block_size=config.cache.block_size,
            enable_prefix_caching=False,
            num_gpu_blocks_override=NUM_BLOCKS,
            max_num_seqs=1,
            enable_lora=True,
            max_loras=1,
            max_cpu_loras=len(versions),
            max_lora_rank=config.lora.max_lora_rank,
        )
        infos = [self._llm.load_lora_adapter(f"v{i}", str(p)) for i, p in enumerate(versions)]
        self.num_versions = len(versions)
        self.digests = [info.digest[:SHORT_HEX] for info in infos]
        self._memo: dict[Hashable, Right] = {}
        self.fingerprint = self._llm.model_info.fingerprint.hex()[:SHORT_HEX]
        self.hidden_size = self._llm.model_info.hidden_size
        self.vocab_size = self._llm.model_info.vocab_size

    def under(self, flags: Sequence[str]) -> ColdEngine:
        """The engine whose logprobs are of the mode that a server's flags name; else this one."""
        own = self._config.model.logprobs_mode
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--logprobs-mode", default=own)
        mode = parser.parse_known_args(list(flags))[0].logprobs_mode
        if mode == own:
            return self
        if mode not in self._of_modes:
            model = replace(self._config.model, logprobs_mode=mode)
            self._of_modes[mode] = ColdEngine(replace(self._config, model=model), self._versions)
        return self._of_modes[mode]

    def close(self) -> None:
        self._llm.close()
        for engine in self._of_modes.values():
            engine.close()

    @property
    def has_chat(self) -> bool:
        """Whether the model's tokenizer knows how a chat is written."""
        try:
            self._llm.tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
        except InvalidRequestError:
            return False
        return True

    def version_of(self, fingerprint: str) -> int | NoAdapter:
        """Which version a `system_fingerprint` names.

        Raises:
            ValueError: another model, or an adapter that was never loaded.
        """
        model, _, adapter = fingerprint.partition("-")
        if model != self.fingerprint:
            raise ValueError(f"{model} is another model than {self.fingerprint}")
        return self.digests.index(adapter.partition("-")[0]) if adapter else BASE_MODEL

    def answer(self, ask: Ask, version: int | NoAdapter) -> Right:
        encode = msgspec.json.encode
        key = (version, encode(ask.prompt), encode(ask.pooling or ask.params))
        if key not in self._memo:
            lora_name = None if version is BASE_MODEL else f"v{version}"
            if ask.pooling is not None:
                self._memo[key] = self._embedding(self._prompt(ask), ask.pooling, lora_name)
            else:
                self._memo[key] = self._right(ask, self._output(ask, lora_name))
        return self._memo[key]

    def _output(self, ask: Ask, lora_name: str | None) -> RequestOutput:
        """Answer as a server does: a grammar of a chat waits for the reasoning of the model."""
        if isinstance(ask.prompt, Chat):
            (output,) = self._llm.chat(_turns(ask.prompt), ask.params, lora_name=lora_name)
        else:
            (output,) = self._llm.generate(self._prompt(ask), ask.params, lora_name=lora_name)
        return output

    def _embedding(self, prompt: Prompt, pooling: PoolingParams, lora_name: str | None) -> Right:
        (output,) = self._llm.embed(prompt, pooling, lora_name=lora_name)
        data = array("f", output.embedding).tobytes()
        return Right((Choice(embedding=base64.b64encode(data).decode()),), None)

    def units(self, ask: Ask) -> list[Hashable]:
        """The prompt as tokens or rows: where two prompts' units are equal, so is their KV."""
        if isinstance(ask.prompt, Embeds):
            return [(seed, row) for seed, count in ask.prompt.runs for row in range(count)]
        prompt = self._prompt(ask)
        assert isinstance(prompt, TokensPrompt), "all but embeddings are token ids by now"
        return list(prompt.token_ids)

    def _prompt(self, ask: Ask) -> Prompt:
        tokenizer = self._llm.tokenizer
        match ask.prompt:
            case Tokens(token_ids):
                return TokensPrompt(token_ids)
            case Text(text):
                return TokensPrompt(tuple(tokenizer.encode(text)))
            case Chat():
                return TokensPrompt(tuple(tokenizer.apply_chat_template(_turns(ask.prompt))))
            case Embeds():
                return self._rows(ask.prompt)

    def _rows(self, prompt: Embeds) -> EmbedsPrompt:
        import torch  # slow to import; not for --help

        values = torch.from_numpy(rows(prompt, self.hidden_size))
        values = values.to(getattr(torch, self._llm.model_info.dtype))
        return EmbedsPrompt(len(values), values.view(torch.uint8).numpy().tobytes())

    def _right(self, ask: Ask, output: RequestOutput) -> Right:
        told: object = None
        if ask.params.prompt_logprobs is not None:
            num_tokens = len(output.prompt_token_ids)
            told = _as_json(
                prompt_logprobs(self._llm.tokenizer, num_tokens, output.prompt_logprobs)
            )
        return Right(tuple(self._choice(ask, choice) for choice in output.outputs), told)

    def _choice(self, ask: Ask, choice: CompletionOutput) -> Choice:
        return Choice(
            text=choice.text,
            token_ids=choice.token_ids,
            logprobs=self._logprobs(ask, choice),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )

    def _logprobs(self, ask: Ask, choice: CompletionOutput) -> list[object]:
        if ask.params.logprobs is None:
            return []
        tokenizer = self._llm.tokenizer
        if isinstance(ask.prompt, Chat):
            listed = bool(ask.params.logprob_token_ids)
            told = chat_logprobs(tokenizer, choice.logprobs, tells_drawn=listed)
            return [_as_json(one) for one in told.content]
        written = CompletionLogprobsWriter(tokenizer).write(choice.logprobs)
        columns = (written.tokens, written.token_logprobs, written.top_logprobs)
        return [list(row) for row in zip(*columns, strict=True)]


def _turns(prompt: Chat) -> list[dict[str, object]]:
    return [{"role": role, "content": text} for role, text in prompt.messages]


def _as_json(value: object) -> object:
    """The value as it reads after a round trip through JSON."""
    decoded: object = msgspec.json.decode(msgspec.json.encode(value))
    return decoded
