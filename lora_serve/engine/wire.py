"""What both processes say to each other beside `messages.py`: encoders, decoders, and errors.

The one rule: an error arrives as what it was: its class, its words and its attributes.
"""

from __future__ import annotations

import msgspec

from lora_serve import errors
from lora_serve.errors import LoraServeError
from lora_serve.messages import EngineMessage, EngineReply, ErrorInfo


def encoder() -> msgspec.msgpack.Encoder:
    """Return an encoder of messages and replies; one thread may use it at a time."""
    return msgspec.msgpack.Encoder()


def message_decoder() -> msgspec.msgpack.Decoder[EngineMessage]:
    return msgspec.msgpack.Decoder(EngineMessage)


def reply_decoder() -> msgspec.msgpack.Decoder[EngineReply]:
    return msgspec.msgpack.Decoder(EngineReply)


def error_info(error: LoraServeError) -> ErrorInfo:
    """Put an error into a message; `error_from_info` takes it out again."""
    return ErrorInfo(type(error).__name__, str(error), msgspec.json.encode(vars(error)))


def error_from_info(info: ErrorInfo) -> LoraServeError:
    """The error that `info` describes: of its own class, with its own words and attributes."""
    kind = getattr(errors, info.kind)
    assert issubclass(kind, LoraServeError), f"{info.kind} is no error of ours"
    error: LoraServeError = kind.__new__(kind)  # not through __init__, which would compose again
    error.args = (info.message,)
    vars(error).update(msgspec.json.decode(info.attributes))
    return error
