"""What is right: every question asked of a server without any cache, one after the other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.soak.asking import ask, versions_of
from benchmarks.soak.questions import Question
from benchmarks.soak.versions import Version
from lora_serve.bench.http_stream import Origin, request
from lora_serve.demo.model import DemoPaths
from lora_serve.demo.server_process import ServerProcess
from lora_serve.fuzz.answers import Choice, Heard

MODEL_NAME = "lora-serve-demo"
COLD_FLAGS = (
    *("--served-model-name", MODEL_NAME, "--enable-lora", "--enable-prompt-embeds"),
    *("--no-enable-prefix-caching", "--max-num-seqs", "1", "--cpu-threads", "1"),
)


class ColdAnswers:
    """Answers by question and by version."""

    def __init__(self) -> None:
        self._choices: dict[tuple[int, str], dict[int, Choice]] = {}

    def put(self, question: Question, version: str, heard: Heard) -> None:
        assert heard.status == 200, f"question {question.index}, cold: {heard.message}"
        found = {one for choice in heard.choices.values() for one in versions_of(choice)}
        assert found == {version}, f"question {question.index}: {found} instead of {version}"
        self._choices[question.index, version] = heard.choices

    def fault_of(self, question: Question, heard: Heard, *, is_part: bool) -> str | None:
        """How an answer, or the start of one, differs from that of the version it claims."""
        for index, choice in heard.choices.items():
            versions = sorted(versions_of(choice))
            if not any(self._agrees(question, index, choice, one, is_part) for one in versions):
                return f"choice {index} is not what {versions} answer"
        if not is_part and len(heard.choices) != question.fields["n"]:
            return f"{len(heard.choices)} choices instead of {question.fields['n']}"
        return None

    def _agrees(
        self, question: Question, index: int, choice: Choice, version: str, is_part: bool
    ) -> bool:
        expected = self._choices.get((question.index, version), {}).get(index)
        return expected is not None and not choice.difference(expected, is_part=is_part)


async def ask_cold(
    demo: DemoPaths, versions: Sequence[Path], questions: Sequence[Question], log: Path
) -> tuple[ColdAnswers, list[Version]]:
    """Every question of the base model and of every version, and what the versions are."""
    answers, known = ColdAnswers(), [Version("", None)]
    with ServerProcess(demo.model, COLD_FLAGS, log) as server:
        server.wait_until_healthy()
        origin = Origin.parse(server.base_url)
        for question in questions:
            answers.put(question, "", await ask(origin, question, MODEL_NAME))
        for path in versions:
            digest = await load_adapter(origin, path.name, path)
            known.append(Version(digest, path))
            for question in questions:
                answers.put(question, digest, await ask(origin, question, path.name))
    return answers, known


async def load_adapter(origin: Origin, name: str, path: Path) -> str:
    """Load it, and the digest by which its answers call it."""
    body = {"lora_name": name, "lora_path": str(path), "load_inplace": True}
    status, text = await post(origin, "/v1/load_lora_adapter", body)
    assert status == 200, f"{path}: {text}"
    async with request(origin, "GET", f"/v1/models/{name}", {}) as response:
        return str(json.loads(await response.read())["digest"])[:12]


async def post(origin: Origin, path: str, body: dict[str, object]) -> tuple[int, str]:
    """A status, and the text that came with it."""
    headers = {"Content-Type": "application/json"}
    async with request(origin, "POST", path, headers, json.dumps(body).encode()) as response:
        return response.status, (await response.read()).decode()
