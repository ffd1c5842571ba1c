"""The grammar service of a simulation, in which no request has a grammar."""

from __future__ import annotations

from collections.abc import Sequence

from lora_serve.structured_output.service import MaskReply, NewTokens
from lora_serve.structured_outputs import StructuredOutput


class NoGrammars:
    """A `GrammarService` that is never asked."""

    num_pending = 0

    def open(
        self,
        request_id: str,
        constraint: StructuredOutput,
        *,
        allows_eos: bool = True,
        share: str = "",
    ) -> None:
        raise NotImplementedError("workloads have no grammars")

    def advance(self, new_tokens: Sequence[NewTokens]) -> None:
        assert not new_tokens, "no answer follows a grammar"

    def close(self, request_id: str) -> None:
        """There is nothing to forget."""

    def take(self, wait_seconds: float = 0.0) -> list[MaskReply]:
        return []

    def shut_down(self) -> None:
        """There is no process to end."""
