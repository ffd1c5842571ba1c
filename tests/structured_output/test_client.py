"""The process of grammars, and what hostile constraints can do to it: nothing to anyone else."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from lora_serve.config import LogConfig
from lora_serve.structured_output import client
from lora_serve.structured_output.client import GrammarProcess
from lora_serve.structured_output.service import MaskReply, NewTokens
from lora_serve.structured_outputs import StructuredOutput
from lora_serve.text.tokenizer import Tokenizer
from tests.structured_output.conftest import grammar_settings

DEADLINE = 60.0
YES_OR_NO = StructuredOutput.of(choice=["yes", "no"])


def replies(process: GrammarProcess, count: int = 1) -> dict[str, MaskReply]:
    came: list[MaskReply] = []
    deadline = time.monotonic() + DEADLINE
    while len(came) < count and time.monotonic() < deadline:
        came += process.take(0.1)
    return {reply.request_id: reply for reply in came}


def outcome(process: GrammarProcess, constraint: StructuredOutput) -> MaskReply:
    process.open("one", constraint)
    reply = replies(process)["one"]
    process.close("one")
    return reply


def allowed(reply: MaskReply) -> list[int]:
    bits = np.unpackbits(np.frombuffer(reply.bitmask or b"", np.uint8), bitorder="little")
    return [int(token_id) for token_id in np.flatnonzero(bits)]


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def test_a_mask_allows_the_tokens_that_may_follow_and_no_other(
    grammars: GrammarProcess, tokenizer: Tokenizer
) -> None:
    first = {tokenizer.decode([token_id]) for token_id in allowed(outcome(grammars, YES_OR_NO))}
    assert "y" in first
    assert all("yes".startswith(text) or "no".startswith(text) for text in first)


def follow(process: GrammarProcess, token_ids: Sequence[int], name: str = "one") -> MaskReply:
    reply = None
    for token_id in token_ids:
        process.advance([NewTokens(name, (token_id,))])
        reply = replies(process)[name]
    assert reply is not None
    return reply


def test_end_tokens_are_allowed_where_the_grammar_may_end_and_nowhere_else(
    grammars: GrammarProcess, tokenizer: Tokenizer
) -> None:
    end = set(tokenizer.eos_token_ids)
    process = grammars
    process.open("one", StructuredOutput.of(regex="a{1,3}"))
    assert not end & set(allowed(replies(process)["one"]))
    (letter,) = tokenizer.encode("a", add_special_tokens=False)
    assert end <= set(allowed(follow(process, [letter])))
    assert follow(process, [letter, letter]).is_finished
    process.close("one")


def test_where_end_tokens_are_ignored_an_answer_is_finished_by_its_last_token(
    grammars: GrammarProcess, tokenizer: Tokenizer
) -> None:
    process = grammars
    process.open("one", StructuredOutput.of(regex="a{1,2}"), allows_eos=False)
    (letter,) = tokenizer.encode("a", add_special_tokens=False)
    replies(process)
    after_one = allowed(follow(process, [letter]))
    assert after_one == [letter]
    assert follow(process, [letter]).is_finished
    process.close("one")


def test_a_token_that_was_not_allowed_ends_the_answer_with_an_error(
    grammars: GrammarProcess, tokenizer: Tokenizer
) -> None:
    grammars.open("one", YES_OR_NO)
    replies(grammars)
    (letter,) = tokenizer.encode("x", add_special_tokens=False)
    assert "structured_outputs" in follow(grammars, [letter]).error
    grammars.close("one")
    assert outcome(grammars, YES_OR_NO).bitmask


def test_the_order_of_properties_is_that_of_the_schema(
    grammars: GrammarProcess, tokenizer: Tokenizer
) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"b": {"const": 1}, "a": {"const": 2}},
    }
    schema |= {"required": ["b", "a"], "additionalProperties": False}
    grammars.open("one", StructuredOutput.of(json=schema))
    replies(grammars)
    text = '{"b":1,"a":2}'
    assert follow(grammars, tokenizer.encode(text, add_special_tokens=False)).is_finished
    grammars.close("one")


HOSTILE = {
    "deep": StructuredOutput("json", '{"items":' * 5000 + "{}" + "}" * 5000),
    "nested": StructuredOutput.of(json=nested(200)),
    "endless $ref": StructuredOutput.of(json={"$ref": "#"}),
    "cyclic $ref": StructuredOutput.of(
        json={"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {}]}}}
    ),
    "$ref to a file": StructuredOutput.of(json={"$ref": "file:///etc/passwd"}),
    "$ref to a server": StructuredOutput.of(json={"$ref": "http://localhost/a.json"}),
    "too large an enum": StructuredOutput.of(
        json={
            "allOf": [
                {"oneOf": [{"type": "object", "properties": {f"{i}{j}": {}}} for j in range(4)]}
                for i in range(12)
            ]
        }
    ),
    "hours of arithmetic": StructuredOutput.of(json={"type": "integer", "multipleOf": 1000003}),
    "catastrophic patterns": StructuredOutput.of(
        json={"allOf": [{"type": "string", "pattern": f"a{{1,{50 + i}}}b*{i}"} for i in range(200)]}
    ),
    "catastrophic regex": StructuredOutput("regex", "(a+)+$" * 50),
    "deep regex": StructuredOutput("regex", "(" * 30_000 + "a" + ")" * 30_000),
    "deep grammar": StructuredOutput("grammar", "start: " + "(" * 9000 + '"x"' + ")" * 9000),
    "a grammar that overflows the stack": StructuredOutput(
        "grammar",
        "start: r0\n" + "".join(f"r{i}: r{i + 1} | r{i + 1}\n" for i in range(3000)) + 'r3000: "y"',
    ),
    "intersections": StructuredOutput(
        "grammar", "start: A\nA: " + " & ".join(f"/(.|\\n)*a{i}.*/" for i in range(30))
    ),
    "nothing matches": StructuredOutput("json", "false"),
    "no schema": StructuredOutput.of(json={"type": "nonsense"}),
    "no JSON": StructuredOutput("json", "{"),
    "half a character": StructuredOutput("regex", "\\ud800"),
    "no grammar": StructuredOutput("grammar", "this is none"),
    "no tag": StructuredOutput.of(structural_tag={"type": "structural_tag"}),
    "a keyword that cannot be enforced": StructuredOutput.of(
        json={"type": "array", "uniqueItems": True}
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_constraint_is_refused_in_time_and_harms_no_other(
    name: str, grammars: GrammarProcess
) -> None:
    outcome(grammars, YES_OR_NO)
    grammars.open("bystander", YES_OR_NO)
    replies(grammars)
    begin = time.monotonic()
    reply = outcome(grammars, HOSTILE[name])
    assert reply.error.startswith("structured_outputs: ")
    assert not reply.is_fault
    assert len(reply.error) < 400
    assert time.monotonic() - begin < 6.0
    grammars.advance([NewTokens("bystander", (allowed_of(grammars),))])
    assert not replies(grammars)["bystander"].error
    grammars.close("bystander")


def allowed_of(process: GrammarProcess) -> int:
    return allowed(outcome(process, YES_OR_NO))[0]


def test_a_lenient_schema_leaves_out_what_cannot_be_enforced(grammars: GrammarProcess) -> None:
    schema = json.dumps({"type": "array", "uniqueItems": True})
    assert outcome(grammars, StructuredOutput("json", schema, is_strict=False)).bitmask


def test_others_get_their_masks_while_a_hostile_constraint_compiles(
    grammars: GrammarProcess,
) -> None:
    outcome(grammars, YES_OR_NO)
    hostile = {"type": "integer", "multipleOf": 1000033}
    grammars.open("hostile", StructuredOutput.of(json=hostile))
    begin = time.monotonic()
    assert outcome(grammars, YES_OR_NO).bitmask
    assert time.monotonic() - begin < 1.0
    assert replies(grammars)["hostile"].error
    grammars.close("hostile")


def test_answers_go_on_where_they_were_when_the_process_dies(
    grammars: GrammarProcess, tokenizer: Tokenizer
) -> None:
    letters = tokenizer.encode("aaabb", add_special_tokens=False)
    grammars.open("one", StructuredOutput.of(regex="a{3}b{3}"))
    replies(grammars)
    follow(grammars, letters[:-1])
    assert grammars._process is not None
    os.kill(grammars._process.pid, signal.SIGKILL)
    reply = follow(grammars, letters[-1:])
    assert tokenizer.decode(allowed(reply)) == "b"
    grammars.close("one")


def test_an_answer_that_ends_the_process_again_and_again_is_refused(
    grammars: GrammarProcess, tokenizer: Tokenizer
) -> None:
    for name in ("other", "one"):
        grammars.open(name, YES_OR_NO)
        replies(grammars)
    (letter,) = tokenizer.encode("y", add_special_tokens=False)
    assert grammars._process is not None
    os.kill(grammars._process.pid, signal.SIGSTOP)  # it must owe the mask when it dies
    grammars.advance([NewTokens("one", (letter,))])
    came: list[MaskReply] = []
    for _ in range(2):
        assert grammars._process is not None
        os.kill(grammars._process.pid, signal.SIGKILL)
        grammars._process.wait()
        came += grammars.take(1.0)
    assert [(reply.request_id, reply.is_fault) for reply in came] == [("one", True)]
    grammars.advance([NewTokens("other", (letter,))])
    assert replies(grammars)["other"].bitmask
    for name in ("other", "one"):
        grammars.close(name)


def test_the_process_logs_as_its_server_does_and_loads_no_torch(
    model_path: Path, tokenizer: Tokenizer, capfd: pytest.CaptureFixture[str]
) -> None:
    log = LogConfig(log_level="debug", log_format="json")
    process = GrammarProcess(
        msgspec.structs.replace(grammar_settings(model_path, tokenizer), log=log)
    )
    process.open("one", YES_OR_NO)
    assert replies(process)["one"].bitmask
    assert process._process is not None
    assert "libtorch" not in Path(f"/proc/{process._process.pid}/maps").read_text()
    process.shut_down()
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    (ready,) = (line for line in lines if line["message"].startswith("ready"))
    assert (ready["process"], ready["level"]) == ("grammars", "debug")


class OtherProgram(GrammarProcess):
    """Starts `program` in place of the process of grammars; it has the socket as `theirs`."""

    program = ""
    num_starts = 0

    def _command(self, socket_number: int, at_work_number: int) -> list[str]:
        self.num_starts += 1
        head = "import socket, time\nfrom multiprocessing.connection import Connection\n"
        head += "from lora_serve.structured_output.at_work import AtWork\n"
        head += f"theirs, at_work = Connection({socket_number}), AtWork({at_work_number})\n"
        return [sys.executable, "-c", head + self.program]


class Sleeps(OtherProgram):
    program = "time.sleep(60)"


class Ends(OtherProgram):
    program = "pass"


class CompilesNothing(OtherProgram):
    program = "theirs.send_bytes(b'\\x90')\nwhile True: theirs.recv_bytes()"


_GIVES_MASKS = """
import msgspec
from lora_serve.structured_output import wire
from lora_serve.structured_output.service import MaskReply
decoder, last = wire.message_decoder(), {}
def send(*replies): theirs.send_bytes(msgspec.msgpack.encode(replies))
def opened(message):
    last[message.request_id] = len(message.token_ids)
    send(MaskReply(message.request_id, last[message.request_id], b"1"))
