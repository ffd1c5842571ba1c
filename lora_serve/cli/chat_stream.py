"""One streamed answer: its text as it comes, and how long it took.

A chat is asked for as such; a model without a chat template continues text instead.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from operator import index
from typing import Any

from lora_serve.cli.remote import MAX_TOLD_CHARS, Json, Remote, RemoteError, UnreachableError

CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"
END = "[DONE]"
NO_TEMPLATE = ("no chat template", "must provide a chat template")  # this server's words, vLLM's
LEAST_SECONDS = 0.02  # what came in less than that came at once: it tells no speed

Show = Callable[[str, bool], None]  # a piece of text, and whether it is reasoning


@dataclass(slots=True)
class Answer:
    """What has come so far. Times are in seconds; the counts are those of the server's usage."""

    text: str = ""
    finish_reason: str | None = None
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int | None = None
    first_token_seconds: float | None = None
    seconds: float = 0.0
    num_pieces: int = field(default=0, repr=False)

    @property
    def tokens_per_second(self) -> float | None:
        """Speed of the tokens after the first; None if there were none, or they came at once."""
        num_tokens = (self.num_tokens or self.num_pieces) - 1
        if self.first_token_seconds is None or num_tokens < 1:
            return None
        took = self.seconds - self.first_token_seconds
        return num_tokens / took if took >= LEAST_SECONDS else None


def ask(remote: Remote, path: str, body: Json, answer: Answer, show: Show) -> None:
    """Fill `answer` while it comes. Ctrl-C leaves what has come; the server then stops, too.

    Raises:
        RemoteError: the server refuses, or fails in the middle.
        UnreachableError: it does not answer.
    """
    begun = time.perf_counter()
    whole = body | {"stream": True, "stream_options": {"include_usage": True}}
    try:
        with remote.streamed(path, whole) as lines:
            for event in _events(lines):
                for text, is_reasoning in _pieces(event, answer, time.perf_counter() - begun):
                    show(text, is_reasoning)
    finally:
        answer.seconds = time.perf_counter() - begun if answer.seconds == 0 else answer.seconds


def has_no_template(error: RemoteError) -> bool:
    """Whether a chat was refused because the model has no chat template."""
    return error.status == 400 and any(words in str(error) for words in NO_TEMPLATE)


def _events(lines: Iterable[str]) -> Iterator[Json]:
    for line in lines:
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == END:
            continue
        try:
            event = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise UnreachableError(f"the server sent no JSON: {data[:80]}") from error
        if isinstance(event, dict) and event.get("error"):
            fault = event["error"]
            message = fault.get("message", fault) if isinstance(fault, dict) else fault
            raise RemoteError(str(message)[:MAX_TOLD_CHARS], HTTPStatus.OK)
        yield event


def _pieces(event: Json, answer: Answer, seconds: float) -> list[tuple[str, bool]]:
    """What an event adds to the answer, and whether that is reasoning.

    Raises:
        UnreachableError: it is no chunk of an answer.
    """
    try:
        return list(_taken(event, answer, seconds))
    except (AttributeError, TypeError) as error:
        raise UnreachableError(
            f"the server sent what is no chunk of an answer: {str(event)[:80]}"
        ) from error


def _taken(event: Json, answer: Answer, seconds: float) -> Iterator[tuple[str, bool]]:
    if usage := event.get("usage"):
        answer.num_tokens = index(usage.get("completion_tokens", 0))
        answer.num_prompt_tokens = index(usage.get("prompt_tokens", 0))
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        answer.num_cached_tokens = None if cached is None else index(cached)
    for choice in event.get("choices") or ():
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        yield from _texts(choice, answer, seconds)


def _texts(choice: dict[str, Any], answer: Answer, seconds: float) -> Iterator[tuple[str, bool]]:
    delta = choice.get("delta", choice)
    reasoning = _whole(delta.get("reasoning_content") or delta.get("reasoning") or "")
    text = _whole(delta.get("content", delta.get("text")) or "")
    if not (reasoning or text):
        return
    if answer.first_token_seconds is None:
        answer.first_token_seconds = seconds
    answer.seconds = seconds
    answer.num_pieces += 1
    if reasoning:
        yield reasoning, True
    if text:
        answer.text += text
        yield text, False


def _whole(text: str) -> str:
    """The text without halves of pairs, which JSON can hold and no output can."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
