"""Calls that change adapters, at once or wrong: the server must live, and know what it serves."""

from __future__ import annotations

from random import Random

from lora_serve.check.findings import JsonObject, Need, ProbeFailedError, Violation
from lora_serve.check.lab import LOAD, UNLOAD, Lab, at_once
from lora_serve.check.probe import Probe
from lora_serve.check.server import COMPLETIONS, ServerFaultError
from lora_serve.check.subjects import AskedModel

NUM_TURNS = 6
CALLS_AT_ONCE = 6
MAY_ANSWER = (200, 400, 404, 409, 422, 429, 503)


async def _races(lab: Lab) -> str:
    """Loads, unloads, resets and requests of one name at once; then it is loaded in peace."""
    a, b = await lab.versions()
    prompt = lab.prompt()
    right = await lab.cold(a, prompt)
    known = {"version B": await lab.cold(b, prompt)}
    speaker = lab.new_speaker()
    place = lab.workspace.new_place
    paths = [lab.workspace.put(one.files, place()) for one in (a, b)]
    rng = Random(0)
    for _ in range(NUM_TURNS):
        calls = [_a_call(lab, rng, speaker, paths, prompt) for _ in range(CALLS_AT_ONCE)]
        statuses = await at_once(lab.server.status_of("POST", *call) for call in calls)
        for (path, _), status in zip(calls, statuses, strict=True):
            if status not in MAY_ANSWER:
                said = f"HTTP {status}" if status else "no answer"
                raise ProbeFailedError(
                    Violation(what=f"Among calls for one name at once, {path} gave {said}.")
                )
    await lab.server.status_of("POST", UNLOAD, {"lora_name": speaker.model})
    await lab.load(speaker, paths[0])
    for _ in range(2):
        got = await lab.ask(speaker, prompt)
        what = "After calls for one name at once, what was loaded last did not answer."
        lab.must_equal(got, right, what, known)
    return f"{NUM_TURNS * CALLS_AT_ONCE} calls; {lab.hits()}"


def _a_call(
    lab: Lab, rng: Random, speaker: AskedModel, paths: list[str], prompt: str
) -> tuple[str, JsonObject]:
    name: JsonObject = {"lora_name": speaker.model}
    load: JsonObject = {**name, "lora_path": rng.choice(paths)}
    calls = [
        (LOAD, load),
        (LOAD, {**load, "load_inplace": True}),
        (LOAD, {**load, "load_inplace": True}),
        (UNLOAD, name),
        (COMPLETIONS, lab.body(speaker, prompt)),
        (COMPLETIONS, lab.body(speaker, prompt)),
    ]
    if lab.facts.reset_route:
        calls.append((lab.facts.reset_route, {}))
    return rng.choice(calls)


async def _broken(lab: Lab) -> str:
    """A load of damaged files is refused as the caller's mistake, and what was there stays."""
    a, b = await lab.versions()
    prompt = lab.prompt()
    right = await lab.cold(a, prompt)
    speaker = lab.new_speaker()
    await lab.load_new(a, speaker)
    path = lab.workspace.put_broken(b.files, lab.workspace.new_place())
    status = await _load_status(lab, speaker, path)
    if status == 200:
        raise ProbeFailedError(Violation(what="An adapter whose weights are cut off was loaded."))
    what = "After a load of damaged files was refused, the adapter before it did not answer."
    try:
        got = await lab.ask(speaker, prompt)
    except ServerFaultError as error:
        raise ProbeFailedError(Violation(what=what, wrong=str(error))) from error
    lab.must_equal(got, right, what)
    if not 400 <= status < 500:
        raise ProbeFailedError(
            Violation(what=f"A load of damaged files gave HTTP {status}, not the caller's mistake.")
        )
    return f"HTTP {status}"


async def _load_status(lab: Lab, speaker: AskedModel, path: str) -> int:
    body: JsonObject = {"lora_name": speaker.model, "lora_path": path, "load_inplace": True}
    return await lab.server.status_of("POST", LOAD, body)


PROBES = (
    Probe(
        name="admin-races",
        proves="loads, unloads, resets and requests at once: the server lives and stays right",
        needs=(Need.LOADS,),
        run=_races,
    ),
    Probe(
        name="damaged-adapter",
        proves="a load of damaged files is refused with 4xx, and what was loaded stays",
        needs=(Need.LOADS,),
        run=_broken,
    ),
)
