"""Speculation in the oracle's traces, and whose text a draft comes from.

No answer tells of a foreign draft, which changes nothing but times. The oracle draws its tokens
from so many that two which follow each other hardly ever do so in another text. So a draft whose
pairs neither its request nor the answers of its origin have comes from another origin.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from lora_serve.bitmask import allows
from lora_serve.config import SpeculativeConfig
from lora_serve.config.speculative import DRAFT_MODEL, LOOKED_UP
from lora_serve.fuzz.oracle.draft_model import lone_guesses
from lora_serve.generate_request import GenerateRequest
from lora_serve.identity import AdapterRef, NoAdapter
from lora_serve.messages import EngineOutput
from lora_serve.speculation.row_costs import RowCosts
from lora_serve.step import ScheduledRequest, SchedulerOutput
from lora_serve.structured_outputs import StructuredOutput

MOST_REPEATABLE = 4
DRAFT_MODEL_SHARE = 0.12  # of the traces in which n-grams would guess

Pair = tuple[int, int]
WhoseText = tuple[AdapterRef | NoAdapter, str, str]  # the version, salt and tenant


def drawn_speculation(rng: random.Random) -> SpeculativeConfig:
    """Nothing is guessed in every third trace; of these every other one drafts nothing at all."""
    method = rng.choice((None, *LOOKED_UP))
    if method is None:
        max_step_rows = rng.choice((4, 16, 64))
        return SpeculativeConfig(
            speculation=rng.choice((None, "off")), speculative_max_step_rows=max_step_rows
        )
    config = SpeculativeConfig(
        speculative_method=method,
        speculative_num_speculative_tokens=rng.choice((1, 3, 8)),
        speculative_max_step_rows=rng.choice((4, 16, 64)),
        speculative_prompt_lookup_min=1,
        speculative_suffix_decoding_max_spec_factor=rng.choice((1.0, 4.0)),
        speculative_suffix_decoding_max_cached_tokens=rng.choice((200, 10_000)),
    )
    if method == "ngram" and rng.random() < DRAFT_MODEL_SHARE:
        config = replace(config, speculative_method=DRAFT_MODEL, speculative_model="the oracle's")
    return config


def drawn_row_costs(rng: random.Random) -> RowCosts | None:
    """Every row as costly as the first, nearly for nothing up to a number, or not known."""
    dear, stepped = [(1, 1.0), (2, 2.0)], [(1, 1.0), (5, 1.1), (6, 3.0)]
    costs = (None, RowCosts(dear), RowCosts(stepped, drawn=dear))
    return rng.choice(costs)


@dataclass(frozen=True)
class Asked:
    """What a request asked that another may ask again."""

    name: str | NoAdapter
    salt: str
    tenant: str
    prompt: list[int]
    constraint: StructuredOutput | None = None


class Repeats:
    """The same prompts again, where past answers are drafts: without them hardly one is right."""

    def __init__(self, rng: random.Random, speculative: SpeculativeConfig) -> None:
        self._rng = rng
        self._is_on = speculative.method == "suffix"
        self._asked: deque[Asked] = deque(maxlen=MOST_REPEATABLE)

    def note(self, asked: Asked) -> None:
        self._asked.append(asked)

    def take(self, names: Collection[str | NoAdapter]) -> Asked | None:
        """What is to be asked again, if anything is; of one of these names.

        Now and then another tenant asks it, and must not be offered what the first was told.
        """
        if not self._is_on or self._rng.random() < 0.3:
            return None
        known = [asked for asked in self._asked if asked.name in names]
        if not known:
            return None
        asked = self._rng.choice(known)
        if self._rng.random() < 0.3:
            salt, tenant = self._rng.choice((("", "x"), ("", "y"), ("salt", ""), ("", "")))
            asked = replace(asked, salt=salt, tenant=tenant)
        return asked


class DraftWatch:
    """The texts of one engine's requests, as its callers know them.

    checks_guesses: where guesses are made; else tests make drafts up.
    num_groups: of the model that is served, where a draft model guesses.
    """

    def __init__(self, checks_guesses: bool, num_groups: int | None = None) -> None:
        self._checks_guesses = checks_guesses
        self._num_groups = num_groups
        self.num_drafts = 0
        self.num_forced = 0
        self.num_held_guesses = 0
        self._prompts: dict[str, Sequence[int]] = {}
        self._answers: defaultdict[str, list[int]] = defaultdict(list)
        self._ended: set[str] = set()
        self._askers: dict[str, tuple[str, str]] = {}  # salt and tenant
        self._answered: defaultdict[WhoseText, set[Pair]] = defaultdict(set)

    def added(self, request: GenerateRequest) -> None:
        self._prompts[request.request_id] = request.prompt.token_ids
        self._askers[request.request_id] = request.cache_salt, request.tenant

    def answered(self, output: EngineOutput) -> None:
        """Note the tokens that a request got; those of its last output once."""
        if output.request_id in self._ended:
            return
        if output.finish_reason is not None:
            self._ended.add(output.request_id)
        answer = self._answers[output.request_id]
        pairs = pairwise((*answer[-1:], *output.new_token_ids))
        self._answered[output.adapter, *self._askers[output.request_id]].update(pairs)
        answer += output.new_token_ids

    def check(self, steps: Iterable[SchedulerOutput]) -> None:
        """Assert that drafts come from where they may."""
        for step in steps:
            for chunk in step.requests:
                if chunk.asked.num_drafts:
                    self._check(chunk)

    def _check(self, chunk: ScheduledRequest) -> None:
        guessed = self._guessed_places(chunk)
        self.num_forced += chunk.asked.num_drafts - len(guessed)
        if chunk.asked.samples[0].params.structured_outputs is not None:
            self.num_held_guesses += len(guessed)
        if self._checks_guesses and guessed:
            self.num_drafts += len(guessed)
            self._check_guesses(chunk, guessed)

    def _guessed_places(self, chunk: ScheduledRequest) -> list[int]:
        """Which of the drafts no grammar forces; each must be permitted by its own row's mask."""
        guessed = []
        for place, draft in enumerate(chunk.draft_token_ids):
            sample = chunk.asked.samples[place]
            if sample.params.structured_outputs is not None and sample.bitmask is not None:
                may_be_drawn = allows(sample.bitmask, draft)
                assert may_be_drawn, f"{chunk.request_id} was offered {draft}, which is forbidden"
                if is_only_one(sample.bitmask, draft):
                    continue
            guessed.append(place)
        return guessed

    def _check_guesses(self, chunk: ScheduledRequest, places: Sequence[int]) -> None:
        name = chunk.request_id
        if self._num_groups is not None:
            self._check_guesses_of_model(chunk, places[-1] + 1, self._num_groups)
            return
        tokens = chunk.token_ids[-chunk.asked.num_drafts - 1 :]
        pairs = {(tokens[place], tokens[place + 1]) for place in places}
        others = pairs - self._answered[chunk.adapter, *self._askers[name]]
        if others:
            others -= set(pairwise((*self._prompts[name], *self._answers[name])))
        assert not others, f"{name} was offered drafts that are none of its own: {others}"

    def _check_guesses_of_model(
        self, chunk: ScheduledRequest, num_drafts: int, num_groups: int
    ) -> None:
        """Assert that they are what the draft model, alone with the request's text, says.

        num_drafts: up to the last guess.
        """
        name, num_known = chunk.request_id, chunk.end - chunk.asked.num_drafts
        text = [*self._prompts[name], *self._answers[name]][:num_known]
        assert len(text) == num_known, f"{name} was offered drafts behind tokens that nobody knows"
        drafts = [*chunk.draft_token_ids[:num_drafts]]
        expected = lone_guesses(text, num_drafts, num_groups)
        assert drafts == expected, f"{name} was offered drafts of another text"


def is_only_one(bitmask: bytes, token_id: int) -> bool:
    """Whether a SampleInput.bitmask allows this token and no other."""
    return int.from_bytes(bitmask, "little") == 1 << token_id
