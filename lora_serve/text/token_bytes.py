"""The bytes that one token stands for, also where they are only a part of a character.

Vocabularies write such bytes in one of two ways: one letter for each byte (byte-level BPE, since
GPT-2), or the byte's number as in "<0xE4>" (SentencePiece's byte fallback).
"""

from __future__ import annotations

import re
from types import MappingProxyType

_NUMBERED = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_letters() -> dict[str, int]:
    """Printable Latin-1 stands for itself; the other bytes, in order, for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    letters.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return letters


_BYTE_OF_LETTER = MappingProxyType(_byte_letters())


def token_bytes(token: str, text: str) -> bytes:
    """Bytes of a token.

    Args:
        token: as the vocabulary writes it. text: as it is decoded, with U+FFFD for parts.
    """
    if "\ufffd" not in text:
        return text.encode()
    numbered = _NUMBERED.fullmatch(token)
    if numbered:
        return bytes([int(numbered[1], 16)])
    if all(letter in _BYTE_OF_LETTER for letter in token):
        return bytes(_BYTE_OF_LETTER[letter] for letter in token)
    return text.encode()
