"""What the process of grammars makes of messages, without the process."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from typing import Any
from unittest.mock import Mock

import pytest

from lora_serve.errors import InvalidRequestError
from lora_serve.structured_output import llguidance
from lora_serve.structured_output.answers import Answers, GrammarCache
from lora_serve.structured_output.at_work import AtWork
from lora_serve.structured_output.grammar_server import _MAX_REFUSALS, Compiled, GrammarServer
from lora_serve.structured_output.llguidance import LLGuidanceBackend
from lora_serve.structured_output.service import MaskReply, NewTokens
from lora_serve.structured_output.trial import Outcome
from lora_serve.structured_output.wire import Advance, Close, Open
from lora_serve.structured_outputs import StructuredOutput
from lora_serve.text.tokenizer import Tokenizer
from tests.structured_output.conftest import vocabulary_of

CONSTRAINT = StructuredOutput.of(regex="a+")


def test_tokens_that_come_before_an_answer_goes_on_in_a_new_process_are_followed() -> None:
    cache = GrammarCache(1, 1)
    grammar = Mock()
    grammar.matcher.return_value = Mock(is_finished=False, bitmask=lambda: b"1")
    cache.put(CONSTRAINT, grammar, 1)
    server = GrammarServer(Mock(), [Mock()], Answers(cache, 8, ()), cache, AtWork())
    server._take_in(Open("one", CONSTRAINT, True, (1, 2)))
    server._take_in(Advance((NewTokens("one", (3,)),)))
    reply = server._compute(server._turns.take())
    assert reply is not None
    assert reply.num_tokens == 3
    assert not server._turns


class Trial:
    """Gives these outcomes, one after the other, when it may."""

    def __init__(self, *outcomes: Outcome) -> None:
        self.outcomes = list(outcomes)
        self.begun: list[StructuredOutput] = []
        self.may_end = threading.Event()
        self.is_cancelled = False

    def begin(self, constraint: StructuredOutput) -> None:
        self.begun.append(constraint)

    def outcome(self) -> Outcome:
        assert self.may_end.wait(10.0)
        return Outcome(is_cancelled=True) if self.is_cancelled else self.outcomes.pop(0)

    def cancel(self) -> None:
        self.is_cancelled = True
        self.may_end.set()


def server_with(trial: Trial) -> GrammarServer:
    grammar = Mock()
    grammar.matcher.return_value = Mock(is_finished=False, bitmask=lambda: b"1")
    cache = GrammarCache(8, 8)
    answers = Answers(cache, 8, ())
    library = Mock(compile=Mock(return_value=grammar))
    return GrammarServer(library, [trial], answers, cache, AtWork())  # type: ignore[list-item]


def compiled(server: GrammarServer) -> list[MaskReply]:
    message = server.inbox.get(timeout=10.0)
    assert isinstance(message, Compiled)
    return server._take_in(message)


def test_a_trial_that_failed_for_another_reason_is_tried_again() -> None:
    trial = Trial(Outcome(failure="no process can be started"), Outcome())
    trial.may_end.set()
    server = server_with(trial)
    server._take_in(Open("one", CONSTRAINT, True))
    assert compiled(server) == []
    reply = server._compute(server._turns.take())
    assert reply is not None
    assert reply.bitmask == b"1"


def test_what_failed_for_another_reason_is_refused_for_now_and_not_for_good() -> None:
    failed = Outcome(failure="no process can be started")
    trial = Trial(failed, failed, Outcome())
    trial.may_end.set()
    server = server_with(trial)
    server._take_in(Open("one", CONSTRAINT, True))
    (reply,) = compiled(server)
    assert reply.is_unavailable
    assert "no process can be started (tried twice); retry later" in reply.error
    server._take_in(Open("two", CONSTRAINT, True))
    assert compiled(server) == []
    assert server._turns


def test_a_constraint_that_no_answer_waits_for_is_cancelled_and_the_next_one_begins() -> None:
    trial = Trial(Outcome())
    server = server_with(trial)
    others = [StructuredOutput("regex", f"{number}") for number in range(2)]
    server._take_in(Open("one", CONSTRAINT, True))
    for number, other in enumerate(others):
        server._take_in(Open(f"{number}", other, True))
    server._take_in(Close("0"))
    server._take_in(Close("one"))
    assert trial.is_cancelled
    trial.is_cancelled = False
    trial.outcomes.insert(0, Outcome(is_cancelled=True))
    assert compiled(server) == []
    assert trial.begun == [CONSTRAINT, others[1]]


@pytest.mark.parametrize("outcome", [Outcome(num_bytes=1), Outcome(error="refused")])
def test_what_is_known_of_a_constraint_saves_no_time_to_other_scopes(outcome: Outcome) -> None:
    """Neither its grammar nor its refusal; and no other scope has to wait for the one at work."""
    trial = Trial(outcome, outcome)
    trial.may_end.set()
    server = server_with(trial)
    mine, others = (StructuredOutput("regex", "a+", scope=scope) for scope in ("me", "others"))
    server._take_in(Open("mine", mine, True))
    server._take_in(Open("others", others, True))
    compiled(server)
    compiled(server)
    assert trial.begun == [mine, others]
    server._take_in(Open("again", mine, True))
    assert trial.begun == [mine, others], "its own scope finds it"


class OneGrammar:
    """A compiled grammar of which can be told whether anything still holds it."""

    def matcher(self) -> Mock:
        return Mock(is_finished=False, bitmask=lambda: b"1", grammar=self)


NUM_SCHEMAS, MOST_KEPT = 2 * _MAX_REFUSALS + 12, 16


def num_kept_after_many_schemas() -> tuple[int, int]:
    """How many grammars and refusals a process keeps of NUM_SCHEMAS, every second of them bad."""
    alive = weakref.WeakSet[OneGrammar]()

    def compile(constraint: StructuredOutput) -> OneGrammar:
        alive.add(grammar := OneGrammar())
        return grammar

    bad, good = Outcome(error="refused"), Outcome(num_bytes=1)
    trial = Trial(*(bad if number % 2 else good for number in range(NUM_SCHEMAS)))
    trial.may_end.set()
    cache = GrammarCache(MOST_KEPT, 2**20)
    library: Any = Mock(spec=["compile"], compile=compile)
    trials: Any = [trial]
    server = GrammarServer(library, trials, Answers(cache, 8, ()), cache, AtWork())
    for number in range(NUM_SCHEMAS):
        server._take_in(Open(f"{number}", StructuredOutput("regex", f"{number}"), True))
        if not compiled(server):
            server._compute(server._turns.take())
            server._take_in(Advance((NewTokens(f"{number}", (1,)),)))
            server._compute(server._turns.take())
        server._take_in(Close(f"{number}"))
    gc.collect()
    return len(alive), len(server._refusals)


def test_of_many_schemas_no_more_is_kept_than_the_bounds_allow() -> None:
    assert num_kept_after_many_schemas() == (MOST_KEPT, _MAX_REFUSALS)


def test_a_cache_without_a_bound_would_be_seen_by_that(monkeypatch: pytest.MonkeyPatch) -> None:
    def put(cache: GrammarCache, constraint: StructuredOutput, *entry: Any) -> None:
        cache._entries[constraint] = entry

    monkeypatch.setattr(GrammarCache, "put", put)
    assert num_kept_after_many_schemas()[0] == NUM_SCHEMAS // 2


def test_answers_that_are_not_forgotten_would_be_seen_by_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Answers, "end", lambda answers, request_id: None)
    assert num_kept_after_many_schemas()[0] == NUM_SCHEMAS // 2


AMBIGUOUS = StructuredOutput.of(regex="[a-z]*(a[a-z]{12}0|b[a-z]{13}1)")


def test_no_answer_fails_by_what_others_have_found_out_of_its_grammar(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(llguidance._LIMITS, "max_lexer_states", 120)
    library = LLGuidanceBackend(vocabulary_of(tokenizer))
    cache = GrammarCache(8, 2**20)
    answers = Answers(cache, tokenizer.vocab_size, tokenizer.eos_token_ids)
    server = GrammarServer(library, [Mock()], answers, cache, AtWork())
    cache.put(AMBIGUOUS, library.compile(AMBIGUOUS), 1)
    num_alone = 0
    for seed in range(12):
        name, rng, alone = f"{seed}", random.Random(seed), library.compile(AMBIGUOUS).matcher()
        if cache.get(AMBIGUOUS) is None:
            cache.put(AMBIGUOUS, library.compile(AMBIGUOUS), 1)
        server._take_in(Open(name, AMBIGUOUS, True))
        for _ in range(12):
            reply = server._compute(server._turns.take())
            if reply is None:
                num_alone += 1
                assert server._take_in(server.inbox.get(timeout=10.0)) == []  # type: ignore[arg-type]
                reply = server._compute(server._turns.take())
            assert reply is not None
            assert reply.error == ""
            assert (reply.bitmask or b"").rstrip(b"\0") == alone.bitmask().rstrip(b"\0")
            token_id = rng.choice(a_and_b_in(reply.bitmask, tokenizer))
            alone.accept(token_id)
            server._take_in(Advance((NewTokens(name, (token_id,)),)))
        server._take_in(Close(name))
    assert 0 < num_alone < 12


def test_an_answer_that_fails_alone_is_refused() -> None:
    trial = Trial(Outcome())
    trial.may_end.set()
    server = server_with(trial)
    fails = Mock(side_effect=InvalidRequestError("too complex", "structured_outputs"))
    server._backend.compile.return_value.matcher.return_value.bitmask = fails  # type: ignore
    server._take_in(Open("one", CONSTRAINT, True))
    assert compiled(server) == []
    assert server._compute(server._turns.take()) is None
    assert server._take_in(server.inbox.get(timeout=10.0)) == []  # type: ignore[arg-type]
    reply = server._compute(server._turns.take())
    assert reply is not None
    assert reply.error == "too complex"
    assert fails.call_count == 2


def test_an_answer_that_is_closed_gets_no_grammar_of_its_own() -> None:
    trial = Trial(Outcome())
    trial.may_end.set()
    server = server_with(trial)
    server._take_in(Open("one", CONSTRAINT, True))
    assert compiled(server) == []
    server._backend.compile.return_value.matcher.return_value.bitmask = Mock(  # type: ignore
        side_effect=InvalidRequestError("too complex", "structured_outputs")
    )
    assert server._compute(server._turns.take()) is None
    server._take_in(Close("one"))
    server._compilers.shutdown()
    while not server.inbox.empty():
        assert server._take_in(server.inbox.get()) == []  # type: ignore[arg-type]
    assert not server._turns


def a_and_b_in(mask: bytes | None, tokenizer: Tokenizer) -> list[int]:
    number = int.from_bytes(mask or b"", "little")
    token_ids = (token_id for token_id in range(number.bit_length()) if number >> token_id & 1)
    return [token_id for token_id in token_ids if tokenizer.token_bytes(token_id) in (b"a", b"b")]
