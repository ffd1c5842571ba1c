"""Requests that run at the same time: each must answer as it does alone."""

from __future__ import annotations

from lora_serve.check.answers import Answer, difference
from lora_serve.check.findings import Need, NotSupportedError
from lora_serve.check.lab import Lab, at_once
from lora_serve.check.probe import Probe

NUM_EQUAL = 16
NUM_SEEDED = 8
SEEDED_TOKENS = 12
NUM_ROUNDS = 3


async def _equal_prompts(lab: Lab) -> str:
    prompt = lab.prompt()
    right = await lab.cold(None, prompt)
    for got in await lab.ask_at_once([(lab.base, prompt)] * NUM_EQUAL):
        what = f"Of {NUM_EQUAL} equal requests at once, one was not answered as alone."
        lab.must_equal(got, right, what)
    return lab.hits()


async def _seeded(lab: Lab) -> str:
    """Sampled answers with seeds of their own: what a seed draws depends on no other request."""
    prompts = [lab.prompt() for _ in range(NUM_SEEDED)]
    settings = [_sampled(seed) for seed in range(NUM_SEEDED)]
    right = [
        await lab.cold(None, prompt, **fields)
        for prompt, fields in zip(prompts, settings, strict=True)
    ]
    again = await lab.cold(None, prompts[0], **settings[0])
    if again.text != right[0].text:
        raise NotSupportedError("two lone requests with one seed are answered differently")
    got = await _ask_sampled_at_once(lab, prompts, settings)
    apart = [
        (one, expected)
        for one, expected in zip(got, right, strict=True)
        if difference(one, expected, lab.settings.tolerance)
    ]
    # With a tolerance, a draw may fall to either side of a border that rounding has moved.
    if len(apart) > (NUM_SEEDED // 2 if lab.settings.tolerance else 0):
        what = f"{len(apart)} of {NUM_SEEDED} seeded requests at once were not answered as alone."
        lab.must_equal(*apart[0], what)
    return lab.hits()


def _sampled(seed: int) -> dict[str, object]:
    return {"temperature": 1.0, "seed": 1000 + seed, "max_tokens": SEEDED_TOKENS}


async def _ask_sampled_at_once(
    lab: Lab, prompts: list[str], settings: list[dict[str, object]]
) -> list[Answer]:
    return await at_once(
        lab.ask(lab.base, prompt, **fields)
        for prompt, fields in zip(prompts, settings, strict=True)
    )


async def _adapters(lab: Lab) -> str:
    """Both adapters and the base model at once, on a prompt that they share and on their own."""
    a, b = await lab.versions()
    speakers = [lab.base, await lab.speaker_of(a), await lab.speaker_of(b)]
    for _ in range(NUM_ROUNDS):
        shared = lab.prompt()
        asked = [(who, shared) for who in speakers] + [(who, lab.prompt()) for who in speakers]
        right = [await lab.ask_cold(*one) for one in asked]
        names = ("the base model", "adapter A", "adapter B")
        known = dict(zip(names, right, strict=False))
        for one, expected in zip(await lab.ask_at_once(asked * 2), right * 2, strict=True):
            what = "Among requests of other adapters, one was not answered as alone."
            lab.must_equal(one, expected, what, known)
    return lab.hits()


PROBES = (
    Probe(
        name="equal-prompts-at-once",
        proves="equal greedy requests at once: each answers as alone, whoever computes the KV",
        run=_equal_prompts,
    ),
    Probe(
        name="seeded-at-once",
        proves="sampled requests with seeds at once: each answers as alone",
        run=_seeded,
    ),
    Probe(
        name="adapters-at-once",
        proves="two adapters and the base model in one batch: each answers as alone",
        needs=(Need.ADAPTERS, Need.COLD),
        run=_adapters,
    ),
)
