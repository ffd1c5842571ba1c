"""Which constraints wait to be compiled, for which answers, and which of them is next.

Shares take turns, as they do in the scheduler's queue. A constraint is there once, however many
answers wait for it, and no longer than any does. Every operation is O(1), or O(its answers).
"""

from __future__ import annotations

from collections import OrderedDict

from lora_serve.structured_output.wire import Open
from lora_serve.structured_outputs import StructuredOutput


class CompileQueue:
    def __init__(self) -> None:
        self._answers: dict[StructuredOutput, dict[str, Open]] = {}
        self._constraint_of: dict[str, StructuredOutput] = {}
        self._at_work: set[StructuredOutput] = set()  # being compiled; in no line
        # By share, the next one first: how many of its answers wait for each constraint.
        self._lines: OrderedDict[str, OrderedDict[StructuredOutput, int]] = OrderedDict()

    def put(self, message: Open) -> None:
        """Let an answer wait, or wait with other tokens than before."""
        self.discard(message.request_id)
        self._answers.setdefault(message.constraint, {})[message.request_id] = message
        self._constraint_of[message.request_id] = message.constraint
        if message.constraint not in self._at_work:
            self._join(message)

    def get(self, request_id: str) -> Open | None:
        constraint = self._constraint_of.get(request_id)
        return None if constraint is None else self._answers[constraint][request_id]

    def discard(self, request_id: str) -> StructuredOutput | None:
        """Let an answer wait no longer; returns a constraint that is compiled for none now."""
        constraint = self._constraint_of.pop(request_id, None)
        if constraint is None:
            return None
        answers = self._answers[constraint]
        message = answers.pop(request_id)
        if constraint in self._at_work:
            return None if answers else constraint
        self._leave(message)
        if not answers:
            del self._answers[constraint]
        return None

    def take(self) -> StructuredOutput | None:
        """The next constraint, which is being compiled from now on; None if none waits."""
        if not self._lines:
            return None
        share, line = next(iter(self._lines.items()))
        constraint = next(iter(line))
        self._lines.move_to_end(share)
        for message in self._answers[constraint].values():
            self._leave(message)
        self._at_work.add(constraint)
        return constraint

    def put_back(self, constraint: StructuredOutput) -> None:
        """Let a constraint wait that was being compiled, if an answer waits for it still."""
        self._at_work.remove(constraint)
        for message in self._answers[constraint].values():
            self._join(message)
        if not self._answers[constraint]:
            del self._answers[constraint]

    def remove(self, constraint: StructuredOutput) -> list[Open]:
        """All answers for which a constraint was being compiled; they wait no longer."""
        self._at_work.remove(constraint)
        answers = self._answers.pop(constraint)
        for request_id in answers:
            del self._constraint_of[request_id]
        return list(answers.values())

    def _join(self, message: Open) -> None:
        line = self._lines.setdefault(message.share, OrderedDict())
        line[message.constraint] = line.get(message.constraint, 0) + 1

    def _leave(self, message: Open) -> None:
        line = self._lines[message.share]
        line[message.constraint] -= 1
        if not line[message.constraint]:
            del line[message.constraint]
        if not line:
            del self._lines[message.share]
