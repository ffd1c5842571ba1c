"""A request waits for its grammar, and others do not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from lora_serve.engine.core.grammars import make_grammar_service
from lora_serve.engine.settings import engine_config
from lora_serve.errors import OverloadedError
from lora_serve.fuzz.oracle.engine import OracleEngine
from lora_serve.fuzz.oracle.grammars import OracleGrammars, toy_constraint
from lora_serve.fuzz.oracle.lone_answers import lone_answer
from lora_serve.messages import AbortRequests
from lora_serve.model_info import ModelInfo
from lora_serve.sampling_params import SamplingParams
from lora_serve.structured_output.service import MaskReply
from lora_serve.structured_outputs import StructuredOutput

HELD = SamplingParams(max_tokens=4, seed=1, structured_outputs=toy_constraint(1, 9))
PROMPT = [20, 21, 22]


class HeldBack(OracleGrammars):
    """Owes the request "held" its replies while `is_held`."""

    is_held = True

    def take(self, wait_seconds: float = 0.0) -> list[MaskReply]:
        if not self.is_held:
            return super().take(wait_seconds)
        held = self._answers.pop("held", None)
        replies = super().take(wait_seconds)
        if held is not None:
            self._answers["held"] = held
        return replies


def test_a_request_that_waits_for_its_grammar_holds_nothing_and_delays_no_other() -> None:
    engine = OracleEngine(grammars_class=HeldBack, max_loras=1)
    for name in ("a", "b"):
        engine.load(name, f"/{name}", name)
    engine.step()
    engine.add("held", PROMPT, params=HELD, lora_name="a")
    engine.step()
    assert engine.kv.usage == 0.0
    assert engine.core.stats().num_awaiting_mask == engine.core.stats().num_waiting == 1
    engine.add("plain", PROMPT, lora_name="b")
    for _ in range(20):
        engine.step()
    assert engine.last("plain").finish_reason is not None
    assert "held" not in engine.outputs
    HeldBack.is_held = False
    engine.run()
    HeldBack.is_held = True
    assert engine.core.stats().num_awaiting_mask == 0
    digest = engine.last("held").adapter
    assert digest is not None
    constraint = HELD.structured_outputs
    right = lone_answer(PROMPT, digest.digest, 4, constraint=constraint)
    assert engine.tokens("held") == right


def test_a_running_request_sits_out_the_steps_that_its_mask_is_late_for() -> None:
    engine = OracleEngine(max_mask_delay=5)
    engine.add("held", PROMPT, params=HELD)
    engine.add("plain", [30, 31], max_tokens=40)
    engine.run()
    chunks = [[chunk.request_id for chunk in step.requests] for step in engine.executor.steps]
    first, last = (
        next(i for i in order if "held" in chunks[i])
        for order in (range(len(chunks)), reversed(range(len(chunks))))
    )
    assert any("held" not in ids and "plain" in ids for ids in chunks[first:last])
    assert engine.tokens("held") == lone_answer(PROMPT, b"", 4, constraint=HELD.structured_outputs)


def test_an_aborted_request_gives_up_the_grammar_that_it_waits_for() -> None:
    engine = OracleEngine(grammars_class=HeldBack)
    engine.add("held", PROMPT, params=HELD)
    assert engine.core.awaits_threads
    engine.core.handle(AbortRequests(("held",)))
    assert not engine.core.awaits_threads
    assert not engine.core.has_requests


def test_a_grammar_is_compiled_at_the_cost_of_its_requests_share() -> None:
    shares = []

    class NotesShares(OracleGrammars):
        def open(self, *answer: Any, share: str = "", **further: Any) -> None:
            shares.append(share)
            super().open(*answer, **further)

    engine = OracleEngine(grammars_class=NotesShares, fair_share="adapter")
    engine.load("a", "/a", "a")
    engine.step()
    engine.add("held", PROMPT, params=HELD, lora_name="a")
    assert shares == ["a"]


def test_requests_of_other_salts_share_no_grammar() -> None:
    """Where API keys are isolated, each has a salt of its own."""
    asked = []

    class NotesConstraints(OracleGrammars):
        def open(self, request_id: str, constraint: StructuredOutput, **further: Any) -> None:
            asked.append(constraint)
            super().open(request_id, constraint, **further)

    engine = OracleEngine(grammars_class=NotesConstraints)
    for name, salt in (("a", "one"), ("b", "another"), ("c", "one"), ("d", "")):
        engine.add(name, PROMPT, params=HELD, salt=salt)
    assert [asked.index(constraint) for constraint in asked] == [0, 1, 0, 3]


class Full(OracleGrammars):
    def open(self, request_id: str, *rest: object, **further: object) -> None:
        raise OverloadedError("1024 requests wait for their grammars")


class Failing(OracleGrammars):
    """Refuses every constraint, or fails at it."""

    is_fault = False
    is_unavailable = False

    def take(self, wait_seconds: float = 0.0) -> list[MaskReply]:
        names: Sequence[str] = [name for name, answer in self._answers.items() if answer.is_owed]
        for name in names:
            self._answers[name].is_owed = False
        reply = MaskReply(
            "", 0, error="odd", is_fault=self.is_fault, is_unavailable=self.is_unavailable
        )
        return [msgspec.structs.replace(reply, request_id=name) for name in names]


class Broken(Failing):
    is_fault = True


class NotStarting(Failing):
    is_unavailable = True


def test_what_comes_of_a_grammar_that_cannot_be_followed_is_told_as_what_it_is() -> None:
    for service, kind in (
        (Full, "OverloadedError"),
        (Failing, "InvalidRequestError"),
        (Broken, "RequestFailedError"),
        (NotStarting, "GrammarUnavailableError"),
    ):
        engine = OracleEngine(grammars_class=service)
        engine.load("a", "/a", "a")
        engine.step()
        engine.add("held", PROMPT, params=HELD, lora_name="a")
        engine.run()
        error = engine.last("held").error
        assert error is not None
        assert error.kind == kind
        assert not any(info.num_leases for info in engine.core.adapters.infos())


def test_the_process_of_grammars_may_start_for_as_long_as_an_engine() -> None:
    model = ModelInfo(b"f", "float32", 300, 8, 64, 16, "cpu")
    for seconds, expected in ((7.0, 7.0), (0.0, math.inf)):
        config = engine_config(model="m", engine_ready_timeout=seconds)
        assert make_grammar_service(config, model)._progress_seconds == expected
