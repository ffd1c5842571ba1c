"""Bodies of requests, as OpenAI's and vLLM's clients write them. Null always means "not given".

Types only: what a field means stands where it is used. Ranges of sampling settings are
`SamplingParams.verify`'s.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from lora_serve.chat.history import PastMessage
from lora_serve.server.openai.constraints import (
    GuidedChoice,
    GuidedGrammar,
    GuidedJson,
    GuidedRegex,
    ResponseFormat,
)
from lora_serve.server.openai.fields import (
    MAX_PROMPTS,
    Body,
    CacheSalt,
    Content,
    EmbeddingInputs,
    EmbedsPart,
    Ignored,
    Integer,
    JsonObject,
    Name,
    NumLogprobs,
    Prompts,
    TemplateKwargs,
    Texts,
    Tokens,
    Unsupported,
    UnsupportedDtype,
    UnsupportedEndianness,
    UnsupportedFactor,
    UnsupportedModalities,
    UnsupportedPadding,
)
from lora_serve.server.openai.kv_transfer import KVTransferField
from lora_serve.server.openai.sampling_fields import GenerationFields
from lora_serve.server.openai.tool_fields import PastCalls, ToolChoiceField, Tools

MAX_REQUEST_ID_CHARS = 256
MAX_MODEL_CHARS = 1024  # "MODEL:ADAPTER", where MODEL may be a path
MAX_MESSAGES = 4096
MAX_TEMPLATE_CHARS = 65_536  # models' own have up to 20,000; compiled ones are kept

RequestId = Annotated[str, Field(min_length=1, max_length=MAX_REQUEST_ID_CHARS)]
ModelName = Annotated[str, Field(max_length=MAX_MODEL_CHARS)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Template = Annotated[str, Field(max_length=MAX_TEMPLATE_CHARS)]


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Ignored = None


class ScheduledBody(Body):
    """What every body says that gives the engine requests."""

    model: ModelName | None = None
    cache_salt: CacheSalt = ""
    priority: Integer | None = None
    request_id: RequestId | None = None
    truncate_prompt_tokens: Integer | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    user: Ignored = None


class GenerationBody(GenerationFields, ScheduledBody):
    """What completions and chat completions have in common."""

    echo: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat = None
    guided_json: GuidedJson = None
    guided_regex: GuidedRegex = None
    guided_choice: GuidedChoice = None
    guided_grammar: GuidedGrammar = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # What changes no answer of this server: OpenAI's, then vLLM's.
    metadata: Ignored = None
    service_tier: Ignored = None
    store: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    prediction: Ignored = None
    verbosity: Ignored = None
    session_id: Ignored = None
    guided_decoding_backend: Ignored = None
    mm_payload: Ignored = None  # how images are told, which no body has
    return_mm_kwargs: Ignored = None

    kv_transfer_params: KVTransferField = None

    # What would change it, and is not offered.
    use_beam_search: Unsupported = None
    length_penalty: UnsupportedFactor = None
    early_stopping: Unsupported = None
    stream_interval: UnsupportedFactor = None
    vllm_xargs: Unsupported = None
    guided_whitespace_pattern: Unsupported = None
    return_token_offsets: Unsupported = None
    return_prompt_text: Unsupported = None
    ec_transfer_params: Unsupported = None
    media_io_kwargs: Unsupported = None


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Prompts = ()
    prompt_embeds: Texts = ()
    logprobs: NumLogprobs = None
    best_of: Integer | None = None
    suffix: Unsupported = None


class ChatMessage(Body):
    role: Name
    content: Content = None
    name: Name | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_call_id: Name | None = None
    tool_calls: PastCalls | None = None
    function_call: Unsupported = None
    refusal: Ignored = None
    annotations: Ignored = None
    cache_control: Ignored = None
    audio: Unsupported = None

    @property
    def text(self) -> str | None:
        """The content, without embeddings."""
        if not isinstance(self.content, tuple):
            return self.content
        return "\n".join(part for part in self.content if isinstance(part, str))

    @property
    def embeds(self) -> list[str]:
        """The payloads of the embeddings among the content's parts."""
        parts = self.content if isinstance(self.content, tuple) else ()
        return [part.data for part in parts if isinstance(part, EmbedsPart)]

    def past(self, marks: Iterator[str]) -> PastMessage:
        """The message for a template. marks: stand in its text where embeddings do."""
        content = self.content
        if isinstance(content, tuple):
            content = "\n".join(part if isinstance(part, str) else next(marks) for part in content)
        return PastMessage(
            role=self.role,
            content=content,
            name=self.name,
            reasoning=self.reasoning_content or self.reasoning,
            tool_calls=[past.call for past in self.tool_calls or ()],
            tool_call_id=self.tool_call_id,
        )


