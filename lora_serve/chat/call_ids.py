"""Names tool calls: the same calls in answers to the same prompt have the same ids.

A conversation grows, so no two prompts of it are equal, and no two of its calls have one id.
"""

from __future__ import annotations

import hashlib
import string
from array import array
from collections.abc import Sequence

_ALPHABET = string.digits + string.ascii_letters
_NUM_SHORT_CHARS = 9


class CallIds:
    """Ids of the calls in all answers to one prompt.

    are_short: nine letters and digits, since Mistral's templates take no others.
    """

    def __init__(self, prompt_token_ids: Sequence[int], *, are_short: bool) -> None:
        self._prompt_token_ids = prompt_token_ids
        self._are_short = are_short

    def id_of(self, choice: int, index: int, name: str) -> str:
        digest = hashlib.sha256(array("q", self._prompt_token_ids).tobytes())
        digest.update(f"\0{choice}\0{index}\0{name}".encode())
        if not self._are_short:
            return f"call_{digest.hexdigest()[:24]}"
        number, letters = int.from_bytes(digest.digest()), ""
        while len(letters) < _NUM_SHORT_CHARS:
            number, letter = divmod(number, len(_ALPHABET))
            letters += _ALPHABET[letter]
        return letters
