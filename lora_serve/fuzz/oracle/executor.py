"""The oracle: an executor whose KV is a hash of all that shaped it.

In each group of layers a position's content is a hash of (the content before it, as read through
the group's block table, the token, the adapter's digest). Its slot holds that, and the content
before its block, so that blocks which do not follow each other show. All blocks that a position
sees are looked at. A token is drawn from the last contents of all groups. So the right answer is a
pure function of prompt, adapter and settings (`lone_answer`), and any stale, foreign, freed or
unwritten block in sight changes it. Where a mask is given, the token is one that it allows. What
is pooled are the contents themselves.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.fuzz.oracle.grammars import allowed_next
from lora_serve.identity import BASE_MODEL, AdapterRef, NoAdapter
from lora_serve.kv_groups import KVGroup
from lora_serve.messages import NO_RULES, TokenRules
from lora_serve.model_info import ModelInfo
from lora_serve.pooling import PoolingParams
from lora_serve.step import (
    KVLoad,
    ModelRunnerOutput,
    RequestStepOutput,
    ScheduledRequest,
    SchedulerOutput,
    TokenLogprobs,
    accepted,
)
from lora_serve.structured_outputs import ReasoningTokens, StructuredOutput

VOCAB_SIZE = 500
EOS = 7
CONTENT_BYTES = 16
SLOT_BYTES = 2 * CONTENT_BYTES  # its own content, then that before its block
START = b"start".ljust(CONTENT_BYTES)  # what the first position follows
BROKEN = b"no chain".ljust(CONTENT_BYTES)  # what is read through blocks that are not one prefix
UNWRITTEN = b"never written".ljust(SLOT_BYTES)
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


def start_content(group: int) -> bytes:
    """What the first position follows, in each group another: no block passes for one elsewhere."""
    return START[:-1] + bytes([START[-1] + group])


def next_content(before: bytes, token_id: int, embeds_row: bytes, digest: bytes) -> bytes:
    hashed = hashlib.sha256(before + token_id.to_bytes(4, "little") + embeds_row + b"|" + digest)
    return hashed.digest()[:CONTENT_BYTES]


def drawn_token(contents: Sequence[bytes]) -> int:
    """contents: of the last position, in each group."""
    return sum(int.from_bytes(content[:4], "little") for content in contents) % VOCAB_SIZE


def scored_token(token_id: int, contents: Sequence[bytes]) -> TokenLogprobs:
    """A token's prompt logprob. contents: of the position before it, in each group."""
    return TokenLogprobs(token_id, -float(drawn_token(contents)), 1)


def chosen_token(drawn: int, allowed: Sequence[int] | None, banned: Collection[int] = ()) -> int:
    """The token that is drawn where only some are allowed (None allows all), and some banned."""
    if allowed is None and drawn not in banned:
        return drawn
    left = tokens_left(allowed, banned)
    return left[drawn % len(left)]


def tokens_left(allowed: Sequence[int] | None, banned: Collection[int]) -> list[int]:
    among = range(VOCAB_SIZE) if allowed is None else allowed
    return [token_id for token_id in among if token_id not in banned]


def allowed_tokens(bitmask: bytes) -> list[int]:
    """The tokens that a SampleInput.bitmask allows, ascending."""
    bits = np.unpackbits(np.frombuffer(bitmask, np.uint8), bitorder="little")
    return [int(token_id) for token_id in np.flatnonzero(bits)]


def bad_ends(words: Sequence[tuple[int, ...]], answer: Sequence[int]) -> set[int]:
    """What bad words forbid behind an answer."""
    return {word[-1] for word in words if tuple(answer[len(answer) + 1 - len(word) :]) == word[:-1]}


def prompt_contents(
    prompt: Sequence[int],
    digest: bytes,
    embeds_rows: Sequence[bytes] = (),
    num_groups: int = 1,
    invocation: Sequence[int] = (),
) -> Iterator[list[bytes]]:
    """The contents of each position of a prompt, one for each group.

    invocation: the adapter's invocation tokens.
    """
    start = invoked_at(prompt, invocation)
    contents = [start_content(group) for group in range(num_groups)]
    for position, token_id in enumerate(prompt):
        row = embeds_rows[position] if position < len(embeds_rows) else b""
        acting = digest if position >= start else b""
        contents = [next_content(content, token_id, row, acting) for content in contents]
        yield contents