def check_message(message: ChatMessage) -> ChatMessage:
    """Refuse a message that says nothing; an answer may have calls, or reasoning, alone."""
    if message.content is None and not (
        message.role == "assistant"
        and (
            message.tool_calls
            or message.reasoning_content
            or message.reasoning
            or "refusal" in message.model_fields_set
        )
    ):
        raise ValueError(
            f"has no content, and a message of the role {message.role[:40]} needs a text or parts"
        )
    return message


Messages = Annotated[
    list[Annotated[ChatMessage, AfterValidator(check_message)]],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
]


class ConversationBody(Body):
    """How messages become a prompt."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    tools: Tools | None = None
    reasoning_effort: ReasoningEffort | None = None

    @property
    def template_kwargs(self) -> JsonObject:
        """Variables for the template: what the body says by name yields to what it sets itself."""
        kwargs: JsonObject = {}
        if self.reasoning_effort is not None:
            kwargs["enable_thinking"] = kwargs["thinking"] = self.reasoning_effort != "none"
        if self.reasoning_effort not in (None, "none"):
            kwargs["reasoning_effort"] = self.reasoning_effort
        return kwargs | (self.chat_template_kwargs or {})

    @cached_property
    def num_template_chars(self) -> int:
        """How long what a template is given besides the messages is, as JSON."""
        of_tools = sum(len(tool.function.name) + tool.num_bytes for tool in self.tools or ())
        kwargs = self.template_kwargs
        return of_tools + (len(json.dumps(kwargs)) if kwargs else 0)


class ChatFields(GenerationBody, ConversationBody):
    """A chat's body without its messages."""

    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    chat_template: Template | None = None
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    functions: Unsupported = None
    function_call: Unsupported = None
    modalities: UnsupportedModalities = None
    audio: Unsupported = None
    web_search_options: Unsupported = None
    documents: Unsupported = None
    mm_processor_kwargs: Unsupported = None


class ChatBody(ChatFields):
    """POST /v1/chat/completions."""

    messages: Messages


class ChatBatchBody(ChatFields):
    """POST /v1/chat/completions/batch."""

    messages: Annotated[list[Messages], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]

    def alone(self, messages: list[ChatMessage]) -> ChatBody:
        """The body that would ask for one conversation's answer."""
        fields = {name: getattr(self, name) for name in ChatFields.model_fields}
        return ChatBody.model_construct(_fields_set=None, **fields, messages=messages)


class EmbeddingBody(ScheduledBody, ConversationBody):
    """POST /v1/embeddings: inputs, or the messages of a chat.

    use_activation: whether embeddings get length 1, in vLLM's word for it.
    """

    input: EmbeddingInputs = ()
    messages: Messages | None = None
    chat_template: Template | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Integer | None = None
    use_activation: bool | None = None
    embed_dtype: UnsupportedDtype = None
    endianness: UnsupportedEndianness = None
    padding: UnsupportedPadding = None


class TokenizeBody(ConversationBody):
    """POST /tokenize: a prompt, or the messages of a chat."""

    model: ModelName | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: ModelName | None = None
    tokens: Tokens
