"""Bad words as the engine is told of them: as token ids."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from lora_serve.errors import InvalidRequestError

KEPT = 16  # the latest requests' words: all prompts of a body have the same


class BadWordEncoder:
    """Turns words into the sequences of tokens that an answer must not have."""

    def __init__(self, encode: Callable[[str, bool], list[int]]) -> None:
        """encode: from (text, whether special tokens are added) to token ids."""
        self._encode = encode
        self.token_ids = lru_cache(KEPT)(self._token_ids)

    def _token_ids(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """The sequences of all words.

        Raises:
            InvalidRequestError: a word is no token.
        """
        sequences = [sequence for word in words for sequence in self._sequences(word)]
        return tuple(dict.fromkeys(sequences))

    def _sequences(self, word: str) -> list[tuple[int, ...]]:
        """The word as it begins a text, and as it stands behind another one.

        The latter counts where it is as long and begins with another token, as in vLLM: elsewhere
        the space is a token of its own, and the first form forbids what follows it.
        """
        text = word.lstrip()
        first, behind_space = (tuple(self._encode(one, False)) for one in (text, f" {text}"))
        if not first:
            raise InvalidRequestError(
                f"bad_words has {word!r}, which is no token; leave it out", "bad_words"
            )
        is_another = len(first) == len(behind_space) and first[0] != behind_space[0]
        return [first, behind_space] if is_another else [first]
