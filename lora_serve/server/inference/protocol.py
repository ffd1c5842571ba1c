"""Bodies of requests under /inference/v1. Their rules are those of `openai/fields.py`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PlainValidator

from lora_serve.errors import InvalidRequestError
from lora_serve.server.openai.fields import (
    Body,
    CacheSalt,
    Ignored,
    Integer,
    Tokens,
    Unsupported,
    shared_fields,
)
from lora_serve.server.openai.kv_transfer import KVTransferField
from lora_serve.server.openai.protocol import CompletionBody, ModelName, RequestId, StreamOptions
from lora_serve.server.openai.sampling_fields import GenerationFields


def is_wanted(value: object) -> bool:
    """Whatever else than false clients send for other servers' sake asks for nothing."""
    return value is not False


Detokenize = Annotated[bool, PlainValidator(is_wanted, object)]


class SamplingBody(GenerationFields):
    """How the next tokens are chosen, by the names of vLLM's SamplingParams."""

    logprobs: Integer | None = None
    detokenize: Detokenize = True

    output_kind: Ignored = None
    flat_logprobs: Ignored = None
    skip_reading_prefix_cache: Ignored = None

    prompt_logprob_token_ids: Unsupported = None
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
    output_mode: Literal["tokens", "text"] | None = None
    kv_transfer_params: KVTransferField = None

    token_offsets: Ignored = None
    parse_context: Ignored = None

    reasoning_ended: Unsupported = None
    reasoning_parser_kwargs: Unsupported = None
    features: Unsupported = None
    content_parts: Unsupported = None
    ec_transfer_params: Unsupported = None

    @property
    def tells_text(self) -> bool:
        """Whether choices have texts, too.

        Raises:
            InvalidRequestError: nothing may be made into text.
        """
        is_text = self.output_mode == "text"
        if is_text and not self.sampling_params.detokenize:
            raise InvalidRequestError(
                "output_mode text needs detokenize, which is false; leave one of them out",
                "output_mode",
            )
        return is_text

    @property
    def completion(self) -> CompletionBody:
        """The same wish as a body of /v1/completions."""
        params = self.sampling_params
        return CompletionBody.model_construct(
            prompt=(self.token_ids,),
            **{name: getattr(self, name) for name in REQUEST_FIELDS},
            **{name: getattr(params, name) for name in SAMPLING_FIELDS},
        )


REQUEST_FIELDS = shared_fields(GenerateBody, CompletionBody)
SAMPLING_FIELDS = shared_fields(SamplingBody, CompletionBody)
NAMES = {  # where a body has the fields of completions that an error may name
    "prompt": "token_ids",
    **{name: f"sampling_params.{name}" for name in SAMPLING_FIELDS},
}
