"""What probes work with: a server, cold answers to compare with, and verdicts.

A cold answer is what the server says where nothing can come from its cache (`ColdWay`): of an
adapter under a name and a path of its own, which no probe uses otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import TypeVar

from lora_serve.check.adapters import Workspace
from lora_serve.check.answers import Answer, difference
from lora_serve.check.facts import ColdWay, Facts
from lora_serve.check.findings import (
    JsonObject,
    Need,
    NotSupportedError,
    ProbeFailedError,
    Violation,
)
from lora_serve.check.server import Server, ServerFaultError, Stream
from lora_serve.check.shown import shown
from lora_serve.check.subjects import AskedModel, Prompt, Settings, Version
from lora_serve.demo.corpus import long_prompt

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
MAX_TOKENS = 16
SHOWN_TOKENS = 16

Value = TypeVar("Value")


class Lab:
    """One server under test. Names, salts and prompts are of this run alone, and used once."""

    def __init__(
        self, server: Server, facts: Facts, settings: Settings, workspace: Workspace
    ) -> None:
        self.server = server
        self.facts = facts
        self.settings = settings
        self.workspace = workspace
        self.base = AskedModel(facts.model)
        self.pair: tuple[Version, Version] | None = None  # set when two have been found
        self._number = 0
        self._loaded: set[str] = set()
        self._references: dict[str, AskedModel] = {}
        self._lacks: dict[Need, str] = {}
        self._hits: list[Answer] = []

    # ── asking ──────────────────────────────────────────────────────────────────────────────

    def prompt(self, num_tokens: int = 0) -> str:
        """A prompt that was never asked, whose every block is new."""
        lines = self.facts.lines_for(num_tokens) if num_tokens else self.facts.lines
        return long_prompt(lines, f"{self._unique()} is the number of this archive.")

    def body(self, speaker: AskedModel, prompt: Prompt, **more: object) -> JsonObject:
        return {
            "model": speaker.model,
            **_prompt_field(prompt),
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            **self.facts.extras,
            **speaker.fields,
            **more,
        }

    async def ask(self, speaker: AskedModel, prompt: Prompt, **more: object) -> Answer:
        answer = await self.server.complete(self.body(speaker, prompt, **more))
        self._hits.append(answer)
        return answer

    async def ask_at_once(
        self, asked: Sequence[tuple[AskedModel, Prompt]], **more: object
    ) -> list[Answer]:
        return await at_once(self.ask(speaker, prompt, **more) for speaker, prompt in asked)

    def stream(self, speaker: AskedModel, prompt: Prompt, **more: object) -> Stream:
        return self.server.stream(self.body(speaker, prompt, **more))

    async def cold(self, who: Version | None, prompt: Prompt, **more: object) -> Answer:
        """What the version, or the base model if None, answers where nothing is cached."""
        speaker = self.base if who is None else await self.reference(who)
        return await self.ask_cold(speaker, prompt, **more)

    async def ask_cold(self, speaker: AskedModel, prompt: Prompt, **more: object) -> Answer:
        """Raises ProbeFailedError where the answer came from the cache all the same."""
        fields = await self.cold_fields()
        answer = await self.server.complete({**self.body(speaker, prompt, **more), **fields})
        cached, asked = answer.num_cached_tokens or 0, answer.num_prompt_tokens or 0
        if cached > asked / 4:  # a few of the first may be those of another prompt
            raise ProbeFailedError(
                Violation(
                    what=f"{cached} tokens of a prompt that {shown(speaker.model)} was never asked "
                    "came from the cache: it found KV that is not its own."
                )
            )
        return answer

    async def cold_fields(self) -> JsonObject:
        """Fields that keep the next request away from the cache, which may be emptied for it."""
        way = self.facts.cold_way
        if way is ColdWay.SALT:
            return {"cache_salt": f"cold-{self._unique()}"}
        if way is ColdWay.CACHE_PROMPT:
            return {"cache_prompt": False}
        if way is ColdWay.RESET:
            await self.server.call("POST", self.facts.reset_route, {}, is_admin=True)
        return {}

    # ── adapters ────────────────────────────────────────────────────────────────────────────

    def new_speaker(self) -> AskedModel:
        return AskedModel(f"check-{self._unique()}")

    async def load(self, speaker: AskedModel, path: str, *, in_place: bool = False) -> None:
        body: JsonObject = {"lora_name": speaker.model, "lora_path": path}
        if in_place:
            body["load_inplace"] = True
        self._loaded.add(speaker.model)
        try:
            await self.server.call("POST", LOAD, body, is_admin=True)
        except ServerFaultError as error:
            if in_place and error.status in (400, 409, 422):
                raise NotSupportedError(f"it does not load in place: {error}") from error
            raise

    async def unload(self, speaker: AskedModel) -> None:
        await self.server.call("POST", UNLOAD, {"lora_name": speaker.model}, is_admin=True)
        self._loaded.discard(speaker.model)

    async def load_new(
        self, version: Version, speaker: AskedModel, *, in_place: bool = False
    ) -> str:
        """Load it from a path that nothing was loaded from before; returns the path."""
        path = self.workspace.put(version.files, self.workspace.new_place())
        await self.load(speaker, path, in_place=in_place)
        return path

    async def speaker_of(self, version: Version) -> AskedModel:
        """Who answers as this version, for probes that change nothing."""
        if version.speaker is not None:
            return version.speaker
        speaker = self.new_speaker()
        await self.load_new(version, speaker)
        return speaker

    async def reference(self, version: Version) -> AskedModel:
        """Who gives cold answers of the version, and no others."""
        if version.speaker is not None:
            return version.speaker
        if version.label not in self._references:
            speaker = self.new_speaker()
            await self.load_new(version, speaker)
            self._loaded.discard(speaker.model)
            self._references[version.label] = speaker
        return self._references[version.label]

    async def versions(self) -> tuple[Version, Version]:
        """A and B, which answer differently. Raises NotSupportedError where there are none."""
        if self.pair is None:
            raise NotSupportedError(self._lacks.get(Need.ADAPTERS, "it has no adapters"))
        return self.pair

    async def clean(self) -> None:
        """Unload what the last probe left, whatever state it is in."""
        for name in sorted(self._loaded):
            await self.server.status_of("POST", UNLOAD, {"lora_name": name})
        self._loaded.clear()
        self._hits.clear()

    async def forget_references(self) -> None:
        """Unload everything; versions that come later get references of their own."""
        self._loaded |= {speaker.model for speaker in self._references.values()}
        self._references.clear()
        await self.clean()

    # ── what the server offers ──────────────────────────────────────────────────────────────

    def lack(self, need: Need, reason: str) -> None:
        """Have probes that need it told that the server lacks it, and why."""
        self._lacks.setdefault(need, reason)

    def require(self, need: Need) -> None:
        """Raises NotSupportedError with the reason, if the server lacks it."""
        facts = self.facts
        reasons = {
            Need.LOGPROBS: "" if facts.has_logprobs else "it gives no logprobs",
            Need.CACHED_TOKENS: ""
            if facts.tells_cached
            else "its usage counts no cached tokens (vLLM: --enable-prompt-tokens-details)",
            Need.SALTS: "" if facts.knows_salts else "it knows no cache_salt",
            Need.COLD: "it has no way to ask without the cache: no cache_salt, no cache_prompt, no "
            "/reset_prefix_cache"
            if facts.cold_way is ColdWay.NONE
            else "",
        }
        reason = self._lacks.get(need) or reasons.get(need)
        if reason:
            raise NotSupportedError(reason)

    # ── judging ─────────────────────────────────────────────────────────────────────────────

    def must_equal(
        self,
        got: Answer,
        right: Answer,
        what: str,
        known: Mapping[str, Answer] | None = None,
        *,
        is_part: bool = False,
    ) -> None:
        """Raises ProbeFailedError if an answer is not the right one.

        Args:
            got: what was answered.
            right: what had to be.
            what: a sentence about what went wrong if they differ.
            known: other answers that it might be, by what they are; for a hint.
            is_part: `got` may end earlier.
        """
        found = difference(got, right, self.settings.tolerance, is_part=is_part)
        if found is None:
            return
        raise ProbeFailedError(
            Violation(
                what=what,
                where=found.where,
                right=_rendered(right),
                wrong=_rendered(got),
                hint=self.hint(got, known or {}),
                is_rounding=found.is_rounding,
            )
        )

    def hint(self, got: Answer, known: Mapping[str, Answer]) -> str:
        """A sentence that names which of some answers it is; empty if it is none of them."""
        for name, answer in known.items():
            if difference(got, answer, self.settings.tolerance) is None:
                return f"It is the answer of {name}."
        return f"It is the answer of none of: {', '.join(known)}." if known else ""

    def hits(self) -> str:
        """How much the probe's requests found in the cache; with nothing, little is proved."""
        told = [one for one in self._hits if one.num_cached_tokens is not None]
        if not told:
            return "the server counts no hits"
        cached = sum(one.num_cached_tokens or 0 for one in told)
        prompts = sum(one.num_prompt_tokens or 0 for one in told)
        if not cached:
            return "nothing came from a cache"
        return f"{cached:,} of {prompts:,} prompt tokens were hits"

    def _unique(self) -> str:
        self._number += 1
        return f"{self._number}-{self.settings.nonce}"  # the first token differs already


async def at_once(calls: Iterable[Awaitable[Value]]) -> list[Value]:
    """All results, when all have ended. Raises the first error among them."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    done: list[Value] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        done.append(result)
    return done


def _prompt_field(prompt: Prompt) -> JsonObject:
    return {"prompt": prompt} if isinstance(prompt, str) else {"prompt_embeds": prompt.payload}


def _rendered(answer: Answer) -> str:
    """Text and logprobs for a reader, on one line each."""
    tokens = answer.tokens[:SHOWN_TOKENS]
    rows = ", ".join(f"'{shown(token.text)}' {token.logprob}" for token in tokens)
    return f"'{shown(answer.text)}'" + (f"\ntokens {rows}" if rows else "")
