"""Bodies of requests under /inference/v1. Their rules are those of `openai/fields.py`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lora_serve.server.openai.constraints import StructuredOutputs
from lora_serve.server.openai.fields import (
    Body,
    CacheSalt,
    Ignored,
    Integer,
    LogitBias,
    Texts,
    Tokens,
    Unsupported,
)
from lora_serve.server.openai.protocol import CompletionBody, ModelName, RequestId, StreamOptions

MAX_REQUEST_IDS = 4096
AnyRequestId = Annotated[str, Field(min_length=1, max_length=512)]
RequestIds = Annotated[list[AnyRequestId], Field(max_length=MAX_REQUEST_IDS)]


class AbortRequestsBody(Body):
    """POST /inference/v1/abort_requests."""

    request_ids: RequestIds


class SamplingBody(Body):
    """How the next tokens are chosen, by the names of vLLM's SamplingParams."""

    n: Integer | None = None
    max_tokens: Integer | None = None
    min_tokens: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Integer | None = None
    stop: Texts = ()
    stop_token_ids: Tokens | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: LogitBias = Field(default_factory=dict)
    allowed_token_ids: Tokens | None = None
    bad_words: Texts = ()
    logprobs: Integer | None = None
    prompt_logprobs: Integer | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs = None

    detokenize: Ignored = None
    output_kind: Ignored = None
    flat_logprobs: Ignored = None
    spaces_between_special_tokens: Ignored = None
    skip_reading_prefix_cache: Ignored = None

    logprob_token_ids: Unsupported = None
    prompt_logprob_token_ids: Unsupported = None
    repetition_detection: Unsupported = None
    extra_args: Unsupported = None


class GenerateBody(Body):
    """POST /inference/v1/generate."""

    token_ids: Annotated[Tokens, Field(min_length=1)]
    sampling_params: SamplingBody
    model: ModelName | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: CacheSalt = ""
    priority: Integer | None = None
    request_id: RequestId | None = None
    return_token_ids: bool | None = None
    output_mode: Literal["tokens"] | None = None

    token_offsets: Ignored = None
    parse_context: Ignored = None

    reasoning_ended: Unsupported = None
    reasoning_parser_kwargs: Unsupported = None
    features: Unsupported = None
    content_parts: Unsupported = None
    kv_transfer_params: Unsupported = None
    ec_transfer_params: Unsupported = None

    @property
    def completion(self) -> CompletionBody:
        """The same wish as a body of /v1/completions."""
        params = self.sampling_params
        return CompletionBody.model_construct(
            prompt=(self.token_ids,),
            model=self.model,
            stream=self.stream,
            stream_options=self.stream_options,
            cache_salt=self.cache_salt,
            priority=self.priority,
            request_id=self.request_id,
            return_token_ids=self.return_token_ids,
            **{name: getattr(params, name) for name in SAMPLING_FIELDS},
        )


SAMPLING_FIELDS = tuple(SamplingBody.model_fields.keys() & CompletionBody.model_fields.keys())
