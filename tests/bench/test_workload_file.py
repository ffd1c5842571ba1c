from __future__ import annotations

from pathlib import Path

import pytest

from lora_serve.bench.workload import TimedRequest, WorkloadSpec, make_workload
from lora_serve.bench.workload_file import load_workload, save_workload
from lora_serve.errors import ConfigError


def test_a_saved_workload_is_replayed_as_it_was(tmp_path: Path) -> None:
    requests = make_workload(WorkloadSpec(adapters=("a", "b"), request_rate=9.0))
    save_workload(requests, tmp_path / "w.jsonl")
    assert load_workload(tmp_path / "w.jsonl") == requests


def test_a_workload_written_by_hand_needs_only_prompts_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text(
        '{"prompt_token_ids": [5], "max_tokens": 2, "at_seconds": 1}\n'
        '{"prompt_token_ids": [6], "max_tokens": 3}\n'
    )
    assert load_workload(path) == (TimedRequest((6,), 3), TimedRequest((5,), 2, None, 1.0))


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "line 1"),
        ('{"max_tokens": 1}', "prompt_token_ids"),
        ('{"prompt_token_ids": [], "max_tokens": 1}', "at least one prompt token"),
        ('{"prompt_token_ids": [1], "max_tokens": 0}', "max_tokens of at least 1"),
    ],
)
def test_a_broken_workload_is_refused_by_line(tmp_path: Path, line: str, fault: str) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=fault):
        load_workload(path)


def test_a_missing_or_empty_workload_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_workload(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ConfigError, match="no requests"):
        load_workload(tmp_path / "empty.jsonl")
