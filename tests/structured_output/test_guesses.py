"""Guesses are followed when nothing else is to be done, and hold nobody up."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest

from lora_serve.structured_output import client, grammar_server, wire
from lora_serve.structured_output.answers import Answers, GrammarCache
from lora_serve.structured_output.at_work import AtWork
from lora_serve.structured_output.client import GrammarProcess
from lora_serve.structured_output.grammar_server import GrammarServer
from lora_serve.structured_output.guesses import FollowedGuess, GuessQueue
from lora_serve.structured_output.service import MaskReply, NewTokens
from lora_serve.structured_output.wire import Advance, Close, Open
from lora_serve.structured_outputs import NO_GUESS, Guess, StructuredOutput

CONSTRAINTS = [StructuredOutput.of(regex=text) for text in ("a+", "b+")]


def grammar(takes_seconds: float = 0.0) -> Mock:
    """Allows tokens 4 and 5 everywhere; a copy, which follows guesses, takes its time."""

    def spend(token_id: int) -> None:
        end = time.thread_time() + takes_seconds
        while time.thread_time() < end:
            pass

    def matcher(accept: Any) -> Mock:
        found = Mock(is_finished=False, bitmask=lambda: b"\x30", accept=accept)
        found.fork = lambda: matcher(spend)
        return found

    return Mock(matcher=lambda: matcher(lambda token_id: None))


def server_of(*grammars: Mock) -> GrammarServer:
    """A server that follows an answer of each grammar, the requests "0", "1" and so on."""
    cache = GrammarCache(8, 8)
    answers = Answers(cache, 8, (), max_drafts=8)
    server = GrammarServer(Mock(), [Mock()], answers, cache, AtWork())
    for number, one in enumerate(grammars):
        cache.put(CONSTRAINTS[number], one, 1)
        server._take_in(Open(f"{number}", CONSTRAINTS[number], True))
        server._compute(server._turns.take())
    return server


def asked(server: GrammarServer, *request_ids: str) -> None:
    guess = Guess((4, 5, 4, 7), 8)
    new_tokens = tuple(NewTokens(request_id, (4,), guess) for request_id in request_ids)
    server._take_in(Advance(new_tokens))


def drafts_of(reply: MaskReply) -> tuple[int, ...]:
    return () if reply.drafts is None else reply.drafts.token_ids


def test_all_masks_that_are_owed_come_before_guesses_are_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for limit in ("GUESS_SECONDS", "SLOW_SECONDS"):  # however slow the machine is
        monkeypatch.setattr(grammar_server, limit, 60.0)
    server = server_of(grammar(), grammar())
    asked(server, "0", "1")
    assert server._work() == []
    replies = {reply.request_id: reply for reply in server._work()}
    assert [drafts_of(replies[name]) for name in ("0", "1")] == [(4, 5, 4)] * 2
    assert server.inbox.empty()


def test_a_guess_is_not_followed_while_something_is_asked_for() -> None:
    server = server_of(grammar())
    asked(server, "0")
    server.inbox.put(Open("1", CONSTRAINTS[0], True))
    (reply,) = server._work()
    assert (reply.bitmask, drafts_of(reply)) == (b"\x30", ())


def test_an_answer_whose_guess_takes_all_the_time_is_guessed_for_ever_more_seldom() -> None:
    server = server_of(grammar(takes_seconds=0.003))
    nums_drafts = []
    for _ in range(15):
        asked(server, "0")
        nums_drafts.append(len(drafts_of(*server._work())))
    assert nums_drafts == [1, *[0] * 4, 1, *[0] * 8, 1]


def test_guesses_are_followed_for_so_long_and_a_token_of_each_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guess_queue, looks = GuessQueue(AtWork()), iter((0.0, 0.0, 0.0, 0.1, 0.2, 2.0))
    guesses = [Mock(spec=FollowedGuess, reply=Mock(request_id=name)) for name in "ab"]
    for guess in guesses:
        guess.go_on.return_value = True
        guess_queue.put(guess)
    monkeypatch.setattr(time, "monotonic", lambda: next(looks))
    assert len(guess_queue.follow(lambda: True, 1.0)) == 2
    assert [guess.go_on.call_count for guess in guesses] in ([2, 1], [2, 2])


def test_an_answer_that_a_process_ended_at_is_not_guessed_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a guess does to a process must not be the answer's fault."""
    process, sent = GrammarProcess(Mock()), list[Advance]()
    monkeypatch.setattr(process, "_send", sent.append)
    for name, num_deaths in (("sound", 0), ("suspect", 1)):
        process._answers[name] = client._Answer(CONSTRAINTS[0], True, "", num_deaths=num_deaths)
    guess = Guess((4,), 1)
    process.advance([NewTokens(name, (1,), guess) for name in ("sound", "suspect")])
    assert [new.guess for new in sent[0].new_tokens] == [guess, NO_GUESS]


def test_a_reply_with_a_guess_comes_when_the_answer_whose_turn_was_next_has_left() -> None:
    """Nothing else is asked for that would bring the reply."""
    server, came = server_of(grammar(), grammar()), queue.SimpleQueue[bytes]()
    advance = server._answers.advance

    def leaving(request_id: str, token_ids: Sequence[int]) -> MaskReply:
        server.inbox.put(Close("1"))
        return advance(request_id, token_ids)

    server._answers.advance = leaving  # type: ignore[method-assign]
    asked(server, "0", "1")
    threading.Thread(target=server.run, args=[Mock(send_bytes=came.put)], daemon=True).start()
    came.get(timeout=10.0)  # the process is ready
    (reply,) = wire.reply_decoder().decode(came.get(timeout=10.0))
    server.inbox.put(None)
    assert (reply.request_id, drafts_of(reply)) == ("0", (4, 5, 4))


def test_a_guess_of_an_answer_that_has_left_is_not_followed() -> None:
    server = server_of(grammar(takes_seconds=0.003), grammar())
    asked(server, "0", "1")
    server._work()
    server._take_in(Close("0"))
    assert [reply.request_id for reply in server._work()] == ["1"]
    assert not server._guesses._rests
