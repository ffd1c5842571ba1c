"""`lora-serve fuzz` as a user runs it: a server, a table, a trace that can be replayed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lora_serve.cli.main import main
from lora_serve.demo.scenarios import Server, server_flags
from lora_serve.demo.server_process import ServerProcess
from lora_serve.fuzz import flags as flags_of_traces
from lora_serve.fuzz.generate import Scope, make_trace
from lora_serve.fuzz.trace import save_trace

SERVE_ARGS = ("--serve-args", "--cpu-threads", "1")
# Requests of the first trace have answers that the pool cannot hold at once; the second one's find
# what is cached, and transformers' modules compute them.
SEED = "50"


def test_a_mini_run_compares_every_answer(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more_flags: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flags_of_traces, "MODEL_IMPL_SHARE", 0.6)
    scope = Scope(vocab_size=300, num_versions=6, model_impls=("transformers",))
    by_modules = ["--model-impl" in make_trace(int(SEED) + i, scope).flags for i in range(2)]
    assert by_modules == [False, True]
    figures = tmp_path / "figures.json"
    flags = ("--num-requests", "120", "--requests-per-trace", "60", "--faults", "tier")
    flags = (*flags, "--json", str(figures), *SERVE_ARGS, *more_flags)
    assert main(["fuzz", "--seed", SEED, *flags]) == 0
    shown = capsys.readouterr().out
    assert "wrong answers       0" in shown
    tally = json.loads(figures.read_text())["tally"]
    assert sum(kind["requests"] for kind in tally["kinds"].values()) == 120
    assert sum(kind["whole"] for kind in tally["kinds"].values()) > 60
    assert tally["cached_tokens"] > 0
    assert tally["counts"]["preemptions"] > 0
    assert tally["events"]["aborts"] > 0
    others = {"embeddings", "prompt_embeds", "text", "token ids"}
    talks = {"chat", "chat, tools", "messages, tools", "responses", "responses, tools"}
    assert {*others, *talks} <= set(tally["kinds"])


def test_a_kept_trace_is_replayed_on_a_server_that_runs(
    server: ServerProcess,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more_flags: list[str],
) -> None:
    path = tmp_path / "trace.json"
    scope = Scope(
        vocab_size=300,
        num_versions=6,
        num_requests=10,
        has_chat=False,
        has_embeds=False,
        fixed_flags=True,
    )
    save_trace(make_trace(1, scope), path)
    flags = ("--url", server.base_url, "--serve-args", *server_flags(Server.CACHED), *more_flags)
    assert main(["fuzz", "--replay", str(path), "--times", "1", *flags]) == 0
    assert "10 requests, 1 times, all as if alone" in capsys.readouterr().out
