"""Plays scenarios against a server and judges what it answers. Knows HTTP, but no engine."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from lora_serve.demo.client import Answer, Client, ServerRefusedError
from lora_serve.demo.model import DemoPaths
from lora_serve.demo.questions import LABELS, Questions
from lora_serve.demo.scenarios import MODEL_NAME, Ask, Hits, Load, Scenario, Step, Unload, Version

LEAST_HIT_RATE = 0.85  # with fewer hits a right answer proves nothing


@dataclass(slots=True)
class Outcome:
    """The outcome of a scenario; figures are those of its last question."""

    scenario: Scenario
    answer: str = ""
    num_right: int = 0
    num_asked: int = 0
    num_cached_tokens: int = 0
    num_prompt_tokens: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.problems

    @property
    def hit_rate(self) -> float:
        return self.num_cached_tokens / max(1, self.num_prompt_tokens)


class Player:
    """Plays scenarios on one server. `workspace` is for adapters whose bytes are overwritten."""

    def __init__(
        self, client: Client, paths: DemoPaths, workspace: Path, questions: Questions = LABELS
    ) -> None:
        self._client = client
        self._questions = questions
        self._sources: Mapping[Version, Path] = {Version.A: paths.alpha, Version.B: paths.beta}
        self._workspace = workspace

    def play(self, scenario: Scenario) -> Outcome:
        """Play all steps, until one is refused; wrong answers do not stop it."""
        outcome = Outcome(scenario)
        started = time.perf_counter()
        try:
            for step in scenario.steps:
                self._take(step, scenario, outcome)
        except (ServerRefusedError, httpx.HTTPError) as error:
            outcome.problems.append(f"{type(error).__name__}: {error}")
        outcome.seconds = time.perf_counter() - started
        return outcome

    def _take(self, step: Step, scenario: Scenario, outcome: Outcome) -> None:
        name = adapter_name(scenario, step.adapter)
        if isinstance(step, Load):
            path = self._path(step, name)
            self._client.load_adapter(name, path, in_place=step.in_place)
        elif isinstance(step, Unload):
            self._client.unload_adapter(name)
        else:
            answers = self._ask(step, MODEL_NAME if step.version is Version.BASE else name)
            _judge(step, self._questions.answer(step), answers, outcome)

    def _path(self, step: Load, name: str) -> Path:
        source = self._sources[step.version]
        if not step.same_path:
            return source
        target = self._workspace / name
        shutil.copytree(source, target, dirs_exist_ok=True)
        return target

    def _ask(self, step: Ask, model: str) -> list[Answer]:
        prompt = self._questions.prompt(step.first_line)

        def ask(_: int) -> Answer:
            return self._client.complete(model, prompt, step.cache_salt)

        if not step.concurrent:
            return [ask(i) for i in range(step.count)]
        with ThreadPoolExecutor(step.count) as threads:
            return list(threads.map(ask, range(step.count)))


def adapter_name(scenario: Scenario, adapter: str) -> str:
    return f"row{scenario.row}-{adapter}"


def _judge(step: Ask, expected: str, answers: list[Answer], outcome: Outcome) -> None:
    """Write the figures of these answers into the outcome, and what is wrong with them."""
    wrong = [answer.text for answer in answers if answer.text != expected]
    outcome.answer = wrong[0] if wrong else expected
    outcome.num_asked = len(answers)
    outcome.num_right = len(answers) - len(wrong)
    outcome.num_cached_tokens = sum(answer.num_cached_tokens for answer in answers)
    outcome.num_prompt_tokens = sum(answer.num_prompt_tokens for answer in answers)
    if wrong:
        outcome.problems.append(
            f"{len(wrong)} of {len(answers)} answered {wrong[0]!r} instead of {expected!r}"
        )
    problem = _hit_problem(step.hits, answers, outcome.hit_rate)
    if problem:
        outcome.problems.append(problem)


def _hit_problem(hits: Hits, answers: list[Answer], hit_rate: float) -> str:
    """What is wrong with the hits, or ""."""
    first, others = answers[0], answers[1:]
    if hits is Hits.NONE and hit_rate > 0:
        return f"{hit_rate:.0%} of the prompts' tokens were hits, where there is no cache"
    if hits is Hits.AFTER_FIRST and first.num_cached_tokens:
        return f"the first request found {first.num_cached_tokens} tokens that cannot be its own"
    if hits is Hits.CONCURRENT and hit_rate < LEAST_HIT_RATE:
        return f"only {hit_rate:.0%} of the prompts' tokens were hits"
    must_hit = others if hits is Hits.AFTER_FIRST else answers if hits is Hits.FROM_FIRST else []
    cold = [a for a in must_hit if a.num_cached_tokens < LEAST_HIT_RATE * a.num_prompt_tokens]
    if cold:
        return f"{len(cold)} of {len(must_hit)} requests were not served from the cache"
    return ""
