"""An adapter's name, or its path, comes to stand for other bytes: no old KV may answer for them."""

from __future__ import annotations

from lora_serve.check.answers import Answer
from lora_serve.check.findings import Need, NotSupportedError
from lora_serve.check.lab import Lab
from lora_serve.check.probe import Probe
from lora_serve.check.subjects import AskedModel, Version

STALE = "After B was loaded under A's name, the name did not answer as B does."


class Truths:
    """Cold answers of both versions to one prompt."""

    def __init__(self, prompt: str, a: Answer, b: Answer) -> None:
        self.prompt = prompt
        self.a, self.b = a, b
        self.known = {"version A": a, "version B": b}


async def truths(lab: Lab) -> tuple[Version, Version, Truths]:
    a, b = await lab.versions()
    prompt = lab.prompt()
    return a, b, Truths(prompt, await lab.cold(a, prompt), await lab.cold(b, prompt))


async def warm(lab: Lab, speaker: AskedModel, truth: Truths) -> None:
    """Ask twice as version A, so that its KV is cached."""
    for _ in range(2):
        got = await lab.ask(speaker, truth.prompt)
        lab.must_equal(got, truth.a, "A newly loaded adapter did not answer as it does.")


async def expect_b(lab: Lab, speaker: AskedModel, truth: Truths, what: str = STALE) -> None:
    """Ask twice as version B: the second request may find what the first one cached."""
    for _ in range(2):
        got = await lab.ask(speaker, truth.prompt)
        lab.must_equal(got, truth.b, what, truth.known)


async def _reload_in_place(lab: Lab) -> str:
    a, b, truth = await truths(lab)
    speaker = lab.new_speaker()
    await lab.load_new(a, speaker)
    await warm(lab, speaker, truth)
    await lab.load_new(b, speaker, in_place=True)
    await expect_b(lab, speaker, truth)
    return lab.hits()


async def _reload_after_unload(lab: Lab) -> str:
    a, b, truth = await truths(lab)
    speaker = lab.new_speaker()
    await lab.load_new(a, speaker)
    await warm(lab, speaker, truth)
    await lab.unload(speaker)
    await lab.load_new(b, speaker)
    await expect_b(lab, speaker, truth)
    return lab.hits()


async def _same_path_in_place(lab: Lab) -> str:
    a, b, truth = await truths(lab)
    speaker, place = lab.new_speaker(), lab.workspace.new_place()
    await lab.load(speaker, lab.workspace.put(a.files, place))
    await warm(lab, speaker, truth)
    await lab.load(speaker, lab.workspace.put(b.files, place), in_place=True)
    await expect_b(lab, speaker, truth)
    return lab.hits()


async def _same_path_after_unload(lab: Lab) -> str:
    a, b, truth = await truths(lab)
    speaker, place = lab.new_speaker(), lab.workspace.new_place()
    await lab.load(speaker, lab.workspace.put(a.files, place))
    await warm(lab, speaker, truth)
    await lab.unload(speaker)
    await lab.load(speaker, lab.workspace.put(b.files, place))
    await expect_b(lab, speaker, truth)
    return lab.hits()


async def _roll_back(lab: Lab) -> str:
    """A → B → A, each version at a path of its own."""
    a, b, truth = await truths(lab)
    speaker = lab.new_speaker()
    path = await lab.load_new(a, speaker)
    await warm(lab, speaker, truth)
    await lab.load_new(b, speaker, in_place=True)
    await expect_b(lab, speaker, truth)
    await lab.load(speaker, path, in_place=True)
    await _expect_a_again(lab, speaker, truth)
    return lab.hits()


async def _expect_a_again(lab: Lab, speaker: AskedModel, truth: Truths) -> None:
    for _ in range(2):
        got = await lab.ask(speaker, truth.prompt)
        what = "After A was loaded again over B, the name did not answer as A does."
        lab.must_equal(got, truth.a, what, truth.known)


async def _restored_backup(lab: Lab) -> str:
    """A → B → A at one path, the last from a backup that keeps its old times."""
    a, b, truth = await truths(lab)
    speaker, place = lab.new_speaker(), lab.workspace.new_place()
    await lab.load(speaker, lab.workspace.put(a.files, place))
    await warm(lab, speaker, truth)
    in_place = True
    try:
        await lab.load(speaker, lab.workspace.put(b.files, place), in_place=True)
    except NotSupportedError:
        in_place = False
        await lab.unload(speaker)
        await lab.load(speaker, lab.workspace.put(b.files, place))
    await expect_b(lab, speaker, truth)
    if not in_place:
        await lab.unload(speaker)
    path = lab.workspace.put(a.files, place, is_old=True)
    await lab.load(speaker, path, in_place=in_place)
    await _expect_a_again(lab, speaker, truth)
    return lab.hits()


async def _names_change_places(lab: Lab) -> str:
    """Two names are unloaded, and each is given to the other's adapter."""
    a, b, truth = await truths(lab)
    one, two = lab.new_speaker(), lab.new_speaker()
    path_a, path_b = await lab.load_new(a, one), await lab.load_new(b, two)
    await warm(lab, one, truth)
    await lab.ask(two, truth.prompt)
    await lab.unload(one)
    await lab.unload(two)
    await lab.load(one, path_b)
    await lab.load(two, path_a)
    what = "After two adapters changed names, the first name did not answer as B does."
    await expect_b(lab, one, truth, what)
    for _ in range(2):
        got = await lab.ask(two, truth.prompt)
        what = "After two adapters changed names, the second name did not answer as A does."
        lab.must_equal(got, truth.a, what, truth.known)
    return lab.hits()


PROBES = (
    Probe(
        name="reload-in-place",
        proves="load_inplace under the same name, from another path: the new weights answer",
        needs=(Need.LOADS,),
        run=_reload_in_place,
    ),
    Probe(
        name="reload-after-unload",
        proves="unload, then load another adapter under the same name: the new weights answer",
        needs=(Need.LOADS,),
        run=_reload_after_unload,
    ),
    Probe(
        name="same-path-in-place",
        proves="new bytes at the same path and load_inplace: the new weights answer",
        needs=(Need.LOADS,),
        run=_same_path_in_place,
    ),
    Probe(
        name="same-path-after-unload",
        proves="new bytes at the same path, unload and load: the new weights answer",
        needs=(Need.LOADS,),
        run=_same_path_after_unload,
    ),
    Probe(
        name="roll-back",
        proves="A, then B, then A again in place: the old weights answer again",
        needs=(Need.LOADS,),
        run=_roll_back,
    ),
    Probe(
        name="restored-backup",
        proves="old bytes, with their old times, over new ones at one path: they answer again",
        needs=(Need.LOADS,),
        run=_restored_backup,
    ),
    Probe(
        name="name-reuse",
        proves="two adapters change names: each name answers as what it now stands for",
        needs=(Need.LOADS,),
        run=_names_change_places,
    ),
)
