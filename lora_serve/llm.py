"""`LLM`: the engine for Python users, in their own process.

Steps 3 and 5 to 13 of a request's way (docs/architecture.md) are the server's own code, without the
hops between processes and their queues.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from lora_serve.chat.formats import AUTO, reasoning_format
from lora_serve.engine.frontend.bad_words import BadWordEncoder
from lora_serve.engine.frontend.input import InputProcessor
from lora_serve.engine.frontend.pooling_defaults import pooling_defaults
from lora_serve.engine.frontend.rank_checks import warn_of_shared_cores
from lora_serve.engine.frontend.startup_checks import check_startup
from lora_serve.engine.in_process import InProcessEngine, Job
from lora_serve.engine.settings import engine_config
from lora_serve.engine_stats import EngineStats
from lora_serve.errors import InvalidRequestError
from lora_serve.generate_request import GenerateRequest
from lora_serve.identity import BASE_MODEL, EVERYTHING
from lora_serve.messages import (
    AdapterInfo,
    ListAdapters,
    LoadAdapter,
    ResetPrefixCache,
    UnloadAdapter,
)
from lora_serve.outputs import EmbeddingOutput, RequestOutput
from lora_serve.pooling import PoolingParams
from lora_serve.prompts import Prompt, TokensPrompt
from lora_serve.sampling_params import PROMPT_ONLY, SamplingParams
from lora_serve.text.tokenizer import Tokenizer

Conversation = Sequence[Mapping[str, object]]


logger = logging.getLogger(__name__)


class LLM:
    """A model with adapters. Settings are the server's flags, with underscores.

    >>> from lora_serve import LLM, SamplingParams
    >>> llm = LLM(MODEL, enable_lora=True)
    >>> adapter = llm.load_lora_adapter("tenant", ADAPTER)
    >>> params = SamplingParams(temperature=0, max_tokens=8)
    >>> first, second = llm.generate(["Hello", "Good morning"], params, lora_name="tenant")
    >>> (answer,) = llm.chat([{"role": "user", "content": "Hello"}], params)
    >>> len(answer.outputs[0].token_ids)
    8
    >>> (hello,) = llm.embed("Hello")
    >>> len(hello.embedding) == llm.model_info.hidden_size
    True
    >>> llm.close()
    """

    def __init__(self, model: str, **settings: Any) -> None:
        self.config = engine_config(model=model, **settings)
        check_startup(self.config)
        warn_of_shared_cores(self.config)
        self.tokenizer = Tokenizer(
            self.config.model.tokenizer or model, self.config.model.revision, model=model
        )
        for warning in self.tokenizer.warnings:
            logger.warning("%s", warning)
        self._engine = InProcessEngine(self.config, self.tokenizer)
        self.model_info = self._engine.model_info
        self._inputs = InputProcessor(
            self.model_info,
            self.config.cache.block_size,
            tuple(self.tokenizer.eos_token_ids),
            self.config.model.max_logprobs,
            self.config.model.max_n,
            BadWordEncoder(self.tokenizer.encode),
        )
        self.pooling_defaults = pooling_defaults(self.config.model)
        self._num_prompts = 0
        try:
            for name, path in self.config.lora.modules:
                self.load_lora_adapter(name, path)
        except BaseException:
            self.close()  # or its ranks would go on
            raise

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._engine.close()

    def generate(
        self,
        prompts: str | Prompt | Sequence[str | Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_name: str | Sequence[str | None] | None = None,
        priority: int | Sequence[int] = 0,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Continue prompts, all at once; one output for each, in order.

        params, lora_name, priority: one for all, or one for each prompt. No lora_name: the base
        model. With scheduling_policy "priority" the lowest go first.

        Raises:
            InvalidRequestError, AdapterNotFoundError: for the first prompt at fault; none is run.
                A grammar is compiled while others run, and may be refused then.
        """
        prompt_list = [prompts] if isinstance(prompts, (str, Prompt)) else list(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompt_list)
        _require_one_each(len(prompt_list), params=len(params))
        answers = [None] * len(prompt_list)
        jobs = self._jobs(prompt_list, params, answers, lora_name, priority, cache_salt)
        return self._engine.run(jobs)

    def embed(
        self,
        prompts: str | Prompt | Sequence[str | Prompt],
        params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        lora_name: str | Sequence[str | None] | None = None,
        priority: int | Sequence[int] = 0,
        cache_salt: str = "",
    ) -> list[EmbeddingOutput]:
        """Embeddings of prompts, all at once; one for each, in order.

        params: how they are made; as `pooler_config` or the checkpoint says if left out. The rest
        is as `generate` has it.

        Raises:
            InvalidRequestError, AdapterNotFoundError: for the first prompt at fault; none is run.
            RequestFailedError: the model's hidden states are no finite numbers.
        """
        prompt_list = [prompts] if isinstance(prompts, (str, Prompt)) else list(prompts)
        if params is None or isinstance(params, PoolingParams):
            params = [params or self.pooling_defaults] * len(prompt_list)
        nothing = [PROMPT_ONLY] * len(prompt_list)
        jobs = self._jobs(prompt_list, nothing, params, lora_name, priority, cache_salt)
        return [_embedding_output(output) for output in self._engine.run(jobs)]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_name: str | Sequence[str | None] | None = None,
        priority: int | Sequence[int] = 0,
        cache_salt: str = "",
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, as `generate` continues prompts.

        Where the template tells how the model marks reasoning, `structured_outputs` hold what
        follows it.

        Args:
            messages: a conversation, which is a list of {"role": …, "content": …}, or a list of
                conversations.
            chat_template: Jinja, instead of the model's own.
            add_generation_prompt: end the prompt with the head of the assistant's next message.
            chat_template_kwargs: further variables for the template.
            tools: that the template tells the model of, as OpenAI's clients write them. Answers
                are text; calls in it are not looked for.

        Raises:
            InvalidRequestError: there is no template, or it refuses a conversation.
            AdapterNotFoundError: as `generate`.
        """
        texts = [
            self.tokenizer.render_chat(
                conversation,
                add_generation_prompt=add_generation_prompt,
                chat_template=chat_template,
                tools=tools,
                template_kwargs=chat_template_kwargs,
            )
            for conversation in _conversations(messages)
        ]
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(texts)
        _require_one_each(len(texts), params=len(params))
        return self.generate(
            [TokensPrompt(tuple(self._encode(text))) for text in texts],
            self._with_reasoning(params, texts, chat_template),
            lora_name=lora_name,
            priority=priority,
            cache_salt=cache_salt,
        )

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _with_reasoning(
        self, params: Sequence[SamplingParams], texts: Sequence[str], chat_template: str | None
    ) -> list[SamplingParams]:
        """Let grammars wait for reasoning where the chat template tells how it is marked.

        Its budget needs the same marks.
        """
        form = reasoning_format(AUTO, self.tokenizer.template_source(chat_template))
        if form is None:
            return list(params)
        waits = not self.config.structured_outputs.structured_outputs_enable_in_reasoning
        return [
            msgspec.structs.replace(one, reasoning=form.tokens(self._encode, text))
            if one.reasoning is None and one.needs_reasoning(grammars_wait=waits)
            else one
            for one, text in zip(params, texts, strict=True)
        ]

    def load_lora_adapter(
        self,
        name: str,
        path: str,
        load_inplace: bool = False,
        pinned: bool = False,
        digest: str = "",
    ) -> AdapterInfo:
        reply = self._engine.call(
            lambda call_id: LoadAdapter(call_id, name, path, load_inplace, pinned, digest)
        )
        return reply.adapters[0]

    def unload_lora_adapter(self, name: str) -> None:
        self._engine.call(lambda call_id: UnloadAdapter(call_id, name))

    def list_adapters(self) -> list[AdapterInfo]:
        return list(self._engine.call(ListAdapters).adapters)

    def reset_prefix_cache(self, lora_name: str | None = None) -> None:
        """Forget all cached KV, or that of one adapter.

        Raises:
            AdapterNotFoundError: there is no such adapter.
            NotForgottenError: a tier has not forgotten it yet; this engine uses it no more.
        """
        scope = EVERYTHING if lora_name is None else lora_name
        self._engine.call(lambda call_id: ResetPrefixCache(call_id, scope))

    def stats(self) -> EngineStats:
        """Gauges and totals since start."""
        return self._engine.stats()

    def _jobs(
        self,
        prompts: Sequence[str | Prompt],
        params: Sequence[SamplingParams],
        pooling: Sequence[PoolingParams | None],
        lora_name: str | Sequence[str | None] | None,
        priority: int | Sequence[int],
        salt: str,
    ) -> list[Job]:
        if lora_name is None or isinstance(lora_name, str):
            lora_name = [lora_name] * len(prompts)
        if isinstance(priority, int):
            priority = [priority] * len(prompts)
        _require_one_each(
            len(prompts), params=len(pooling), lora_name=len(lora_name), priority=len(priority)
        )
        each = zip(prompts, params, pooling, lora_name, priority, strict=True)
        return [self._job(*item, salt) for item in each]

    def _job(
        self,
        prompt: str | Prompt,
        params: SamplingParams,
        pooling: PoolingParams | None,
        lora_name: str | None,
        priority: int,
        salt: str,
    ) -> Job:
        if isinstance(prompt, str):
            prompt = TokensPrompt(tuple(self.tokenizer.encode(prompt)))
        self._num_prompts += 1
        request_id = f"llm-{self._num_prompts}"
        request = GenerateRequest(
            request_id=request_id,
            prompt=prompt,
            params=params,
            lora_name=BASE_MODEL if lora_name is None else lora_name,
            cache_salt=salt,
            priority=priority,
            pooling=pooling,
        )
        output = RequestOutput(request_id, list(prompt.token_ids), num_choices=params.n)
        return Job(self._inputs.resolve(request), output)


def _embedding_output(output: RequestOutput) -> EmbeddingOutput:
    return EmbeddingOutput(
        output.request_id,
        output.prompt_token_ids,
        array("f", output.embedding).tolist(),
        output.num_cached_tokens,
        output.adapter,
    )


def _conversations(messages: Conversation | Sequence[Conversation]) -> Sequence[Conversation]:
    if messages and isinstance(messages[0], Mapping):
        return [cast(Conversation, messages)]
    return cast(Sequence[Conversation], messages)


def _require_one_each(num_prompts: int, **counts: int) -> None:
    for name, count in counts.items():
        if count != num_prompts:
            raise InvalidRequestError(
                f"{num_prompts} prompts but {count} {name}; give one for all, or one for each", name
            )
