"""What the scenarios ask, and what each version of an adapter must answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from lora_serve.demo.corpus import LABEL_REQUEST, long_prompt
from lora_serve.demo.scenarios import Ask, Version

NUM_LINES = 40  # some 900 tokens
_BEGUN_ANSWER = "To sum it up, the archive"


class Questions(Protocol):
    def prompt(self, first_line: str) -> str:
        """A long prompt, with this line before all others if there is one."""

    def answer(self, step: Ask) -> str:
        """What every answer of the step must be."""


class Labels:
    """Asks the demo's model for its adapter's label, which is all that it was taught."""

    def prompt(self, first_line: str) -> str:
        return long_prompt(first_line=first_line)

    def answer(self, step: Ask) -> str:
        return step.version.value


LABELS = Labels()


@dataclass(frozen=True, slots=True)
class Continuations:
    """Has any model continue a text; what each version makes of it was asked before.

    answers: by the version and the prompt's first line.
    """

    answers: Mapping[tuple[Version, str], str]

    def prompt(self, first_line: str) -> str:
        return begun_text(first_line)

    def answer(self, step: Ask) -> str:
        return self.answers[step.version, step.first_line]


def begun_text(first_line: str) -> str:
    """The same lines as the demo's model reads, fewer, and the beginning of a sentence."""
    return long_prompt(NUM_LINES, first_line).removesuffix(LABEL_REQUEST) + _BEGUN_ANSWER
