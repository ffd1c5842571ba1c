"""Reads answers of /v1/responses and /v1/messages, whole or in events, for `answers.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lora_serve.fuzz.answers import Choice, Heard, named_versions

Json = Mapping[str, Any]
FAILURES = {  # the status that an error in a stream would have had before it
    "invalid_prompt": 400,
    "invalid_request_error": 400,
    "not_found_error": 404,
    "rate_limit_exceeded": 429,
    "rate_limit_error": 429,
    "server_error": 503,
    "overloaded_error": 503,
}


def add_document(heard: Heard, document: Json) -> bool:
    """Add an answer or an event of any route; True for one that ends its stream.

    Raises:
        ValueError: a streamed response is not what its events told.
    """
    kind = str(document.get("type") or document.get("object") or "")
    if kind == "error":
        return _fail(heard, document["error"]["type"], document["error"]["message"])
    if kind == "response" or kind.startswith("response."):
        return _add_of_response(heard, kind, document)
    if kind.startswith(("message", "content_block")):
        return _add_of_message(heard, kind, document)
    if kind != "ping":
        heard.add(document)
    return False


def _fail(heard: Heard, kind: str, message: str) -> bool:
    heard.message = message
    if heard.status < 400:
        heard.status = FAILURES.get(kind, 500)
    return True


# ── /v1/responses ───────────────────────────────────────────────────────────────────────────


def _add_of_response(heard: Heard, kind: str, document: Json) -> bool:
    choice = heard.choices.setdefault(0, Choice())
    response = document.get("response", document)
    match kind.removeprefix("response."):
        case "output_item.added":
            choice.items.append(_item(document["item"]))
        case "output_text.delta" | "reasoning_text.delta" | "function_call_arguments.delta":
            choice.items[-1][-1] += document["delta"]
        case "failed":
            return _fail(heard, response["error"]["code"], response["error"]["message"])
        case "completed" | "incomplete":
            if choice.items != list(map(_item, response["output"])):
                raise ValueError("the events of a response tell other items than it has")
            _add_response(heard, choice, response)
            return True
        case "response":
            choice.items = list(map(_item, response["output"]))
            _add_response(heard, choice, response)
    return False


def _add_response(heard: Heard, choice: Choice, response: Json) -> None:
    """All but the items of a response that has ended."""
    heard.response_id, heard.output = response["id"], response["output"]
    choice.finish_reason = response["status"]
    choice.token_ids = response["token_ids"]
    choice.logprobs = [
        logprob
        for item in response["output"]
        if item["type"] == "message"
        for part in item["content"]
        for logprob in part["logprobs"]
    ]
    choice.fingerprints = named_versions(response)
    usage = response["usage"]
    heard.num_prompt_tokens = usage["input_tokens"]
    heard.num_cached_tokens = usage["input_tokens_details"]["cached_tokens"]
    heard.num_cached_by_tier = usage["input_tokens_details"].get("cached_tokens_by_tier", {})


def _item(item: Json) -> list[str]:
    """An item of a response as `Choice.items` has it."""
    if item["type"] == "function_call":
        return ["call", item["call_id"], item["name"], item["arguments"]]
    return [item["type"], "".join(part["text"] for part in item["content"])]


def kept_items(heard: Heard) -> list[dict[str, Any]]:
    """The conversation up to the end of a response, as a client would send it.

    A call that was cut off has no arguments.
    """
    items = [*heard.history, *heard.input]
    for told in heard.output:
        item = {name: value for name, value in told.items() if name not in ("id", "status")}
        if item["type"] == "function_call" and not as_object(item["arguments"]):
            item["arguments"] = "{}"
        items.append(item)
    return items


def as_object(text: str) -> str:
    """A JSON object as `json.dumps` writes it, or "" for what is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return ""
    return json.dumps(value) if isinstance(value, dict) else ""


# ── /v1/messages ────────────────────────────────────────────────────────────────────────────


def _add_of_message(heard: Heard, kind: str, document: Json) -> bool:
    choice = heard.choices.setdefault(0, Choice())
    match kind:
        case "message_start":
            _add_message(heard, choice, document["message"])
        case "message":
            choice.items = list(map(_block, document["content"]))
            _add_message(heard, choice, document)
            _end(choice, document)
        case "content_block_start":
            block = document["content_block"]
            choice.items.append([*_block(block)[:-1], ""])
        case "content_block_delta":
            delta = document["delta"]
            pieces = (delta.get(name, "") for name in ("text", "thinking", "partial_json"))
            choice.items[-1][-1] += "".join(pieces)
        case "message_delta":
            _end(choice, document["delta"])
            _add_usage(heard, document["usage"])
    return kind == "message_stop"


def _add_message(heard: Heard, choice: Choice, message: Json) -> None:
    choice.fingerprints = named_versions(message)
    _add_usage(heard, message["usage"])


def _end(choice: Choice, ending: Json) -> None:
    choice.finish_reason, choice.stop_reason = ending["stop_reason"], ending["stop_sequence"]


def _add_usage(heard: Heard, usage: Json) -> None:
    heard.num_cached_tokens = usage["cache_read_input_tokens"]
    heard.num_prompt_tokens = usage["input_tokens"] + heard.num_cached_tokens
    heard.num_told_tokens = usage["output_tokens"]


def _block(block: Json) -> list[str]:
    match block["type"]:
        case "tool_use":
            return ["call", block["id"], block["name"], json.dumps(block["input"])]
        case "thinking":
            return ["reasoning", block["thinking"]]
    return ["message", block["text"]]
