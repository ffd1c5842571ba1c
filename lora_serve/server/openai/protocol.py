"""Bodies of requests, as OpenAI's and vLLM's clients write them. Null always means "not given".

Types only: what a field means stands where it is used. Ranges of sampling settings are
`SamplingParams.verify`'s.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lora_serve.chat.history import PastMessage
from lora_serve.server.openai.constraints import (
    GuidedChoice,
    GuidedGrammar,
    GuidedJson,
    GuidedRegex,
    ResponseFormat,
    StructuredOutputs,
)
from lora_serve.server.openai.fields import (
    Body,
    CacheSalt,
    Content,
    Ignored,
    Integer,
    JsonObject,
    LogitBias,
    Name,
    NumLogprobs,
    Prompts,
    Texts,
    Tokens,
    Unsupported,
    UnsupportedFactor,
    UnsupportedModalities,
)
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


class GenerationBody(Body):
    """What completions and chat completions have in common."""

    model: ModelName | None = None
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
    prompt_logprobs: Integer | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: Integer | None = None
    truncation_side: Literal["left", "right"] | None = None
    response_format: ResponseFormat = None
    structured_outputs: StructuredOutputs = None
    guided_json: GuidedJson = None
    guided_regex: GuidedRegex = None
    guided_choice: GuidedChoice = None
    guided_grammar: GuidedGrammar = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: CacheSalt = ""
    priority: Integer | None = None
    request_id: RequestId | None = None

    # What changes no answer of this server: OpenAI's, then vLLM's.
    user: Ignored = None
    metadata: Ignored = None
    service_tier: Ignored = None
    store: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    prediction: Ignored = None
    verbosity: Ignored = None
    session_id: Ignored = None
    kv_transfer_params: Ignored = None
    spaces_between_special_tokens: Ignored = None
    guided_decoding_backend: Ignored = None

    # What would change it, and is not offered.
    use_beam_search: Unsupported = None
    length_penalty: UnsupportedFactor = None
    early_stopping: Unsupported = None
    stream_interval: UnsupportedFactor = None
    repetition_detection: Unsupported = None
    vllm_xargs: Unsupported = None
    allowed_token_ids: Unsupported = None
    bad_words: Unsupported = None
    logprob_token_ids: Unsupported = None
    guided_whitespace_pattern: Unsupported = None


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
    audio: Unsupported = None

    @property
    def past(self) -> PastMessage:
        return PastMessage(
            role=self.role,
            content=self.content,
            name=self.name,
            reasoning=self.reasoning_content or self.reasoning,
            tool_calls=[past.call for past in self.tool_calls or ()],
            tool_call_id=self.tool_call_id,
        )


Messages = Annotated[
    list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]


class ConversationBody(Body):
    """How messages become a prompt."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None
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


class ChatBody(GenerationBody, ConversationBody):
    """POST /v1/chat/completions."""

    messages: Messages
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
