"""How many drafts a request's next step may verify, by how many were accepted lately.

A row that verifies a draft costs time, whether or not the draft is right. So where none is right
the request drafts half as many, and after the second time in a row nothing for a while, each time
for twice as long. A right one lets it draft as many as it may.

How likely a draft is right is what lately was, later drafts counting for more.
"""

from __future__ import annotations

_MOST_SKIPPED = 128  # tokens between two tries
_FIRST_ACCEPTANCE = 0.8  # before any was tried
_WEIGHT = 0.3  # of the newest draft
_TOKENS_A_TRY = 32  # that one row more costs 3 % of, at most


class DraftPace:
    """A request's own. most: drafts a step.

    acceptance: how likely a draft is right, if those before it in its step are.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._wanted = most
        self._num_failures = 0
        self._rests_until = 0  # tokens of the answer
        self._tried_at = 0
        self.acceptance = _FIRST_ACCEPTANCE

    def num_wanted(self, num_output_tokens: int) -> int:
        """How many drafts may be tried behind so many tokens of the answer."""
        return 0 if num_output_tokens < self._rests_until else self._wanted

    def is_due(self, num_output_tokens: int) -> bool:
        """Whether it is time to try a draft that promises little, since none was tried lately."""
        return num_output_tokens - self._tried_at >= _TOKENS_A_TRY

    def verified(self, num_drafts: int, num_accepted: int, num_output_tokens: int) -> None:
        """Take in what became of drafts; num_output_tokens: with the tokens that were drawn."""
        self._tried_at = num_output_tokens
        self.acceptance = 1 - (1 - self.acceptance) * (1 - _WEIGHT) ** num_accepted
        if num_accepted < num_drafts:
            self.acceptance *= 1 - _WEIGHT
        if num_accepted:
            self._wanted, self._num_failures = self._most, 0
        else:
            self._wanted = max(1, self._wanted // 2)
            num_skipped = min(2**self._num_failures - 1, _MOST_SKIPPED)
            self._num_failures += 1
            self._rests_until = num_output_tokens + num_skipped
