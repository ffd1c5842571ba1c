"""Each probe passes a server without bugs, and fails one that has the bug it is for."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_serve.check.catalog import PROBES, chosen
from lora_serve.check.probe import Outcome, Verdict
from lora_serve.check.runner import run
from tests.check.conftest import OpenLab
from tests.fakes.cached_server import Bug, CachedServer

CAUGHT = {
    Bug.ANSWERS_VARY: "repeat-alone",
    Bug.CACHED_PROMPTS_ROUND_OTHERWISE: "cached-logprobs",
    Bug.HITS_ARE_A_BLOCK_TOO_LONG: "longer-prompts",
    Bug.NO_LOGPROBS_OF_CACHED_TOKENS: "prompt-logprobs-cached",
    Bug.CACHED_TOKENS_ARE_NOT_ECHOED: "echo-cached",
    Bug.CACHED_REQUESTS_PASS_OVER_STOP: "stop-cached",
    Bug.KEY_IGNORES_THE_ADAPTER: "two-adapters",
    Bug.BASE_HAS_THE_KEY_OF_THE_LAST_ADAPTER: "adapter-and-base",
    Bug.KEY_IGNORES_SALTS: "cache-salts",
    Bug.KEY_HOLDS_PLACEHOLDERS_OF_EMBEDS: "prompt-embeds",
    Bug.KEY_HOLDS_THE_NAME: "reload-in-place reload-after-unload name-reuse roll-back",
    Bug.KEY_HOLDS_NAME_AND_PATH: "same-path-in-place same-path-after-unload",
    Bug.OLD_FILES_ARE_NOT_READ: "restored-backup",
    Bug.WEIGHTS_ARE_FOUND_BY_NAME: "replace-while-running",
    Bug.UNLOADED_REQUESTS_GO_ON_AS_BASE: "unload-while-running",
    Bug.UNKNOWN_NAMES_ARE_THE_BASE: "gone-after-unload",
    Bug.BLOCKS_OF_ABORTED_REQUESTS_ARE_OFFERED: "aborted-streams",
    Bug.BLOCKS_ARE_OFFERED_WHEN_SCHEDULED: "equal-prompts-at-once",
    Bug.SEEDS_SET_ONE_GENERATOR: "seeded-at-once",
    Bug.ONE_ADAPTER_IS_ACTIVE: "adapters-at-once",
    Bug.EVICTED_BLOCKS_KEEP_THEIR_KEY: "pressure",
    Bug.CONCURRENT_LOADS_FAIL: "admin-races",
    Bug.BROKEN_LOADS_GIVE_500: "damaged-adapter",
    Bug.BROKEN_LOADS_DROP_WHAT_WAS_THERE: "damaged-adapter",
}


async def outcomes(open_lab: OpenLab, fake: CachedServer, *names: str) -> dict[str, Outcome]:
    async with open_lab(fake) as lab:
        return {one.probe.name: one async for one in run(lab, chosen(names), 20.0)}


def test_every_bug_is_for_a_probe_and_every_probe_has_one() -> None:
    assert set(CAUGHT) == set(Bug) - {Bug.NONE}
    assert set(" ".join(CAUGHT.values()).split()) == {probe.name for probe in PROBES}


async def test_a_server_without_bugs_passes_every_probe(
    open_lab: OpenLab, model_root: Path
) -> None:
    fake = CachedServer(str(model_root))
    found = await outcomes(open_lab, fake)
    assert {name: one.note for name, one in found.items() if one.verdict is not Verdict.PASS} == {}
    assert fake.adapters == {}


@pytest.mark.parametrize("bug", CAUGHT, ids=lambda bug: bug.name)
async def test_a_bug_fails_its_probes(open_lab: OpenLab, model_root: Path, bug: Bug) -> None:
    names = CAUGHT[bug].split()
    found = await outcomes(open_lab, CachedServer(str(model_root), bug), *names)
    assert {name: found[name].verdict for name in names} == dict.fromkeys(names, Verdict.FAIL)
    for name in names:
        assert found[name].violation is not None
        assert found[name].exchanges
