"""What may follow in an answer that the model can draw, and whether that is one token alone."""

from __future__ import annotations

from collections.abc import Sequence

from lora_serve.bitmask import bitmask_of_flags, flags_of, only_token
from lora_serve.structured_output.backend import Matcher


class Outlooks:
    """Masks of matchers, narrowed to the model's tokens.

    vocab_size: of the model's logits; a tokenizer may know more tokens.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = [i for i in eos_token_ids if i < vocab_size]

    def behind(self, matcher: Matcher, *, allows_eos: bool) -> bytes | None:
        """What may follow what the matcher has, as of `SampleInput.bitmask`; None if nothing may.

        Raises:
            InvalidRequestError: the grammar is too complex here.
        """
        if matcher.is_finished:
            return None
        mask = matcher.bitmask()
        if allows_eos and 8 * len(mask) <= self._vocab_size:
            return mask
        mask = self._narrowed(mask, allows_eos)
        return mask if any(mask) else None

    def forced(self, bitmask: bytes) -> int | None:
        """The one token that may follow, if there is just one and it does not end the answer."""
        token_id = only_token(bitmask)
        return None if token_id is None or self.ends(token_id) else token_id

    def ends(self, token_id: int) -> bool:
        return token_id in self._eos_token_ids

    def _narrowed(self, mask: bytes, allows_eos: bool) -> bytes:
        """The mask without tokens that the model does not have, or that may not be drawn."""
        bits = flags_of(mask)[: self._vocab_size]
        if not allows_eos:
            bits[[i for i in self._eos_token_ids if i < len(bits)]] = 0
        return bitmask_of_flags(bits)
