"""The oracle: an executor whose KV is a hash of all that shaped it.

In each group of layers a position's content is a hash of (the content before it, as read through
the group's block table, the token, the adapter's digest). Its slot holds that, and the content
before its block, so that blocks which do not follow each other show. All blocks that a position
sees are looked at. A token is drawn from the last contents of all groups. So the right answer is a
pure function of prompt, adapter and settings (`lone_answers.py`), and any stale, foreign, freed or
unwritten block in sight changes it. Where a mask is given, the token is one that it allows. What
is pooled are the contents themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.fuzz.oracle.content import (
    BROKEN,
    CONTENT_BYTES,
    SLOT_BYTES,
    UNWRITTEN,
    VOCAB_SIZE,
    allowed_tokens,
    chosen_token,
    drawn_token,
    hidden_sums,
    next_content,
    scored_token,
    start_content,
)
from lora_serve.fuzz.oracle.draft_model import OracleDraftModel
from lora_serve.identity import BASE_MODEL, AdapterRef, NoAdapter
from lora_serve.kv_groups import KVGroup
from lora_serve.model_info import ModelInfo
from lora_serve.step import (
    KVLoad,
    ModelRunnerOutput,
    RequestStepOutput,
    ScheduledRequest,
    SchedulerOutput,
    TokenLogprobs,
    accepted,
)

ONE_GROUP = (KVGroup(),)


def oracle_model(
    num_blocks: int, block_size: int = 16, groups: tuple[KVGroup, ...] = ONE_GROUP
) -> ModelInfo:
    return ModelInfo(
        fingerprint=b"m" * 32,
        dtype="float32",
        vocab_size=VOCAB_SIZE,
        hidden_size=4,
        max_model_len=4096,
        num_blocks=num_blocks,
        kernels="oracle",
        kv_groups=groups,
        kv_block_bytes=len(groups) * block_size * SLOT_BYTES,
        kv_layout=b"l" * 32,
    )


class OracleExecutor:
    """An Executor with real bookkeeping: it refuses adapters it was not given.

    A step runs as late as possible, when it is collected: plans made meanwhile must not matter. Its
    slots hold all of the KV; a rank of several has its own share of each.
    """

    _unwritten = UNWRITTEN

    def __init__(
        self, block_size: int, row_bytes: int = 8, groups: Sequence[KVGroup] = ONE_GROUP
    ) -> None:
        self._block_size = block_size
        self._groups = groups
        self._row_bytes = row_bytes
        self._slots: dict[tuple[int, int], bytes] = {}
        self._prepared: set[bytes] = set()
        self._active: set[bytes] = set()
        self._submitted: deque[SchedulerOutput] = deque()
        self._draft_model = OracleDraftModel(block_size, len(groups))
        self._drawn: tuple[RequestStepOutput, ...] = ()  # by the last step with requests
        self.num_computed_tokens = 0
        self.steps: list[SchedulerOutput] = []

    def load(self) -> ModelInfo:
        raise NotImplementedError("tests make their own ModelInfo")

    def prepare_adapter(self, checkpoint: AdapterCheckpoint) -> None:
        self._prepared.add(checkpoint.digest)

    def submit(self, step: SchedulerOutput) -> None:
        assert len(self._submitted) < 2, "a third step before the first was collected"
        self._submitted.append(step)

    def collect(self) -> ModelRunnerOutput:
        return self.execute(self._submitted.popleft())

    def close(self) -> None:
        """Do nothing: nothing was started."""

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run a step, all of its parts in their order."""
        self.steps.append(step)
        self._active -= set(step.drop_adapters)
        for digest in step.add_adapters:
            assert digest in self._prepared, "an adapter was added that was never prepared"
            self._active.add(digest)
        num_groups, block_ids = len(self._groups), step.kv_saves
        saved = tuple(
            b"".join(map(self.gather, block_ids[first : first + num_groups]))
            for first in range(0, len(block_ids), num_groups)
        )
        for load in step.kv_loads:
            self.scatter(load)
        # All reads of a step see the KV as it was before the step, as on a device.
        written: dict[tuple[int, int], bytes] = {}
        outputs = tuple(self._run(request, written) for request in step.requests)
        self._slots.update(written)
        self._drawn = outputs or self._drawn
        return ModelRunnerOutput(step.step_id, outputs, saved)

    def gather(self, block_id: int) -> bytes:
        slots = ((block_id, offset) for offset in range(self._block_size))
        return b"".join(self._slots.get(slot, self._unwritten) for slot in slots)

    def scatter(self, load: KVLoad) -> None:
        size = len(self._unwritten)
        for offset in range(self._block_size):
            slot = load.data[offset * size : (offset + 1) * size]
            self._slots[load.block_id, offset] = bytes(slot)

    def _run(
        self, request: ScheduledRequest, written: dict[tuple[int, int], bytes]
    ) -> RequestStepOutput:
        assert len(request.block_tables) == len(self._groups), "a group has no block table"
        by_group = [self._run_group(group, request, written) for group in range(len(self._groups))]
        by_token = list(zip(*by_group, strict=True))
        self.num_computed_tokens += request.num_tokens
        asked = request.asked
        sampled = by_token[len(by_token) - len(asked.samples) :]
        drawn = [
            chosen_token(
                drawn_token(contents),
                None if sample.bitmask is None else allowed_tokens(sample.bitmask),
                sample.banned_token_ids,
            )
            for contents, sample in zip(sampled, asked.samples, strict=True)
        ]
        scored: tuple[TokenLogprobs, ...] = ()
        if asked.scoring is not None:
            rows = by_token[asked.scoring.first_row :]
            scored = tuple(map(scored_token, asked.scoring.target_ids, rows))
        token_ids = accepted(drawn, request.draft_token_ids)
        return RequestStepOutput(
            token_ids,
            prompt_logprobs=scored,
            pooled=self._pooled(by_token, asked.num_pooled),
            hidden_sums=hidden_sums(by_token) if asked.sums_hidden else b"",
            next_drafts=self._next_drafts(request, token_ids),
        )

    def _next_drafts(
        self, request: ScheduledRequest, token_ids: tuple[int, ...]
    ) -> tuple[int, ...]:
        """What the draft model guesses behind the tokens that the step draws."""
        if request.draft_chunk is None:
            return ()
        if request.token_from is not None:
            token_ids = (*self._drawn[request.token_from].token_ids, *token_ids)
        return self._draft_model.guess(request.draft_chunk, token_ids)

    def _pooled(self, contents: Sequence[tuple[bytes, ...]], num_pooled: int) -> bytes:
        return b"".join(map(b"".join, contents[len(contents) - num_pooled :]))

    def _run_group(
        self, group: int, request: ScheduledRequest, written: dict[tuple[int, int], bytes]
    ) -> list[bytes]:
        """Write a group's KV of the request's tokens; the content of each."""
        digest = self._digest(request.adapter)
        content, before_block = self._read(group, request)
        rows = self._rows(request)
        contents = []
        for index, token_id in enumerate(self._token_ids(request)):
            position = request.start + index
            if position % self._block_size == 0:
                before_block = content
            acting = digest if position >= request.adapter_start else b""
            content = next_content(content, token_id, rows.get(index, b""), acting)
            slot = self._slot(group, request, position)
            written_now = self._own(content + before_block)
            assert written.setdefault(slot, written_now) == written_now, "two write one slot"
            contents.append(content)
        return self._whole(list(map(self._own, contents)))

    def _own(self, contents: bytes) -> bytes:
        """This rank's share of a content, or of a slot's two."""
        return contents

    def _whole(self, parts: list[bytes]) -> list[bytes]:
        """All ranks' shares put together; one rank's share is all."""
        return parts

    def _rows(self, request: ScheduledRequest) -> dict[int, bytes]:
        """The embedding rows among the request's tokens, by their place."""
        places = [place + i for place, count in request.embeds.runs for i in range(count)]
        data, size = request.embeds.data, self._row_bytes
        assert len(data) == len(places) * size, "as many rows as places"
        return {place: data[i * size : (i + 1) * size] for i, place in enumerate(places)}

    def _token_ids(self, request: ScheduledRequest) -> Sequence[int]:
        if request.token_from is None:
            return request.token_ids
        drawn = self._drawn[request.token_from].token_ids
        assert len(drawn) == 1, f"{request.request_id} waits for a token, {len(drawn)} were drawn"
        return drawn

    def _read(self, group: int, request: ScheduledRequest) -> tuple[bytes, bytes]:
        """The content before the chunk, and that before the block it is in.

        Every block that the chunk's first token sees is looked at, so that one foreign block among
        them shows. What a window hides is not: the first block in sight may follow anything.
        """
        size, last = self._block_size, request.start - 1
        first = self._groups[group].first_seen(request.start, size)
        content = before_block = start_content(group) if first == 0 else None
        seen = (*range(first * size + size - 1, last, size), last) if last >= 0 else ()
        places = (self._slot(group, request, position) for position in seen)
        for slot in self._whole([self._slots.get(place, self._unwritten) for place in places]):
            if content is not None and slot[CONTENT_BYTES:] != content:
                return BROKEN, BROKEN
            content, before_block = slot[:CONTENT_BYTES], slot[CONTENT_BYTES:]
        assert content is not None, "a window hides the last token"
        assert before_block is not None, "a window hides the last token"
        return content, before_block

    def _slot(self, group: int, request: ScheduledRequest, position: int) -> tuple[int, int]:
        size = self._block_size
        return request.block_tables[group][position // size], position % size

    def _digest(self, adapter: AdapterRef | NoAdapter) -> bytes:
        if adapter is BASE_MODEL:
            return b""
        assert adapter.digest in self._active, f"{adapter.name} runs without its weights"
        return adapter.digest


# Of the block size, the bytes of an embedding row, and the layers' groups.
MakeExecutor = Callable[[int, int, Sequence[KVGroup]], OracleExecutor]
