"""Writes an `Ask` as an HTTP body, with every setting, so that no server's defaults matter."""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import numpy as np

from lora_serve.fuzz.talks import chat_fields, message_body, response_body, turns
from lora_serve.fuzz.trace import Ask, Chat, Embeds, Prompt, Talk, Text, Tokens
from lora_serve.pooling import PoolingParams
from lora_serve.sampling_params import SamplingParams
from lora_serve.structured_outputs import StructuredOutput

Json = dict[str, Any]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
EMBEDDINGS, TOKEN_EMBEDDINGS = "/v1/embeddings", "/pooling"
TALKS = {"chat": CHAT, "responses": "/v1/responses", "messages": "/v1/messages"}
_CONVERTED = ("logprobs", "logit_bias", "structured_outputs", "reasoning")


def route(ask: Ask) -> str:
    if ask.pooling is not None:
        return TOKEN_EMBEDDINGS if ask.pooling.pooling_type == "ALL" else EMBEDDINGS
    if ask.talk is not None:
        return TALKS[ask.talk.route]
    return CHAT if isinstance(ask.prompt, Chat) else COMPLETIONS


def body(ask: Ask, model: str, cache_salt: str, hidden_size: int) -> Json:
    """model: as the server calls it. hidden_size: of the rows of embeddings."""
    fields = {"model": model, "priority": ask.priority}
    if cache_salt:
        fields["cache_salt"] = cache_salt
    if ask.pooling is not None:
        return fields | _embedding(ask.prompt, ask.pooling)
    match ask.talk:
        case Talk(route="messages"):
            return fields | message_body(ask, ask.talk)
        case Talk(route="responses"):
            return fields | response_body(ask, ask.talk, _settings(ask.params))
    return fields | _generation(ask, hidden_size)


def _generation(ask: Ask, hidden_size: int) -> Json:
    fields = _settings(ask.params)
    fields |= {"return_token_ids": True, "stream": ask.is_streamed}
    if ask.is_streamed:
        fields["stream_options"] = {"include_usage": True}
    if ask.kv_transfer:
        fields["kv_transfer_params"] = {ask.kv_transfer: True}
    num_top = ask.params.logprobs
    match ask.prompt:
        case Tokens(token_ids):
            fields |= {"prompt": list(token_ids), "logprobs": num_top}
        case Text(text):
            fields |= {"prompt": text, "logprobs": num_top}
        case Embeds():
            fields |= {"prompt_embeds": _payload(ask.prompt, hidden_size), "logprobs": num_top}
        case Chat():
            fields["messages"] = turns(ask.prompt)
            fields |= chat_fields(ask.talk) if ask.talk is not None else {}
            if num_top is not None:
                fields |= {"logprobs": True, "top_logprobs": num_top}
    return fields


def _embedding(prompt: Prompt, pooling: PoolingParams) -> Json:
    fields: Json = {
        "encoding_format": "base64",
        "use_activation": pooling.normalize,
        "dimensions": pooling.dimensions,
    }
    if pooling.pooling_type == "ALL":
        fields["task"] = "token_embed"
    match prompt:
        case Tokens(token_ids):
            return fields | {"input": list(token_ids)}
        case Text(text):
            return fields | {"input": text}
        case Chat():
            return fields | {"messages": turns(prompt), "add_generation_prompt": True}
        case Embeds():
            raise ValueError("/v1/embeddings takes no prompt_embeds")


def rows(prompt: Embeds, hidden_size: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """(number of rows, hidden_size)."""
    runs = [
        np.random.default_rng(seed).standard_normal((count, hidden_size), dtype=np.float32)
        for seed, count in prompt.runs
    ]
    return np.concatenate(runs)


def _settings(params: SamplingParams) -> Json:
    settings: Json = msgspec.to_builtins(params)
    for name in _CONVERTED:
        settings.pop(name)
    if params.logit_bias:
        settings["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    if params.structured_outputs is not None:
        settings |= _constraint(params.structured_outputs)
    return settings


def _constraint(constraint: StructuredOutput) -> Json:
    """Each kind in another of the forms that bodies write it in."""
    match constraint.kind:
        case "json":
            schema = {"schema": json.loads(constraint.text), "strict": constraint.is_strict}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
        case "choice":
            return {"guided_choice": json.loads(constraint.text)}
        case "json_object":
            return {"response_format": {"type": "json_object"}}
        case "structural_tag" if "format" in (tag := json.loads(constraint.text)):
            return {"response_format": {"type": "structural_tag", **tag}}
        case kind:
            return {"structured_outputs": {kind: constraint.text}}


def _payload(prompt: Embeds, hidden_size: int) -> str:
    from safetensors.numpy import save

    return base64.b64encode(save({"rows": rows(prompt, hidden_size)})).decode()
