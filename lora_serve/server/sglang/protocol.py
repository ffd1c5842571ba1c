"""The body of SGLang's /generate. The rules of its fields are those of `openai/fields.py`.

A field that SGLang takes as one value for each prompt must be one value for all of them here.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, PlainValidator

from lora_serve.server.openai.constraints import GuidedGrammar, GuidedJson, GuidedRegex, guided
from lora_serve.server.openai.fields import (
    MAX_PROMPTS,
    MAX_TOKEN_ID,
    Body,
    CacheSalt,
    Ignored,
    Integer,
    LogitBias,
    TextOrTokens,
    Texts,
    Tokens,
    Unsupported,
    parse_prompts,
)
from lora_serve.server.openai.protocol import CompletionBody, ModelName, RequestId
from lora_serve.structured_outputs import StructuredOutput

StructuralTag = Annotated[
    StructuredOutput | None,
    PlainValidator(guided("structural_tag"), str | dict[str, object] | None),
]
CONSTRAINTS = ("json_schema", "regex", "ebnf", "structural_tag")
RENAMED = {  # settings that completions have under other names
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "ebnf",
    "structured_outputs": "structural_tag",
}
SAME = (
    "stop", "stop_token_ids", "temperature", "top_p", "top_k", "min_p", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "n", "ignore_eos", "skip_special_tokens",
    "logit_bias",
)  # fmt: skip
NAMES = {  # where a body has the fields of completions that an error may name
    **{name: f"sampling_params.{name}" for name in SAME},
    **{name: f"sampling_params.{theirs}" for name, theirs in RENAMED.items()},
    "prompt": "text",
    "model": "lora_path",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
    "prompt_logprob_start": "logprob_start_len",
    "request_id": "rid",
    "cache_salt": "extra_key",
}


def parse_texts_or_text(value: object) -> str | tuple[str, ...] | None:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or any(not isinstance(t, str) for t in value):
        raise ValueError("must be a text, or a list of texts")
    parse_prompts(value)  # bounds their number
    return tuple(value)


def parse_input_ids(value: object) -> tuple[int, ...] | tuple[tuple[int, ...], ...] | None:
    """The ids of one prompt, or those of several."""
    if value is None:
        return None
    prompts = parse_prompts(value) if isinstance(value, list) else ("",)
    if not prompts or any(isinstance(prompt, str) for prompt in prompts):
        raise ValueError("must be a list of token ids, or a list of such lists")
    ids = tuple(prompt for prompt in prompts if not isinstance(prompt, str))
    is_one = isinstance(value, list) and isinstance(value[0], int)
    return ids[0] if is_one else ids


_Ids = list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]]
PromptTexts = Annotated[
    str | tuple[str, ...] | None,
    PlainValidator(
        parse_texts_or_text, str | Annotated[list[str], Field(max_length=MAX_PROMPTS)] | None
    ),
]
InputIds = Annotated[
    tuple[int, ...] | tuple[tuple[int, ...], ...] | None,
    PlainValidator(parse_input_ids, _Ids | list[_Ids] | None),
]


class SglangSampling(Body):
    """How the next tokens are chosen, by the names of SGLang's SamplingParams."""

    max_new_tokens: Integer | None = None
    min_new_tokens: Integer | None = None
    stop: Texts = ()
    stop_token_ids: Tokens | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    sampling_seed: Integer | None = None
    n: Integer | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    logit_bias: LogitBias = Field(default_factory=dict)
    json_schema: GuidedJson = None
    regex: GuidedRegex = None
    ebnf: GuidedGrammar = None
    structural_tag: StructuralTag = None

    spaces_between_special_tokens: Ignored = None
    stream_interval: Ignored = None

    stop_regex: Unsupported = None
    custom_params: Unsupported = None


def check_constraints(sampling: SglangSampling) -> SglangSampling:
    given = [name for name in CONSTRAINTS if getattr(sampling, name) is not None]
    if len(given) > 1:
        raise ValueError(f"has {' and '.join(given)}, which exclude each other; give one of them")
    return sampling


class SglangGenerateBody(Body):
    """POST /generate."""

    text: PromptTexts = None
    input_ids: InputIds = None
    sampling_params: Annotated[SglangSampling, AfterValidator(check_constraints)] | None = None
    lora_path: ModelName | None = None
    rid: RequestId | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: Integer | None = None
    top_logprobs_num: Integer | None = None
    return_text_in_logprobs: bool | None = None
    extra_key: CacheSalt = ""
    priority: Integer | None = None

    # What changes no answer of this server.
    log_metrics: Ignored = None
    no_logs: Ignored = None
    modalities: Ignored = None
    custom_labels: Ignored = None
    conversation_id: Ignored = None
    data_parallel_rank: Ignored = None
    routed_dp_rank: Ignored = None

    # What would change it, and is not offered.
    token_ids_logprob: Unsupported = None
    input_embeds: Unsupported = None
    image_data: Unsupported = None
    video_data: Unsupported = None
    audio_data: Unsupported = None
    session_params: Unsupported = None
    lora_id: Unsupported = None
    custom_logit_processor: Unsupported = None
    return_hidden_states: Unsupported = None
    return_routed_experts: Unsupported = None
    background: Unsupported = None
    bootstrap_host: Unsupported = None
    bootstrap_port: Unsupported = None
    bootstrap_room: Unsupported = None

    @property
    def is_list(self) -> bool:
        """Whether several prompts were given as a list; it may hold one."""
        given = self.text if self.text is not None else self.input_ids
        return isinstance(given, tuple) and not (given and isinstance(given[0], int))

    @property
    def scores_prompt(self) -> bool:
        start = self.logprob_start_len
        return bool(self.return_logprob) and start is not None and start >= 0

    @property
    def completion(self) -> CompletionBody:
        """The same wish as a body of /v1/completions; how it is told is the answer's matter."""
        sampling = self.sampling_params or SglangSampling()
        num_top = self.top_logprobs_num or 0
        return CompletionBody.model_construct(
            prompt=self._prompts,
            model=self.lora_path,
            request_id=self.rid,
            cache_salt=self.extra_key,
            priority=self.priority,
            logprobs=num_top if self.return_logprob else None,
            prompt_logprobs=num_top if self.scores_prompt else None,
            prompt_logprob_start=self.logprob_start_len if self.scores_prompt else None,
            **{name: getattr(sampling, name) for name in SAME},
            **{name: getattr(sampling, theirs) for name, theirs in RENAMED.items()},
        )

    @property
    def _prompts(self) -> tuple[TextOrTokens, ...]:
        given = self.text if self.text is not None else self.input_ids
        if self.is_list:
            return tuple(given or ())  # type: ignore[arg-type]  # a list of prompts, as told above
        return () if given is None else (given,)  # type: ignore[return-value]  # and here one