def invoked_at(prompt: Sequence[int], invocation: Sequence[int]) -> int:
    """Where the invocation tokens, which the prompt holds, begin for the last time; 0 for none."""
    return max(_places(prompt, invocation)) if invocation else 0


def holds(prompt: Sequence[int], invocation: Sequence[int]) -> bool:
    return bool(_places(prompt, invocation))


def _places(prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
    places = range(len(prompt) + 1 - len(tokens))
    return [place for place in places if [*prompt[place : place + len(tokens)]] == [*tokens]]


def lone_prompt_logprobs(
    prompt: Sequence[int],
    digest: bytes,
    start: int,
    num_groups: int = 1,
    invocation: Sequence[int] = (),
) -> list[TokenLogprobs]:
    """The prompt logprobs that a cold server, alone with this request, gives."""
    all_contents = list(prompt_contents(prompt, digest, (), num_groups, invocation))
    return [*map(scored_token, prompt[start + 1 :], all_contents[start:])]


def lone_answer(
    prompt: Sequence[int],
    digest: bytes,
    max_tokens: int,
    embeds_rows: Sequence[bytes] = (),
    num_groups: int = 1,
    constraint: StructuredOutput | None = None,
    rules: TokenRules = NO_RULES,
    reasoning: ReasoningTokens | None = None,
    invocation: Sequence[int] = (),
) -> list[int]:
    """What a cold server, alone with this request, answers.

    Where the grammar and the rules leave no token, the answer is what there is by then.
    """
    may_begin = reasoning is not None and not reasoning.is_open
    held: list[int] | None = None if reasoning and reasoning.is_open else []  # None: it reasons
    *_, contents = prompt_contents(prompt, digest, embeds_rows, num_groups, invocation)
    answer: list[int] = []
    while len(answer) < max_tokens:
        allowed = None if rules.allowed is None else allowed_tokens(rules.allowed)
        by_client = allowed
        if constraint is not None and held is not None:
            by_grammar = allowed_next(constraint, held, VOCAB_SIZE, EOS)
            if by_grammar is None:
                break
            allowed = [one for one in by_grammar if allowed is None or one in allowed]
        banned = bad_ends(rules.bad_words, answer)
        if not tokens_left(allowed, banned):
            break
        if reasoning and may_begin and not answer and allowed is not None:
            begins = by_client is None or reasoning.start in by_client
            allowed = sorted({*allowed, *([reasoning.start] if begins else ())})
        answer.append(chosen_token(drawn_token(contents), allowed, banned))
        if answer[-1] == EOS:
            break
        if reasoning and held is None:
            held = [] if answer[-1] == reasoning.end else None
        elif reasoning and may_begin and answer == [reasoning.start]:
            held = None
        elif held is not None:
            held.append(answer[-1])
        contents = [next_content(content, answer[-1], b"", digest) for content in contents]
    return answer


def lone_pooled(
    prompt: Sequence[int],
    digest: bytes,
    pooling: PoolingParams,
    embeds_rows: Sequence[bytes] = (),
    num_groups: int = 1,
    invocation: Sequence[int] = (),
) -> bytes:
    """What a cold server, alone with this request, makes an embedding of."""
    rows = list(prompt_contents(prompt, digest, embeds_rows, num_groups, invocation))
    return hidden_sums(rows) if pooling.needs_all_rows else b"".join(rows[-1])


def hidden_sums(rows: Sequence[Sequence[bytes]]) -> bytes:
    """The sums over the rows' contents, taken as whole numbers."""
    numbers = [np.frombuffer(b"".join(contents), np.uint32) for contents in rows]
    return np.sum(numbers, axis=0, dtype=np.int64).tobytes()


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
        return RequestStepOutput(
            accepted(drawn, request.draft_token_ids),
            prompt_logprobs=scored,
            pooled=self._pooled(by_token, asked.num_pooled),
            hidden_sums=hidden_sums(by_token) if asked.sums_hidden else b"",
        )

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
