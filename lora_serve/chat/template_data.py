"""What templates see of a conversation: plain values, as models' templates expect them.

Whatever else a caller of `LLM.chat` has in its messages is rebuilt of these, or only named: objects
have methods that no sandbox knows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

Message = dict[object, object]

_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of it; templates read the first


def plain_messages(messages: Sequence[Mapping[str, object]]) -> list[Message]:
    """Messages without fields that are None, and with reasoning under the names it goes by."""
    return [
        _with_reasoning({plain(key): plain(each) for key, each in message.items()})
        for message in messages
    ]


def plain(value: object) -> object:
    """The value, made of nothing but None, numbers, texts, lists, tuples and dicts."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):  # of a subclass, which may have more methods
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if isinstance(value, list):
        return list(map(plain, value))
    return _plain_object(value)


def _plain_object(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    dumped = getattr(value, "model_dump", None)  # of pydantic
    if callable(dumped):
        return plain(dumped())
    if getattr(value, "shape", None) == () and callable(item := getattr(value, "item", None)):
        return plain(item())  # a number of numpy's or torch's
    return f"<{type(value).__name__}>"


def _with_reasoning(message: Message) -> Message:
    given = {key: value for key, value in message.items() if value is not None}
    found = (given[name] for name in _REASONING if name in given)
    reasoning = next(found, None)
    if reasoning is None:
        return given
    return {"thinking": reasoning, **given, "reasoning_content": reasoning}
