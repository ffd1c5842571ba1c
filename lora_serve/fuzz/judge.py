"""Judges a trace that was played: answers, their versions, hits, refusals.

An answer must be, to the bit, that of the version which its fingerprint names, and its adapter's
name can have stood for that version meanwhile. A request may be refused only for what was done to
it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from msgspec.structs import replace as replaced

from lora_serve.fuzz.aborts import Aborts
from lora_serve.fuzz.answers import Called, Choice, Heard
from lora_serve.fuzz.player import Record
from lora_serve.fuzz.reference import ColdEngine
from lora_serve.fuzz.timeline import ABSENT, REFUSED, Timeline, calls_of
from lora_serve.fuzz.trace import Ask, Event, Kill, Load, Reset, Trace, Unload, shortened
from lora_serve.identity import BASE_MODEL, NoAdapter


@dataclass(frozen=True, slots=True)
class Finding:
    """event: its index in the trace, or None for the server itself."""

    event: int | None
    what: str


class Judge:
    """Judges one trace that was played. block_size: hits are multiples of it."""

    def __init__(
        self, trace: Trace, records: Sequence[Record], cold: ColdEngine, block_size: int
    ) -> None:
        self._trace = trace
        self._records = records
        self._cold = cold
        self._block_size = block_size
        self._timeline = Timeline(trace, records)
        self._aborts = Aborts(trace, records)
        self._asked = [
            (index, event, record)
            for index, (event, record) in enumerate(zip(trace.events, records, strict=True))
            if isinstance(event, Ask) and isinstance(record, Heard)
        ]
        self._units = {index: self._computed_units(ask, heard) for index, ask, heard in self._asked}

    def findings(self) -> list[Finding]:
        found = [
            Finding(index, what)
            for index, ask, heard in self._asked
            for what in self._faults(index, ask, heard)
        ]
        for index, event, called in calls_of(self._trace, self._records):
            if not self._may_fail(event, called):
                found.append(Finding(index, f"refused: {called.status}: {called.message[:300]}"))
        found += [Finding(index, what) for index, what in self._aborts.wrong_numbers()]
        return [*found, *map(self._no_order, self._timeline.impossible)]

    def _no_order(self, index: int) -> Finding:
        outcomes = [
            f"{type(call).__name__} {called.status}"
            for event, call, called in calls_of(self._trace, self._records)
            if event == index
        ]
        return Finding(index, f"no order of the calls gives these outcomes: {', '.join(outcomes)}")

    # ── requests ────────────────────────────────────────────────────────────────────────────

    def _faults(self, index: int, ask: Ask, heard: Heard) -> Iterator[str]:
        if heard.continues_anothers and heard.choices:
            yield "continues a response of another API key"
            return
        if heard.is_aborted and not self._aborts.may_have_ended(index):
            yield "aborted, though no call named it while it ran"
        if not (heard.is_whole or heard.has_left or self._may_break(ask, heard)):
            yield f"refused: {heard.status}: {heard.message[:300]}"
        for number, choice in sorted(heard.choices.items()):
            what = self._wrong(ask, heard, number, choice)
            if what:
                yield f"choice {number}: {what}"
        if heard.is_whole:
            if len(heard.choices) != ask.params.n:
                yield f"{len(heard.choices)} choices, not {ask.params.n}"
            yield from self._wrong_hits(index, ask, heard)

    def _may_break(self, ask: Ask, heard: Heard) -> bool:
        """Whether this error had to come of what was done meanwhile."""
        begin, end = heard.begin, heard.end
        if heard.is_aborted:
            return True
        if heard.status == 503:
            return self._timeline.num_kills(begin, end) > 0
        if heard.status == 500:  # a request that was there when two engines died
            return self._timeline.num_kills(begin, end) > 1
        if heard.status == 404 and heard.continues_anothers:
            return True
        if ask.adapter is BASE_MODEL:
            return False
        if heard.status == 404:
            return ABSENT in self._timeline.versions(ask.adapter, begin, end)
        if heard.status == 400 and "its invocation tokens" in heard.message:
            return None in self._beginnings(ask, heard)
        return heard.status == 400 and self._timeline.may_have_changed(ask.adapter, begin, end)

    def _refuses(self, ask: Ask, version: int | NoAdapter, heard: Heard) -> bool:
        return self._cold.begins_at(ask, version, heard.history) is None

    def _beginnings(self, ask: Ask, heard: Heard) -> set[int | None]:
        """Where in its prompt each version that may answer begins to act; None: it refuses."""
        versions = self._possible(ask, heard) - {ABSENT}
        return {self._cold.begins_at(ask, version, heard.history) for version in versions}

    def _possible(self, ask: Ask, heard: Heard) -> set[int | NoAdapter]:
        if ask.adapter is BASE_MODEL:
            return {BASE_MODEL}
        return set(self._timeline.versions(ask.adapter, heard.begin, heard.end))

    def _wrong(self, ask: Ask, heard: Heard, number: int, choice: Choice) -> str:
        """What is wrong with a choice, or "": it must be right for a version that it names."""
        possible = self._possible(ask, heard)
        source, wrong = "any version", "it names none"
        if not (choice.token_ids or choice.items or choice.fingerprints):
            return ""
        if _was_ended_before_it_began(choice) and not choice.fingerprints:
            return _told_without_tokens(choice)  # maybe before its name was looked up
        if not choice.fingerprints:  # a response names its version at its end
            versions = [v for v in possible - {ABSENT} if not self._refuses(ask, v, heard)]
            rights = [self._cold.answer(ask, version, heard.history) for version in versions]
            wrongs = [choice.difference(right.choices[number], is_part=True) for right in rights]
            return "" if "" in wrongs else f"no version answers so: {wrongs}"
        for fingerprint in sorted(choice.fingerprints):
            try:
                version = self._cold.version_of(fingerprint)
            except ValueError:
                return f"names {fingerprint}, which was never loaded"
            if version not in possible:
                shown = sorted(map(_shown, possible))
                return f"names {_shown(version)}, but {ask.lora_name} can only have been {shown}"
            if self._refuses(ask, version, heard):
                return f"{_shown(version)} answers a prompt without its invocation tokens"
            wrong = self._difference(ask, heard, number, choice, version)
            if not wrong:
                return ""
            source = _shown(version)
        return f"not what {source} answers: {wrong}{self._true_source(ask, heard, number)}"

    def _difference(
        self, ask: Ask, heard: Heard, number: int, choice: Choice, version: int | NoAdapter
    ) -> str:
        """How a choice differs from this version's right one, or "".

        One that a call ended must be the right one of as many tokens, its text included.
        """
        if _was_ended_before_it_began(choice):
            return _told_without_tokens(choice)
        right = self._cold.answer(_as_far_as(choice, ask), version, heard.history)
        own = right.choices[number]
        if choice.is_aborted:
            own = replace(own, finish_reason=choice.finish_reason)
        wrong = choice.difference(own, is_part=not heard.is_whole)
        if not wrong and _tells_prompt(heard) and heard.prompt_logprobs != right.prompt_logprobs:
            return "other logprobs of the prompt"
        return wrong

    def _true_source(self, ask: Ask, heard: Heard, number: int) -> str:
        """Name, as a hint, the version whose answer it is, if there is one."""
        for version in (BASE_MODEL, *range(self._cold.num_versions)):
            if self._refuses(ask, version, heard):
                continue
            right = self._cold.answer(ask, version, heard.history).choices[number]
            if not heard.choices[number].difference(right, is_part=True):
                return f"; it is the answer of {_shown(version)}"
        return ""

    # ── hits ────────────────────────────────────────────────────────────────────────────────

    def _wrong_hits(self, index: int, ask: Ask, heard: Heard) -> Iterator[str]:
        num_cached, by_tier = heard.num_cached_tokens, heard.num_cached_by_tier
        if num_cached > max(0, heard.num_prompt_tokens - 1) or num_cached % self._block_size:
            yield f"{num_cached} of {heard.num_prompt_tokens} tokens cannot have been cached"
        if by_tier and sum(by_tier.values()) != num_cached:
            yield f"{num_cached} cached tokens, but by tier {by_tier}"
        if num_cached > (most := self._most_hits(index, ask, heard)):
            yield f"{num_cached} cached tokens, but no more than {most} were ever computed before"

    def _most_hits(self, index: int, ask: Ask, heard: Heard) -> int:
        """The most tokens that can be hits: common beginnings with others in the same namespace.

        A request finds blocks of its own when its engine was killed, or by its other choices.
        """
        kills = any(isinstance(event, Kill) for event in self._trace.events)
        most = 0
        for other, asked, other_heard in self._asked:
            is_own = other == index
            if (is_own and ask.params.n == 1 and not kills) or other_heard.begin > heard.end:
                continue
            if _tenant(ask) != _tenant(asked):
                continue
            common = _common(self._units[index], self._units[other])
            if self._may_share(ask, heard, asked, other_heard):
                most = max(most, common)
            elif not self._was_reset_between(BASE_MODEL, other_heard, heard):
                lent = min(self._base_end(ask, heard), self._base_end(asked, other_heard))
                most = max(most, min(common, lent))
        return most // self._block_size * self._block_size

    def _may_share(self, ask: Ask, heard: Heard, other: Ask, other_heard: Heard) -> bool:
        if ask.adapter != other.adapter:
            return False
        others = other_heard.fingerprints
        if others and not others & heard.fingerprints:
            return False
        return not self._was_reset_between(ask.adapter, other_heard, heard)

    def _was_reset_between(self, adapter: str | NoAdapter, other: Heard, heard: Heard) -> bool:
        was_reset = self._timeline.was_reset_between(adapter, other.end, heard.begin)
        return was_reset and not other.has_left  # one that was left may run on for a moment

    def _base_end(self, ask: Ask, heard: Heard) -> int:
        """How many tokens of its prompt the base model may have computed."""
        return max(
            (begin for begin in self._beginnings(ask, heard) if begin is not None), default=0
        )

    def _computed_units(self, ask: Ask, heard: Heard) -> list[Hashable]:
        """The prompt, and the tokens of its first choice that were sent."""
        told = heard.choices[0].token_ids if 0 in heard.choices else []
        return [*self._cold.units(ask, heard.history), *told]

    # ── operators' calls ────────────────────────────────────────────────────────────────────

    def _may_fail(self, event: Event, called: Called) -> bool:
        if called.is_done:
            return True
        if called.status == 503:
            return self._timeline.num_kills(called.begin, called.end) > 0
        if not isinstance(event, Load | Unload | Reset) or event.lora_name is None:
            return False
        versions = self._timeline.versions(event.lora_name, called.begin, called.end)
        is_for_absence = not isinstance(event, Load) or event.in_place
        is_excused = ABSENT in versions if is_for_absence else versions != {ABSENT}
        return called.status in REFUSED and is_excused


def _tenant(ask: Ask) -> tuple[Hashable, ...]:
    """Requests of another one share no KV with it."""
    return ask.api_key, ask.cache_salt


def _was_ended_before_it_began(choice: Choice) -> bool:
    return choice.is_aborted and not choice.token_ids


def _told_without_tokens(choice: Choice) -> str:
    """What is wrong with such a choice, or "": it may tell nothing."""
    told = [choice.text, *choice.logprobs, *(item[-1] for item in choice.items)]
    return f"it has no tokens, and tells {str(told)[:200]}" if any(told) else ""


def _as_far_as(choice: Choice, ask: Ask) -> Ask:
    """What asks for the tokens that a choice has: for fewer of them, if a call ended it."""
    if not choice.is_aborted:
        return ask
    return replaced(ask, params=shortened(ask.params, len(choice.token_ids)))


def _tells_prompt(heard: Heard) -> bool:
    """Whether it tells the logprobs of the prompt, if they were asked for."""
    had_no_time = any(each.is_aborted and not each.token_ids for each in heard.choices.values())
    return heard.is_whole and not had_no_time


def _shown(version: int | NoAdapter) -> str:
    return "the base model" if version is BASE_MODEL else f"version {version}"


def _common(these: Sequence[Hashable], those: Sequence[Hashable]) -> int:
    """The length of their common beginning."""
    for index, (one, other) in enumerate(zip(these, those, strict=False)):
        if one != other:
            return index
    return min(len(these), len(those))
