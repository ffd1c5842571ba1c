"""Guesses of a second, smaller model: plans what it computes, and in which KV blocks of its own.

The model runs where steps run. A step's request may carry a `DraftChunk`; what came of it is
offered when the next step is planned. A request's guesses hang on its own tokens alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from lora_serve.identity import AdapterRef, Everything
from lora_serve.model_info import DraftModelInfo
from lora_serve.speculation.base import Origin
from lora_serve.step import DraftChunk, num_same

_IDLE_STEPS = 32  # without a part in which a request's KV may be dropped for another's


class DraftModelRequest:
    """How far the draft model has come with one request.

    num_computed: the request's first tokens, of which it has KV. fed: its own guesses behind them,
        of which it has KV, too.
    block_ids: none of them is another request's. last_step: in which it had a part.
    """

    def __init__(self) -> None:
        self.num_computed = 0
        self.fed: Sequence[int] = ()
        self.block_ids: list[int] = []
        self.last_step = 0
        self._drafts: Sequence[int] = ()
        self._num_before = 0  # how many tokens the drafts stand behind
        self._num_tokens = 0

    def take_in(self, token_ids: Sequence[int], most: int) -> int:
        self._num_tokens = len(token_ids)
        return 0

    def draft(self, most: int) -> Sequence[int]:
        return self._drafts[:most] if self._num_before == self._num_tokens else ()

    def num_lacking(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens it has no KV of; those that it guessed right it has."""
        num_right = num_same(token_ids[self.num_computed :], self.fed)
        self.num_computed += num_right
        num_lacking = len(token_ids) - self.num_computed
        self.fed = () if num_lacking else self.fed[num_right:]
        return num_lacking

    def guessed(self, token_ids: Sequence[int], drafts: Sequence[int]) -> None:
        """Take in guesses of what follows these tokens; it has KV of all that stands before one."""
        assert self.block_ids, "the draft model guessed without KV"
        self.num_computed, self.fed = len(token_ids), drafts[:-1]
        self._drafts, self._num_before = drafts, len(token_ids)

    def start_over(self) -> list[int]:
        """Forget all; returns the blocks that it had."""
        block_ids, self.block_ids = self.block_ids, []
        self.num_computed, self.fed, self._drafts = 0, (), ()
        return block_ids


class DraftModelDrafter:
    """Gives requests KV blocks of the draft model while there are any.

    Without a block for a request, those of one that had no part lately are taken; else it gets no
    drafts.
    """

    def __init__(self, model: DraftModelInfo) -> None:
        self._num_groups = model.num_groups
        self._max_model_len = model.max_model_len
        self._block_size = model.block_size
        self._num_unused = model.num_blocks  # those that no request has had yet, the last ones
        self._num_blocks = model.num_blocks
        self._free: list[int] = []
        self._holding: OrderedDict[DraftModelRequest, None] = OrderedDict()  # least recent first
        self._step = 0

    @property
    def num_free_blocks(self) -> int:
        return self._num_unused + len(self._free)

    def begin(self, origin: Origin, num_prompt_tokens: int) -> DraftModelRequest:
        return DraftModelRequest()

    def learn(self, origin: Origin, answer: Sequence[int]) -> None:
        pass

    def work(self) -> None:
        """Count the steps that are planned."""
        self._step += 1

    def forget(self, lora_name: str | Everything, but: AdapterRef | None = None) -> None:
        pass

    def plan(
        self,
        request: DraftModelRequest,
        token_ids: Sequence[int],
        most_drawn: int,
        most_drafts: int,
        most_tokens: int,
    ) -> DraftChunk | None:
        """Plan a request's part of a step; None where there is nothing to do, or no block.

        Args:
            request: of this drafter.
            token_ids: all that are known.
            most_drawn: that may stand behind these when the step has been run.
            most_drafts: to guess behind those; 0 only catches up with token_ids.
            most_tokens: of token_ids to compute now. Nothing is guessed while some are left.
        """
        num_lacking = request.num_lacking(token_ids)
        num_now = min(num_lacking, most_tokens)
        num_drafts = min(most_drafts, self._max_model_len - len(token_ids) - most_drawn)
        if num_drafts < 0 or (num_now < num_lacking and not num_now):
            return None  # it is too long for the draft model, or has to wait
        if num_now < num_lacking:
            num_drafts = 0
        start = request.num_computed
        end = start + num_now
        if not (num_now or num_drafts):
            return None
        if not self._hold(request, end + most_drawn + num_drafts - 1 if num_drafts else end):
            return None
        request.num_computed = end
        return DraftChunk(
            start, token_ids[start:end], self._block_tables(request), num_drafts, request.fed
        )

    def release(self, request: DraftModelRequest) -> None:
        """Drop the request's KV."""
        self._holding.pop(request, None)
        self._free += request.start_over()

    def check_invariants(self) -> None:
        """Assert what must hold between steps."""
        held = [block for request in self._holding for block in request.block_ids]
        blocks = sorted([*held, *self._free])
        assert blocks == [*range(self._num_made)], "the draft model's blocks"

    @property
    def _num_made(self) -> int:
        return self._num_blocks - self._num_unused

    def _hold(self, request: DraftModelRequest, num_tokens: int) -> bool:
        """Give a request blocks for so many tokens; False if there are too few."""
        request.last_step = self._step
        self._holding[request] = None
        self._holding.move_to_end(request)
        num_more = -(-num_tokens // self._block_size) - len(request.block_ids)
        while self.num_free_blocks < num_more:
            oldest = next(iter(self._holding))
            if self._step - oldest.last_step < _IDLE_STEPS:
                return False
            self.release(oldest)
        request.block_ids += [self._take() for _ in range(num_more)]
        return True

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        self._num_unused -= 1
        return self._num_made - 1

    def _block_tables(self, request: DraftModelRequest) -> list[list[int]]:
        num_groups = self._num_groups
        return [
            [num_groups * block_id + group for block_id in request.block_ids]
            for group in range(num_groups)
        ]
