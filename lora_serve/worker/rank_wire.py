"""A step on its way from the first rank to the others: small, however long its requests are.

The others draw no tokens, so what drawing asks for stays behind, but for what tells how a screen of
the LM head finds greedy ones. Of a block table they get what they have not had: both ends remember
the tables of the last step that had requests.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import msgspec
import numpy as np

from lora_serve.identity import BASE_MODEL, AdapterRef
from lora_serve.prompts import NO_ROWS, PlacedRows
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import (
    AskedOutputs,
    KVLoad,
    PromptScoring,
    SampleInput,
    ScheduledRequest,
    SchedulerOutput,
)

_DRAWN_ELSEWHERE = SampleInput(SamplingParams(), seed=0, position=0)
_GREEDY = SamplingParams(temperature=0.0)

Tables: TypeAlias = "dict[str, list[array[int]]]"  # of each request


class _Request(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A ScheduledRequest. tables: of each group how many ids stay, and those behind them.

    Numbers are int32, side by side. scored: how many rows, and the first. masks: bitmasks of the
    samples, where a screen may find all of them.
    """

    request_id: str
    digest: bytes
    start: int
    token_ids: bytes
    tables: list[tuple[int, bytes]]
    num_samples: int = 0
    scored: tuple[int, int] | None = None
    num_pooled: int = 0
    sums_hidden: bool = False
    embeds: tuple[list[tuple[int, int]], bytes] | None = None
    token_from: int | None = None
    adapter_start: int = 0
    masks: list[bytes | None] | None = None


class _Step(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A SchedulerOutput. has_loads: its kv_loads follow, as a message of their own."""

    step_id: int
    requests: list[_Request]
    drop_adapters: list[bytes]
    add_adapters: list[bytes]
    kv_saves: list[int]
    has_loads: bool


class StepEncoder:
    """The first rank's end; what it gives must reach all others, in this order.

    with_screened: whether the LM head is screened.
    """

    def __init__(self, with_screened: bool = False) -> None:
        self._with_screened = with_screened
        self._encoder = msgspec.msgpack.Encoder()
        self._sent: Tables = {}

    def encode(self, step: SchedulerOutput) -> bytes:
        requests = list(self._requests(step.requests))
        return self._encoder.encode(
            _Step(
                step.step_id,
                requests,
                list(step.drop_adapters),
                list(step.add_adapters),
                list(step.kv_saves),
                bool(step.kv_loads),
            )
        )

    def encode_loads(self, loads: Sequence[KVLoad]) -> bytes:
        return self._encoder.encode([(load.block_id, load.data) for load in loads])

    def _requests(self, requests: Sequence[ScheduledRequest]) -> Iterator[_Request]:
        before: Tables = self._sent
        now: Tables = {}
        for request in requests:
            tables = [_numbers(table) for table in request.block_tables]
            had = before.get(request.request_id, [array("i")] * len(tables))
            kept = [_num_equal(*pair) for pair in zip(had, tables, strict=True)]
            now[request.request_id] = tables
            masks = _masks(request.asked.samples) if self._with_screened else None
            yield _small(request, list(zip(kept, tables, strict=True)), masks)
        if requests:
            self._sent = now


class StepDecoder:
    """Another rank's end."""

    def __init__(self) -> None:
        self._step_decoder = msgspec.msgpack.Decoder(_Step)
        self._load_decoder = msgspec.msgpack.Decoder(list[tuple[int, bytes]])
        self._tables: Tables = {}

    def decode(self, message: bytes | bytearray) -> tuple[SchedulerOutput, bool]:
        """The step without its kv_loads, and whether these follow."""
        step = self._step_decoder.decode(message)
        requests = tuple(map(self._request, step.requests))
        if requests:
            self._tables = {r.request_id: list(map(_numbers, r.block_tables)) for r in requests}
        return (
            SchedulerOutput(
                step.step_id,
                requests,
                tuple(step.drop_adapters),
                tuple(step.add_adapters),
                tuple(step.kv_saves),
            ),
            step.has_loads,
        )

    def decode_loads(self, message: bytes | bytearray) -> tuple[KVLoad, ...]:
        return tuple(KVLoad(*load) for load in self._load_decoder.decode(message))

    def _request(self, small: _Request) -> ScheduledRequest:
        had = self._tables.get(small.request_id, [array("i")] * len(small.tables))
        tables = [old[:kept] for old, (kept, _) in zip(had, small.tables, strict=True)]
        for table, (_, more) in zip(tables, small.tables, strict=True):
            table.frombytes(more)
        scoring = None
        if small.scored is not None:
            num_rows, first_row = small.scored
            scoring = PromptScoring([0] * num_rows, 0, first_row)
        samples = (_DRAWN_ELSEWHERE,) * small.num_samples
        if small.masks is not None:
            samples = tuple(_screened(mask) for mask in small.masks)
        embeds = NO_ROWS
        if small.embeds is not None:
            runs, data = small.embeds
            embeds = PlacedRows(tuple(runs), data)
        return ScheduledRequest(
            small.request_id,
            AdapterRef("", small.digest) if small.digest else BASE_MODEL,
            small.start,
            array("i", small.token_ids),
            tables,
            AskedOutputs(samples, scoring, small.num_pooled, small.sums_hidden),
            embeds,
            small.token_from,
            small.adapter_start,
        )


def _screened(bitmask: bytes | None) -> SampleInput:
    return SampleInput(_GREEDY, seed=0, position=0, bitmask=bitmask)


def _masks(samples: Sequence[SampleInput]) -> list[bytes | None] | None:
    """The bitmasks of samples; None if there is a sample that no screen may find."""
    if all(sample.is_screenable for sample in samples):
        return [sample.bitmask for sample in samples]
    return None


def _small(
    request: ScheduledRequest,
    tables: Sequence[tuple[int, array[int]]],
    masks: list[bytes | None] | None,
) -> _Request:
    asked, scoring, embeds = request.asked, request.asked.scoring, request.embeds
    return _Request(
        request.request_id,
        b"" if request.adapter is BASE_MODEL else request.adapter.digest,
        request.start,
        _numbers(request.token_ids).tobytes(),
        [(kept, table[kept:].tobytes()) for kept, table in tables],
        len(asked.samples),
        None if scoring is None else (len(scoring.target_ids), scoring.first_row),
        asked.num_pooled,
        asked.sums_hidden,
        (list(embeds.runs), bytes(embeds.data)) if embeds.runs else None,
        request.token_from,
        request.adapter_start,
        masks,
    )


def _numbers(values: Sequence[int]) -> array[int]:
    return values if isinstance(values, array) and values.typecode == "i" else array("i", values)


def _num_equal(old: array[int], new: array[int]) -> int:
    """How many of the first numbers are the same."""
    if new[: len(old)] == old:  # the usual case
        return len(old)
    count = min(len(old), len(new))
    differs = np.flatnonzero(np.asarray(old[:count]) != np.asarray(new[:count]))
    return int(differs[0]) if len(differs) else count
