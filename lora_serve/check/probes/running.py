"""What happens to an adapter, or to a client, while a request runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from lora_serve.check.answers import Answer
from lora_serve.check.findings import Need, NotSupportedError, ProbeFailedError, Violation
from lora_serve.check.lab import Lab
from lora_serve.check.probe import Probe
from lora_serve.check.server import ServerFaultError
from lora_serve.check.subjects import AskedModel, Version

LONG = (96, 384)  # tokens of an answer that is to run while something happens
LONGEST = 1536  # of a fast server's or a slow adapter's, where the context has room for them
BEGUN = 3  # pieces after which a request counts as running
NUM_LEAVING = 6
# When clients leave: so long after so many pieces. The first ones leave before their prompt is
# computed, wherever in it a server is by then.
LEAVE_AFTER = ((0.001, 0), (0.005, 0), (0.02, 0), (0.1, 0), (0.0, 1), (0.0, 3))
SETTLE_SECONDS = 0.05

Change = Callable[[AskedModel], Awaitable[None]]


async def _replace_while_running(lab: Lab) -> str:
    a, b = await lab.versions()

    async def change(speaker: AskedModel) -> None:
        await lab.load_new(b, speaker, in_place=True)

    return await _change_while_running(lab, a, b, change)


async def _unload_while_running(lab: Lab) -> str:
    a, b = await lab.versions()
    return await _change_while_running(lab, a, b, lab.unload)


async def _change_while_running(lab: Lab, a: Version, b: Version, change: Change) -> str:
    """An answer of A, as far as it came, must be A's, whatever the change did to its end."""
    for num_tokens in (*LONG, LONGEST) if lab.facts.is_room_for(LONGEST) else LONG:
        prompt = lab.prompt()
        fields = {"max_tokens": num_tokens}
        right = await lab.cold(a, prompt, **fields)
        known = {"version B": await lab.cold(b, prompt, **fields)}
        speaker = lab.new_speaker()
        await lab.load_new(a, speaker)
        stream = lab.stream(speaker, prompt, **fields, **await lab.cold_fields())
        await stream.until(BEGUN)
        if stream.has_ended and not stream.is_whole:
            raise ServerFaultError(f"a stream broke off: {stream.error}")
        await change(speaker)
        was_running = not stream.has_ended
        got = await stream.end()
        what = "A request whose adapter changed while it ran did not go on with what it began with."
        lab.must_equal(got, right, what, known, is_part=not stream.is_whole)
        if was_running:
            return "it was ended with an error" if stream.error else "it finished as it began"
    raise NotSupportedError("answers end before an adapter is changed; nothing ran meanwhile")


async def _gone_after_unload(lab: Lab) -> str:
    """A name that was unloaded is refused, and neither the base model nor old weights answer."""
    a, _ = await lab.versions()
    speaker, prompt = lab.new_speaker(), lab.prompt()
    await lab.load_new(a, speaker)
    await lab.ask(speaker, prompt)
    await lab.unload(speaker)
    try:
        got = await lab.ask(speaker, prompt)
    except ServerFaultError as error:
        if 400 <= error.status < 500:
            return f"HTTP {error.status}"
        raise
    known = {"the unloaded adapter": await lab.cold(a, prompt)}
    known["the base model"] = await lab.cold(None, prompt)
    raise ProbeFailedError(
        Violation(
            what="A name that had been unloaded was answered.",
            wrong=repr(got.text),
            hint=lab.hint(got, known),
        )
    )


async def _aborted_streams(lab: Lab) -> str:
    """Clients leave in the middle of prompts and answers; who asks the same next gets all of it."""
    for seconds, pieces in LEAVE_AFTER:
        prompts = [lab.prompt() for _ in range(2)]
        right = [await lab.cold(None, prompt) for prompt in prompts]
        streams = [
            lab.stream(lab.base, prompts[index % 2], max_tokens=LONG[0])
            for index in range(NUM_LEAVING)
        ]
        await asyncio.gather(*(stream.until(pieces) for stream in streams))
        await asyncio.sleep(seconds)
        await asyncio.gather(*(stream.leave() for stream in streams))
        await _ask_again(lab, prompts, right)
        await asyncio.sleep(SETTLE_SECONDS)
        await _ask_again(lab, prompts, right)
    return lab.hits()


async def _ask_again(lab: Lab, prompts: list[str], right: list[Answer]) -> None:
    got = await lab.ask_at_once([(lab.base, prompt) for prompt in prompts])
    for one, expected in zip(got, right, strict=True):
        what = "After clients had hung up, the same prompt was answered otherwise."
        lab.must_equal(one, expected, what)


PROBES = (
    Probe(
        name="replace-while-running",
        proves="a request finishes with the version that it began with, or with an error",
        needs=(Need.LOADS,),
        run=_replace_while_running,
    ),
    Probe(
        name="unload-while-running",
        proves="a request whose adapter is unloaded finishes with it, or with an error",
        needs=(Need.LOADS,),
        run=_unload_while_running,
    ),
    Probe(
        name="gone-after-unload",
        proves="a name that was unloaded is refused, and nothing else answers for it",
        needs=(Need.LOADS,),
        run=_gone_after_unload,
    ),
    Probe(
        name="aborted-streams",
        proves="clients that hang up leave no half-written KV behind",
        run=_aborted_streams,
    ),
)