decoder.decode(theirs.recv_bytes())
send()
while True:
    message = decoder.decode(theirs.recv_bytes())
    if isinstance(message, wire.Open):
        opened(message)
    for new in getattr(message, "new_tokens", ()):
        advance(new.request_id, new)
"""


class TakesItsTime(OtherProgram):
    """Takes 0.2 s for a mask after the first of each answer."""

    program = f"""def advance(name, new):
    time.sleep(0.2)
    last[name] += 1
    send(MaskReply(name, last[name], b"1"))
{_GIVES_MASKS}"""


class HangsAtOne(OtherProgram):
    """Works on "bad" for ever."""

    program = f"""def advance(name, new):
    at_work.note(name)
    time.sleep(60 if name == "bad" else 0)
    send(MaskReply(name, 1, b"1"))
{_GIVES_MASKS}"""


def test_a_process_that_gives_masks_one_by_one_does_not_hang(
    model_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = TakesItsTime(grammar_settings(model_path, tokenizer))
    names = [f"{i}" for i in range(6)]
    for name in names:
        process.open(name, YES_OR_NO)
    replies(process, 6)
    monkeypatch.setattr(client, "HANG_SECONDS", 0.7)  # all six take 1.2 s
    process.advance([NewTokens(name, (1,)) for name in names])
    assert all(reply.bitmask for reply in replies(process, 6).values())
    assert process.num_starts == 1
    process.shut_down()


def test_only_the_answer_that_a_process_hangs_at_is_refused(
    model_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = HangsAtOne(grammar_settings(model_path, tokenizer))
    for name in ("bad", "behind"):
        process.open(name, YES_OR_NO)
    replies(process, 2)
    monkeypatch.setattr(client, "HANG_SECONDS", 0.3)
    for num_refused in (0, 1):
        process.advance([NewTokens("bad", (1,)), NewTokens("behind", (1,))])
        last = replies(process, 2)
        assert bool(last["bad"].error) == bool(num_refused)
        assert last["behind"].bitmask
    process.shut_down()


class ReadsNothing(OtherProgram):
    program = "theirs.send_bytes(b'\\x90')\ntime.sleep(60)"


@pytest.mark.parametrize(
    ("kind", "start_seconds", "what"),
    [
        (Sleeps, 0.3, "does not start"),
        (Ends, DEADLINE, "ends while it starts"),
        (CompilesNothing, DEADLINE, "compiles nothing"),
    ],
)
def test_a_request_whose_first_mask_never_comes_is_refused_for_now(
    kind: type[OtherProgram],
    start_seconds: float,
    what: str,
    model_path: Path,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "HANG_SECONDS", 0.2)
    settings = msgspec.structs.replace(grammar_settings(model_path, tokenizer), compile_seconds=0.1)
    process = kind(settings, start_seconds)
    process.open("one", YES_OR_NO)
    reply = replies(process)["one"]
    assert reply.is_unavailable
    assert f"the process of grammars {what} (tried 2 times)" in reply.error
    assert process.num_starts == 2
    assert process.num_pending == 0
    process.shut_down()


def test_a_process_that_still_loads_or_takes_nothing_never_holds_up_the_engine(
    model_path: Path, tokenizer: Tokenizer
) -> None:
    large = [StructuredOutput("regex", f"{i}" + "a" * 60_000) for i in range(100)]
    for kind in (Sleeps, ReadsNothing):
        process = kind(grammar_settings(model_path, tokenizer))
        process.open("first", YES_OR_NO)
        while kind is ReadsNothing and not process._is_ready:
            process.take(0.1)
        begin = time.monotonic()
        for i, constraint in enumerate(large):
            process.open(f"{i}", constraint)
            process.take()
        process.open("last", YES_OR_NO)
        assert time.monotonic() - begin < 8.0
        for name in ["first", *(f"{i}" for i in range(100)), "last"]:
            process.close(name)
        assert process._process is not None
        process._process.kill()
        process.shut_down()


def test_answers_have_the_time_of_a_start_when_their_process_is_started_anew(
    grammars: GrammarProcess, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars.open("one", YES_OR_NO)
    replies(grammars)
    monkeypatch.setattr(client, "HANG_SECONDS", 0.01)  # a start takes longer
    assert grammars._process is not None
    os.kill(grammars._process.pid, signal.SIGKILL)
    (letter,) = tokenizer.encode("y", add_special_tokens=False)
    grammars.advance([NewTokens("one", (letter,))])
    assert replies(grammars)["one"].bitmask
    grammars.close("one")
