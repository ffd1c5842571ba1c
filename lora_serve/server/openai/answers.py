"""Bodies of answers, as OpenAI's and vLLM's clients read them.

Plain structs with one encoder: floats are written so that they read back to the same bits.
A field that is UNSET is left out; what is not there is null where vLLM sends null.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from lora_serve.server.admin.answers import RolloutCard


class KVTransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer to `do_remote_decode` says, to be sent to the server that decodes.

    remote_num_tokens: of the prompt, those whose KV it will find.
    """

    remote_request_id: str
    remote_num_tokens: int
    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    remote_engine_id: None = None
    remote_block_ids: None = None
    remote_host: None = None
    remote_port: None = None


class PromptTokensDetails(msgspec.Struct, frozen=True, omit_defaults=True):
    """cached_tokens_by_tier: where they were found; left out if there is but the device cache."""

    cached_tokens: int
    cached_tokens_by_tier: dict[str, int] = {}


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """The tokens that were guessed and verified are told where there are any."""

    reasoning_tokens: int | UnsetType = UNSET
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int
    decoded_token: str


# For each prompt token what could have stood there, by token id; None for the first.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


class RequestMetrics(msgspec.Struct, frozen=True):
    """How long one answer took, with --enable-per-request-metrics.

    time_to_first_token_ms: from its first step. generation_time_ms: from its first token to its
    last. tokens_per_second: from its first step to its last token.
    """

    time_to_first_token_ms: float
    generation_time_ms: float
    queue_time_ms: float
    mean_itl_ms: float | None
    tokens_per_second: float | None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Lists of one length. The first token of an echoed prompt has no logprob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of an answer or of a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """An answer; also a chunk, whose usage may be UNSET."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    service_tier: None = None
    kv_transfer_params: KVTransferParams | None = None
    metrics: RequestMetrics | None = None


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """embedding: numbers, or base64 of little-endian float32."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Embedding]
    system_fingerprint: str
    usage: Usage


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]


class ToolFunction(msgspec.Struct, frozen=True):
    """arguments: JSON, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    id: str
    function: ToolFunction
    type: str = "function"


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """content: null if there is none beside the reasoning or the calls.

    reasoning, reasoning_content: the same text, by vLLM's name and by DeepSeek's.
    """

    role: str
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: Message
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    system_fingerprint: str
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    service_tier: None = None
    kv_transfer_params: KVTransferParams | None = None
    metrics: RequestMetrics | None = None


class FunctionDelta(msgspec.Struct, frozen=True, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, frozen=True):
    """The beginning of a call, or the next piece of its arguments. index: which call."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """reasoning, reasoning_content: as in `Message`."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType | None = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    metrics: RequestMetrics | UnsetType | None = UNSET


class RenderedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that would be continued, and how.

    prompt: its text, with special tokens. sampling_params: an object, by vLLM's names.
    """

    request_id: str
    model: str
    prompt: str
    token_ids: list[int]
    sampling_params: msgspec.Raw
    stream: bool
    cache_salt: str | None
    priority: int


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A served model. The fields after quantization are an adapter's only.

    created: seconds since 1970, when the server started or the adapter was loaded.
    root: where it came from. parent: the base model's name. digest: of the weights, in hex.
    weights: the format in which the base model's are stored.
    quantization: how the base model's linear layers are kept, if not as they were loaded.
    alora_invocation_tokens: where an activated LoRA begins to act.
    state, detail: of one that its catalog names and this server has not: "loading", or "failed" and
    why. rollout: how far its last change came. These three are for admins.
    """

    id: str
    object: str = "model"
    created: int
    owned_by: str = "lora-serve"
    root: str
    parent: str | None = None
    max_model_len: int
    weights: str | UnsetType = UNSET
    quantization: str | UnsetType = UNSET
    digest: str | UnsetType = UNSET
    generation: int | UnsetType = UNSET
    rank: int | UnsetType = UNSET
    residency: str | UnsetType = UNSET
    pinned: bool | UnsetType = UNSET
    num_leases: int | UnsetType = UNSET
    num_bytes: int | UnsetType = UNSET
    alora_invocation_tokens: tuple[int, ...] | UnsetType = UNSET
    state: str | UnsetType = UNSET
    detail: str | UnsetType = UNSET
    rollout: RolloutCard | UnsetType = UNSET


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


class Tokenized(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct, frozen=True):
    prompt: str


class AddedToken(msgspec.Struct, frozen=True):
    """A token that is found in a text before the text is cut into others."""

    content: str
    special: bool


class TokenizerInfo(msgspec.Struct, frozen=True):
    """added_tokens_decoder: by token id."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    additional_special_tokens: list[str]
    added_tokens_decoder: dict[str, AddedToken]
    chat_template: str | None
