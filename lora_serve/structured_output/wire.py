"""What the engine's process and the grammars' process say to each other, as msgpack.

The grammars' process answers with lists of replies. An empty one says that it has got on: it has
loaded its tokenizer, or has compiled or refused a grammar.
"""

from __future__ import annotations

import msgspec

from lora_serve.config.log import LogConfig
from lora_serve.structured_output.service import MaskReply, NewTokens
from lora_serve.structured_outputs import StructuredOutput


class GrammarSettings(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message. tokenizer, revision, model: as of `text.tokenizer.Tokenizer`.

    vocab_size: of the model's logits. max_grammars, max_cache_bytes: of compiled grammars that are
    kept. compile_seconds, max_grammar_bytes: what compiling one may take. max_drafts: tokens,
    forced or guessed, that are looked at ahead of each answer. log: of the process.
    """

    backend: str
    tokenizer: str
    revision: str | None
    model: str
    vocab_size: int
    compile_seconds: float
    max_grammars: int = 64
    max_cache_bytes: int = 512 * 2**20
    max_grammar_bytes: int = 128 * 2**20
    max_drafts: int = 0
    log: LogConfig = LogConfig()


class Open(msgspec.Struct, frozen=True, tag=True):
    """Begin an answer, of which an earlier process may have been told token_ids.

    share: at whose cost its grammar is compiled.
    """

    request_id: str
    constraint: StructuredOutput
    allows_eos: bool
    token_ids: tuple[int, ...] = ()
    share: str = ""


class Advance(msgspec.Struct, frozen=True, tag=True):
    new_tokens: tuple[NewTokens, ...]


class Close(msgspec.Struct, frozen=True, tag=True):
    request_id: str


GrammarMessage = GrammarSettings | Open | Advance | Close


def message_decoder() -> msgspec.msgpack.Decoder[GrammarMessage]:
    return msgspec.msgpack.Decoder(GrammarMessage)


def reply_decoder() -> msgspec.msgpack.Decoder[list[MaskReply]]:
    return msgspec.msgpack.Decoder(list[MaskReply])
