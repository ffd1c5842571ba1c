from __future__ import annotations

import asyncio
import time

import pytest

from lora_serve.server.http.paced_input import MAX_PIECE_BYTES, PacedInput, ParsingTurns

HEAD = b"GET / HTTP/1.1\r\n\r\n"


class FakeTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.reads = True
        self.is_lost = False

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def is_closing(self) -> bool:
        return self.is_lost


@pytest.fixture
def transport() -> FakeTransport:
    return FakeTransport()


async def until_parsed(transport: FakeTransport) -> int:
    """How often the loop turned before reading went on."""
    num_turns = 0
    while not transport.reads:
        await asyncio.sleep(0)
        num_turns += 1
    return num_turns


async def test_what_comes_at_once_is_parsed_in_pieces_and_the_loop_turns_in_between(
    transport: FakeTransport,
) -> None:
    pieces: list[bytes] = []

    def parse(piece: bytes) -> None:
        pieces.append(piece)
        time.sleep(0.002)

    data = b"1\r\n \r\n" * 10_000
    PacedInput(transport, parse, ParsingTurns()).receive(data)
    assert len(pieces) == 1, "the rest waits for its turn"
    assert await until_parsed(transport) >= len(data) // MAX_PIECE_BYTES
    assert max(map(len, pieces)) <= MAX_PIECE_BYTES
    assert b"".join(pieces) == data


async def test_a_small_body_waits_for_no_turn_of_the_loop(transport: FakeTransport) -> None:
    """Which may bring tokens of all others first."""
    pieces: list[bytes] = []
    paced = PacedInput(transport, pieces.append, ParsingTurns())
    paced.receive(HEAD + b" " * MAX_PIECE_BYTES)
    assert pieces == [HEAD, b" " * MAX_PIECE_BYTES]
    assert transport.reads
    paced.receive(HEAD + b" " * (MAX_PIECE_BYTES + 1))
    assert pieces[2:] == [HEAD], "a larger one is parsed in turns"
    await until_parsed(transport)
    paced.receive(HEAD + b"{}" + HEAD)
    assert pieces[-1] == HEAD, "and so is what holds the next request"


async def test_connections_share_one_turn(transport: FakeTransport) -> None:
    turns, parsed = ParsingTurns(), list[int]()

    def paced(number: int) -> PacedInput:
        def parse(_: bytes) -> None:
            parsed.append(number)
            time.sleep(0.002)

        return PacedInput(FakeTransport(), parse, turns)

    for number in range(8):
        paced(number).receive(b" " * 3 * MAX_PIECE_BYTES)
    parsed.clear()
    await asyncio.sleep(0)
    assert parsed == [0], "one piece took the turn's time"
    while len(parsed) < 16:
        await asyncio.sleep(0)
    assert parsed == [*range(8), *range(8)]


async def test_each_piece_holds_one_head(transport: FakeTransport) -> None:
    pieces: list[bytes] = []
    PacedInput(transport, pieces.append, ParsingTurns()).receive(HEAD * 5 + HEAD[:7])
    await until_parsed(transport)
    assert pieces == [HEAD] * 5 + [HEAD[:7]]


async def test_a_parser_that_pauses_is_given_nothing_until_it_goes_on(
    transport: FakeTransport,
) -> None:
    pieces: list[bytes] = []

    def parse(piece: bytes) -> None:
        pieces.append(piece)
        paced.pause_reading()

    paced = PacedInput(transport, parse, ParsingTurns())
    paced.receive(HEAD * 3)
    for count in (1, 2, 3):
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(pieces) == count
        assert not transport.reads
        paced.resume_reading()
    assert transport.reads


async def test_a_closed_connection_is_parsed_no_further(transport: FakeTransport) -> None:
    pieces: list[bytes] = []
    PacedInput(transport, pieces.append, ParsingTurns()).receive(HEAD * 3)
    transport.is_lost = True
    for _ in range(5):
        await asyncio.sleep(0)
    assert pieces == [HEAD]
