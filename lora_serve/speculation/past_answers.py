"""Answers that have ended, to find in them what a request of the same origin may draw next.

What one origin answered is looked for by its own requests alone. Memory is bounded over all
origins: the one that was used least recently goes first.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence

from lora_serve.identity import BASE_MODEL, EVERYTHING, AdapterRef, Everything
from lora_serve.speculation.base import Origin
from lora_serve.speculation.suffix_automaton import SuffixAutomaton

_TOKENS_A_STEP = 256  # of answers that are taken in: a millisecond, about
_SHARE_OF_ONE = 4  # an origin's newer answers are at most a fourth of all
_OVERHEAD = 64  # tokens that an automaton without any counts as


class PastAnswers:
    """The answers of each origin: the newest in one automaton, those before them in another.

    max_tokens: of all answers of all origins that are held; an automaton counts as some, too.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._most_newer = max(2, max_tokens // _SHARE_OF_ONE)  # in one automaton
        self._held: OrderedDict[Origin, list[SuffixAutomaton]] = OrderedDict()  # newest last
        self._waiting: deque[tuple[Origin, Sequence[int], int]] = deque()  # with the place to go on
        self._num_waiting = 0
        self._of_name: defaultdict[str, dict[Origin, None]] = defaultdict(dict)  # the adapters'
        self.num_tokens = 0

    def __len__(self) -> int:
        """How many origins there are answers of."""
        return len(self._held)

    def of(self, origin: Origin) -> Sequence[SuffixAutomaton]:
        """What is held of an origin, the newest answers first."""
        held = self._held.get(origin)
        if held is None:
            return ()
        self._held.move_to_end(origin)
        return held

    def add(self, origin: Origin, answer: Sequence[int]) -> None:
        """Hold an answer, once `work` has come to it."""
        if len(answer) < 2 or len(answer) + self._num_waiting > self._max_tokens:
            return  # nothing follows a token in it, or answers come faster than they are taken in
        self._waiting.append((origin, answer, 0))
        self._num_waiting += len(answer)

    def work(self) -> None:
        """Take in a part of the answers that wait."""
        budget = _TOKENS_A_STEP
        while self._waiting and budget > 0:
            origin, answer, start = self._waiting.popleft()
            end = min(len(answer), start + budget)
            self._take_in(origin, answer[start:end], is_begin=start == 0)
            budget -= end - start
            self._num_waiting -= end - start
            if end < len(answer):
                self._waiting.appendleft((origin, answer, end))

    def forget(self, lora_name: str | Everything, but: AdapterRef | None = None) -> None:
        """Drop the answers of a name's versions but one, or of EVERYTHING."""
        if lora_name is EVERYTHING:
            self._held.clear()
            self._of_name.clear()
            self.num_tokens = 0
        else:
            for origin in [
                one for one in self._of_name.get(lora_name, ()) if _is_of(one, lora_name, but)
            ]:
                self._drop(origin)
        waiting = [one for one in self._waiting if not _is_of(one[0], lora_name, but)]
        self._waiting = deque(waiting)
        self._num_waiting = sum(len(answer) - start for _, answer, start in waiting)

    def _take_in(self, origin: Origin, token_ids: Sequence[int], is_begin: bool) -> None:
        held = self._held.setdefault(origin, [])
        self._held.move_to_end(origin)
        if (adapter := origin.namespace.adapter) is not BASE_MODEL:
            self._of_name[adapter.name][origin] = None
        self.num_tokens -= _num_tokens(held)
        start = 0
        while start < len(token_ids):
            if not held or len(held[0]) >= self._most_newer:
                held[:] = [SuffixAutomaton(), *held[:1]]
            elif is_begin and start == 0:
                held[0].begin_text()
            end = start + self._most_newer - len(held[0])
            for token_id in token_ids[start:end]:
                held[0].append(token_id)
            start = end
        self.num_tokens += _num_tokens(held)
        while self.num_tokens > self._max_tokens and len(self._held) > 1:
            self._drop(next(iter(self._held)))
        if self.num_tokens > self._max_tokens:  # one origin's, where few may be held
            self.num_tokens -= _num_tokens(held[1:])
            del held[1:]

    def _drop(self, origin: Origin) -> None:
        self.num_tokens -= _num_tokens(self._held.pop(origin))
        if (adapter := origin.namespace.adapter) is not BASE_MODEL:
            of_name = self._of_name[adapter.name]
            del of_name[origin]
            if not of_name:
                del self._of_name[adapter.name]


def _num_tokens(automata: Sequence[SuffixAutomaton]) -> int:
    return sum(len(automaton) + _OVERHEAD for automaton in automata)


def _is_of(origin: Origin, lora_name: str | Everything, but: AdapterRef | None) -> bool:
    adapter = origin.namespace.adapter
    if lora_name is EVERYTHING:
        return True
    return adapter is not BASE_MODEL and adapter.name == lora_name and adapter != but
