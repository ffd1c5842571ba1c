"""Dynamo's requests and chunks, as plain values, and the engine's. Knows no Dynamo.

The fields are those of `GenerateRequest` and `GenerateChunk` in dynamo/common/backend/engine.py of
Dynamo 1.6, as its preprocessor fills them. A choice that this engine does not have is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from typing import TypedDict

import msgspec

from lora_serve.errors import InvalidRequestError
from lora_serve.generate_request import GenerateRequest
from lora_serve.identity import BASE_MODEL
from lora_serve.outputs import OutputDelta
from lora_serve.prompts import TokensPrompt
from lora_serve.sampling_params import SamplingParams
from lora_serve.structured_outputs import StructuredOutput

Options = Mapping[str, object]

SAMPLED_AS_NAMED = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "include_stop_str_in_output"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logprob_token_ids"),
)
STOPPED_AS_NAMED = ("max_tokens", "min_tokens", "ignore_eos")
GRAMMARS = ("json", "regex", "choice", "grammar", "structural_tag")
NOT_HERE = {"use_beam_search": False, "length_penalty": 1.0, "best_of": 1}
NOT_HERE_WITH = "multi_modal_data", "prefill_result", "bootstrap_info", "encoder_result"
_NUMBERS = itertools.count()


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TopLogprob(TypedDict):
    rank: int
    token_id: int
    token: str
    logprob: float


class Chunk(TypedDict, total=False):
    """log_probs, top_logprobs: of each token of token_ids."""

    token_ids: list[int]
    index: int
    finish_reason: str
    completion_usage: Usage
    log_probs: list[float]
    top_logprobs: list[list[TopLogprob]]


def engine_request(
    request: Options, request_id: str, base_names: Collection[str]
) -> GenerateRequest:
    """What Dynamo's preprocessor asks for.

    Args:
        base_names: what the base model is called; any other model is an adapter.

    Raises:
        InvalidRequestError: it asks for what there is not here.
    """
    for name in NOT_HERE_WITH:
        if request.get(name):
            raise InvalidRequestError(f"{name} is not served here; send the request without", name)
    model = str(request.get("model") or "")
    token_ids = request.get("token_ids")
    assert isinstance(token_ids, list | tuple), "the preprocessor gives token ids"
    return GenerateRequest(
        request_id=f"{request_id}-{next(_NUMBERS)}",
        client_request_id=request_id,
        prompt=TokensPrompt(tuple(token_ids)),
        params=sampling_params(request),
        lora_name=BASE_MODEL if not model or model in base_names else model,
        priority=_priority(request),
    )


def sampling_params(request: Options) -> SamplingParams:
    """Its sampling_options, stop_conditions and output_options. Raises InvalidRequestError.

    Stop strings are the frontend's: it ends the request when it has seen one.
    """
    sampling, stop = _options(request, "sampling_options"), _options(request, "stop_conditions")
    output = _options(request, "output_options")
    for name, without in NOT_HERE.items():
        if sampling.get(name) not in (None, without):
            raise InvalidRequestError(f"{name} is not supported; leave it out", name)
    chosen = {name: sampling[name] for name in SAMPLED_AS_NAMED if name in sampling}
    chosen |= {name: stop[name] for name in STOPPED_AS_NAMED if name in stop}
    chosen |= {name: output[name] for name in ("logprobs", "prompt_logprobs") if name in output}
    ids = {*_ids(stop, "stop_token_ids"), *_ids(stop, "stop_token_ids_hidden")}
    chosen["stop_token_ids"] = tuple(sorted(ids))
    chosen.setdefault("max_tokens", None)
    if sampling.get("logit_bias"):
        chosen["logit_bias"] = sampling["logit_bias"]
    if "guided_decoding" in sampling:
        chosen["structured_outputs"] = _grammar(_options(sampling, "guided_decoding"))
    try:
        return msgspec.convert(chosen, SamplingParams, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"the sampling options cannot be read: {error}") from error


def _grammar(options: Options) -> StructuredOutput | None:
    given = {name: options[name] for name in GRAMMARS if name in options}
    if not given:
        return None
    return StructuredOutput.of(**given, param="guided_decoding")  # type: ignore[arg-type]


def _options(request: Options, name: str) -> dict[str, object]:
    """A part of a request, without what is not given."""
    part = request.get(name) or {}
    assert isinstance(part, Mapping), part
    return {key: value for key, value in part.items() if value is not None}


def _ids(options: Options, name: str) -> list[int]:
    ids = options.get(name) or []
    assert isinstance(ids, list | tuple), ids
    return [*ids]


def _priority(request: Options) -> int:
    priority = _options(request, "routing").get("priority", 0)
    return priority if isinstance(priority, int) else 0


class Chunks:
    """Makes the chunks of one request of what the engine gives."""

    def __init__(self, request: GenerateRequest, token_text: Callable[[int], str]) -> None:
        self._request = request
        self._token_text = token_text
        self._num_tokens = [0] * request.params.n

    def chunk(self, delta: OutputDelta) -> Chunk:
        """What is new for one choice; with the usage, once it has ended."""
        self._num_tokens[delta.index] += len(delta.token_ids)
        chunk: Chunk = {"token_ids": [*delta.token_ids], "index": delta.index}
        if delta.logprobs:
            chunk["log_probs"] = [position.logprob for position in delta.logprobs]
            if self._request.params.logprobs:
                chunk["top_logprobs"] = [
                    [
                        TopLogprob(
                            rank=rank, token_id=t, token=self._token_text(t), logprob=logprob
                        )
                        for rank, (t, logprob) in enumerate(position.top, 1)
                    ]
                    for position in delta.logprobs
                ]
        if delta.finish_reason is not None:
            num_prompt, num_tokens = self._request.prompt.num_tokens, self._num_tokens[delta.index]
            chunk["finish_reason"] = delta.finish_reason
            chunk["completion_usage"] = Usage(
                prompt_tokens=num_prompt,
                completion_tokens=num_tokens,
                total_tokens=num_prompt + num_tokens,
            )
        return chunk
