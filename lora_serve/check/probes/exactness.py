"""What the cache gives must be what computing gives, in every field of an answer."""

from __future__ import annotations

from collections.abc import Mapping

from lora_serve.check.answers import Answer
from lora_serve.check.findings import Need, NotSupportedError, ProbeFailedError, Violation
from lora_serve.check.lab import Lab
from lora_serve.check.probe import Probe
from lora_serve.check.server import ServerFaultError

NUM_REPEATS = 3
NUM_ECHOED = 5  # words by which an echo is known
ENDS = tuple("abcdefghijklmnopqrstuvwx"[: length * 3] for length in range(1, 6))


async def _repeats(lab: Lab) -> str:
    prompt = lab.prompt()
    first = await lab.cold(None, prompt)
    for _ in range(NUM_REPEATS):
        got = await lab.cold(None, prompt)
        lab.must_equal(got, first, "A lone greedy request, repeated, was answered otherwise.")
    return f"{NUM_REPEATS + 1} times, by {lab.facts.cold_way.value}"


async def _cached(lab: Lab) -> str:
    prompt = lab.prompt()
    right = await lab.cold(None, prompt)
    for _ in range(NUM_REPEATS):
        got = await lab.ask(lab.base, prompt)
        lab.must_equal(
            got, right, "With its prompt in the cache, a request was answered otherwise."
        )
    return lab.hits()


async def _longer(lab: Lab) -> str:
    """Prompts that go on after a common beginning: hits end, and chunks begin, elsewhere."""
    prompt = lab.prompt()
    await lab.ask(lab.base, prompt)
    for end in ENDS:
        longer = f"{prompt} {' '.join(end)}"
        right = await lab.cold(None, longer)
        for _ in range(2):
            got = await lab.ask(lab.base, longer)
            what = (
                "With the beginning of its prompt in the cache, a request was answered otherwise."
            )
            lab.must_equal(got, right, what)
    return lab.hits()


async def _prompt_logprobs(lab: Lab) -> str:
    prompt, fields = lab.prompt(), {"prompt_logprobs": 1}
    right = await _cold_with(lab, prompt, fields)
    if not right.prompt_logprobs:
        raise NotSupportedError("it gives no prompt_logprobs")
    await lab.ask(lab.base, prompt)
    for _ in range(2):
        got = await lab.ask(lab.base, prompt, **fields)
        what = "With its prompt in the cache, a request's prompt_logprobs were others."
        lab.must_equal(got, right, what)
    return lab.hits()


async def _echo(lab: Lab) -> str:
    prompt, fields = lab.prompt(), {"echo": True}
    right = await _cold_with(lab, prompt, fields)
    if right.text.split()[:NUM_ECHOED] != prompt.split()[:NUM_ECHOED]:
        raise NotSupportedError("it does not echo prompts")
    await lab.ask(lab.base, prompt)
    for _ in range(2):
        got = await lab.ask(lab.base, prompt, **fields)
        what = "With its prompt in the cache, an echoed request was answered otherwise."
        lab.must_equal(got, right, what)
    return lab.hits()


async def _stop(lab: Lab) -> str:
    """A stop string ends a cached request where it ends a cold one, and is in no answer."""
    prompt = lab.prompt()
    whole = await lab.cold(None, prompt)
    stop = _middle(whole.text)
    right = await lab.cold(None, prompt, stop=[stop])
    for _ in range(2):
        got = await lab.ask(lab.base, prompt, stop=[stop])
        what = f"With its prompt in the cache, a request with the stop string {stop!r} differed."
        lab.must_equal(got, right, what)
    if stop in right.text:
        raise ProbeFailedError(
            Violation(what=f"An answer goes on over the stop string {stop!r}.", wrong=right.text)
        )
    return lab.hits()


def _middle(text: str) -> str:
    """A few characters out of the middle, which the answer is sure to reach."""
    middle = text[len(text) // 2 :][:4].strip() or text[:4].strip()
    if not middle:
        raise NotSupportedError("its answers have no text to stop at")
    return middle


async def _cold_with(lab: Lab, prompt: str, fields: Mapping[str, object]) -> Answer:
    try:
        return await lab.cold(None, prompt, **fields)
    except ServerFaultError as error:
        if error.status not in (400, 422):
            raise
        raise NotSupportedError(f"it refuses {', '.join(fields)}: {error}") from error


PROBES = (
    Probe(
        name="repeat-alone",
        proves="one greedy request, alone and without a cache, is always answered alike",
        needs=(Need.COLD,),
        run=_repeats,
    ),
    Probe(
        name="cached-logprobs",
        proves="tokens and logprobs of a cached prompt are those of a computed one",
        needs=(Need.LOGPROBS,),
        run=_cached,
    ),
    Probe(
        name="longer-prompts",
        proves="prompts that go on after a cached beginning are answered as if computed whole",
        run=_longer,
    ),
    Probe(
        name="prompt-logprobs-cached",
        proves="prompt_logprobs of a cached prompt are complete, and those of a computed one",
        run=_prompt_logprobs,
    ),
    Probe(
        name="echo-cached",
        proves="an echoed prompt and its logprobs are the same when it is cached",
        run=_echo,
    ),
    Probe(
        name="stop-cached",
        proves="a stop string ends a cached request where it ends a computed one",
        run=_stop,
    ),
)
