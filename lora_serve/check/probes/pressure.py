"""More long prompts than a cache holds: KV is evicted, requests preempt each other."""

from __future__ import annotations

from lora_serve.check.lab import Lab
from lora_serve.check.probe import Probe

TIMES_LONGER = 3  # than a usual prompt
NUM_COMPARED = 6  # of the crowd: each takes a cold answer of its own
NUM_ROUNDS = 2


async def _pressure(lab: Lab) -> str:
    number, length = lab.settings.num_pressing, TIMES_LONGER * lab.settings.num_prompt_tokens
    shared = lab.prompt(length)
    prompts = [_with_tail(shared, lab, length) for _ in range(number)]
    compared = min(NUM_COMPARED, number)
    right = [await lab.cold(None, prompt) for prompt in prompts[:compared]]
    for _ in range(NUM_ROUNDS):
        got = await lab.ask_at_once([(lab.base, prompt) for prompt in prompts])
        for one, expected in zip(got, right, strict=False):
            what = f"Among {number} long prompts at once, one was not answered as alone."
            lab.must_equal(one, expected, what)
    for prompt, expected in zip(prompts, right, strict=False):
        got_later = await lab.ask(lab.base, prompt)
        what = f"After {number} long prompts at once, one of them was not answered as before."
        lab.must_equal(got_later, expected, what)
    total = sum(one.num_prompt_tokens or 0 for one in got)
    return f"{number} prompts of {total:,} tokens at once, twice; {lab.hits()}"


def _with_tail(shared: str, lab: Lab, length: int) -> str:
    """Half of a prompt that all share, then lines of its own."""
    head, tail = shared.splitlines(), lab.prompt(length).splitlines()
    return "\n".join([*head[: len(head) // 2], *tail[: (len(tail) + 1) // 2], tail[-1]])


PROBES = (
    Probe(
        name="pressure",
        proves="long prompts at once, with evictions and preemptions: each answers as alone",
        run=_pressure,
    ),
)
