"""The answers that are compared, as clients see them, whole or as far as they came.

Floats are kept as JSON had them, which is to the bit. Knows nothing of what is right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Choice:
    """fingerprints: what `system_fingerprint` said of the versions that gave it.

    logprobs: one entry a token, in the words of its route. embedding: base64, instead of a text;
        of all tokens one after the other, where all are asked for.
    items: ["reasoning", text], ["call", id, name, arguments] and, where the route has messages
        among them, ["message", text]; a chat's reasoning comes first, its calls last.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: object = None
    embedding: str = ""
    items: list[list[str]] = field(default_factory=list)
    fingerprints: set[str] = field(default_factory=set)

    @property
    def is_aborted(self) -> bool:
        """Whether a call ended it, as chats and completions say, or as responses do."""
        return self.finish_reason in ("abort", "cancelled")

    def add(self, piece: Mapping[str, Any]) -> None:
        """Add one choice of an answer, or of a chunk, of either route."""
        message = piece.get("message") or piece.get("delta") or {}
        self.text += piece.get("text") or message.get("content") or ""
        self._add_parsed(message)
        self.token_ids.extend(piece.get("token_ids") or ())
        self.logprobs.extend(_logprobs(piece.get("logprobs")))
        self.embedding += piece.get("embedding") or piece.get("data") or ""
        self.finish_reason = piece.get("finish_reason") or self.finish_reason
        if piece.get("stop_reason") is not None:
            self.stop_reason = piece["stop_reason"]

    def _add_parsed(self, message: Mapping[str, Any]) -> None:
        """Add the reasoning and the calls of a chat's message, or of a piece of it."""
        if reasoning := message.get("reasoning"):
            if not (self.items and self.items[0][0] == "reasoning"):
                self.items.insert(0, ["reasoning", ""])
            self.items[0][-1] += reasoning
        for call in message.get("tool_calls") or ():
            function = call["function"]
            if "name" in function:
                self.items.append(["call", call["id"], function["name"], ""])
            calls = [item for item in self.items if item[0] == "call"]
            calls[call.get("index", -1)][-1] += function["arguments"]

    def difference(self, right: Choice, *, is_part: bool) -> str:
        """How this differs from the right answer, or "". is_part: it may end earlier."""
        if self.embedding != right.embedding and not (is_part and not self.embedding):
            return f"the embedding is {self.embedding[:40]}…, not {right.embedding[:40]}…"
        count = len(self.token_ids)
        if self.token_ids != right.token_ids[:count]:
            at = _first_difference(self.token_ids, right.token_ids)
            return f"token {at} is {self.token_ids[at]}, not {_at(right.token_ids, at)}"
        if self.logprobs != right.logprobs[: len(self.logprobs)]:
            at = _first_difference(self.logprobs, right.logprobs)
            return f"logprob {at} is {self.logprobs[at]}, not {_at(right.logprobs, at)}"
        if is_part:
            is_start = right.text.startswith(self.text)
            if is_start and not _begin(self.items, right.items):
                return f"items {self.items} are no start of {right.items}"
            return "" if is_start else f"text {self.text!r} is no start of {right.text!r}"
        for name in ("token_ids", "logprobs", "text", "items", "finish_reason", "stop_reason"):
            if getattr(self, name) != getattr(right, name):
                return f"{name} is {getattr(self, name)!r}, not {getattr(right, name)!r}"
        return ""


@dataclass(slots=True)
class Heard:
    """What a client got for a request. Times are of one clock. status: 0 if none came.

    status, message: of the answer, or of the error that ended it. is_whole: it ended as it should.
    has_left: the client hung up first. num_told_tokens: as the usage says, of a route that tells
        no tokens. response_id, input, output: of a response. history: the items that it continued.
    continues_anothers: it was to continue a response of another API key.
    """

    begin: float
    end: float = 0.0
    status: int = 0
    message: str = ""
    is_whole: bool = False
    has_left: bool = False
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_cached_by_tier: dict[str, int] = field(default_factory=dict)
    prompt_logprobs: object = None
    choices: dict[int, Choice] = field(default_factory=dict)
    num_told_tokens: int = 0
    response_id: str = ""
    output: list[dict[str, Any]] = field(default_factory=list)
    input: list[dict[str, Any]] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    api_key: int = 0
    continues_anothers: bool = False

    def add(self, document: Mapping[str, Any]) -> None:
        """Add an answer, a chunk of one, or an error in either's place."""
        if "error" in document:
            error = document["error"]
            self.status, self.message = error["code"], error["message"]
            return
        for piece in document["choices"] if "choices" in document else document["data"]:
            choice = self.choices.setdefault(piece["index"], Choice())
            choice.add(piece)
            choice.fingerprints |= named_versions(document)
            self.prompt_logprobs = piece.get("prompt_logprobs") or self.prompt_logprobs
        self.prompt_logprobs = document.get("prompt_logprobs") or self.prompt_logprobs
        if usage := document.get("usage"):
            details = usage["prompt_tokens_details"]
            self.num_prompt_tokens = usage["prompt_tokens"]
            self.num_cached_tokens = details["cached_tokens"]
            self.num_cached_by_tier = details.get("cached_tokens_by_tier", {})

    @property
    def is_aborted(self) -> bool:
        """Whether a call ended a choice of it; or all of it, where an error says so."""
        is_refused = "was aborted by a call" in self.message
        return is_refused or any(choice.is_aborted for choice in self.choices.values())

    @property
    def num_tokens(self) -> int:
        listed = sum(len(choice.token_ids) for choice in self.choices.values())
        return listed or self.num_told_tokens

    @property
    def fingerprints(self) -> set[str]:
        return set().union(*(choice.fingerprints for choice in self.choices.values()))


@dataclass(frozen=True, slots=True)
class Called:
    """The outcome of an operator's call. Times as in `Heard`."""

    begin: float
    end: float
    status: int = 200
    message: str = ""

    @property
    def is_done(self) -> bool:
        return self.status == 200


@dataclass(frozen=True, slots=True)
class CalledAtOnce:
    """The outcomes of concurrent calls, in the order in which the trace lists the calls."""

    outcomes: tuple[Called, ...]


def named_versions(document: Mapping[str, Any]) -> set[str]:
    """The versions that an answer names: none if it was aborted before it began."""
    return set(filter(None, document["system_fingerprint"].split(",")))


def _logprobs(logprobs: Mapping[str, Any] | None) -> list[object]:
    if logprobs is None:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    columns = (logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
    return [list(row) for row in zip(*columns, strict=True)]


def _begin(these: Sequence[list[str]], those: Sequence[list[str]]) -> bool:
    """Whether the items are the first of those, the last one maybe cut.

    A response that is aborted before anything is told of it ends with an empty message.
    """
    if not these or these == [["message", ""]]:
        return True
    *ended, (*named, text) = these
    return (
        len(these) <= len(those)
        and ended == list(those[: len(ended)])
        and named == those[len(ended)][:-1]
        and those[len(ended)][-1].startswith(text)
    )


def _first_difference(these: Sequence[object], those: Sequence[object]) -> int:
    pairs = zip(these, those, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(these), len(those)))


def _at(values: Sequence[object], index: int) -> object:
    return values[index] if index < len(values) else "the end"
