"""Chats with embeddings among their texts: a template writes marks in the place of these."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from lora_serve.errors import InvalidRequestError
from lora_serve.prompts import EmbedsPrompt, MixedPrompt, Prompt, TokensPrompt
from lora_serve.server.engine_api import Tokenizer

_MARK_END = "end"


def drawn_marks(count: int) -> list[str]:
    """Marks that no text holds which a client has sent by now: what they begin with is drawn."""
    begin = f"embeds{secrets.token_hex(16)}n"
    return [f"{begin}{index}{_MARK_END}" for index in range(count)]


def pieces_between(text: str, marks: Sequence[str]) -> list[str]:
    """The pieces of a rendered text before, between and behind its marks.

    Raises:
        InvalidRequestError: the template has not written each of them once, in their order.
    """
    if not marks:
        return [text]
    first, *others = text.split(marks[0].removesuffix(f"0{_MARK_END}"))
    ends = [f"{index}{_MARK_END}" for index in range(len(marks))]
    if len(others) != len(marks) or not all(map(str.startswith, others, ends)):
        raise InvalidRequestError(
            "the chat template leaves out, repeats or moves the content of a message with "
            "prompt_embeds; send embeddings in messages of the user, or use /v1/completions",
            "messages",
        )
    return [first, *map(str.removeprefix, others, ends)]


def encode_pieces(tokenizer: Tokenizer, pieces: Sequence[str]) -> list[list[int]]:
    """The tokens of each piece. Behind embeddings a text goes on, as behind a special token.

    Some tokenizers begin each text with a space that they would not write there.
    """
    first, *others = pieces
    encoded = [tokenizer.encode(first, False)]
    special = tokenizer.special_token("eos") or ""
    special_id = tokenizer.special_token_id(special)
    for piece in others:
        token_ids = tokenizer.encode(special + piece, False)
        if special_id is None or token_ids[:1] != [special_id]:
            encoded.append(tokenizer.encode(piece, False))
        else:
            encoded.append(token_ids[1:])
    return encoded


def mixed_prompt(pieces: Sequence[Sequence[int]], rows: Sequence[EmbedsPrompt]) -> Prompt:
    """The prompt of pieces of tokens, with rows between each two."""
    first, *others = pieces
    if not rows:
        return TokensPrompt(tuple(first))
    pairs = zip(rows, others, strict=True)
    return MixedPrompt.of([first, *(part for pair in pairs for part in pair)])
