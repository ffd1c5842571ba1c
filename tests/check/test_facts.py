from __future__ import annotations

from pathlib import Path

import pytest

from lora_serve.check.catalog import chosen
from lora_serve.check.facts import ColdWay, discover
from lora_serve.check.probe import Outcome, Verdict
from lora_serve.check.runner import EXIT_FAILED, EXIT_NOT_RUN, EXIT_PASSED, exit_code, run
from lora_serve.check.server import Server, Target
from lora_serve.errors import ConfigError
from tests.check.conftest import OpenLab
from tests.fakes.cached_server import Bug, CachedServer
from tests.fakes.http_server import Call, Handler, listening


@pytest.mark.parametrize(
    ("lacks", "way"),
    [
        ({}, ColdWay.SALT),
        ({"has_salts": False}, ColdWay.RESET),
        ({"has_salts": False, "has_reset": False}, ColdWay.NONE),
        ({"bug": Bug.KEY_IGNORES_SALTS}, ColdWay.RESET),
        ({"tells_cached": False}, ColdWay.SALT),
        ({"has_cache": False}, ColdWay.NO_CACHE),
    ],
)
async def test_a_way_past_the_cache_is_found(
    open_lab: OpenLab, model_root: Path, lacks: dict[str, bool], way: ColdWay
) -> None:
    async with open_lab(CachedServer(str(model_root), **lacks)) as lab:  # type: ignore[arg-type]
        assert lab.facts.cold_way is way
        assert lab.facts.tells_cached == lacks.get("tells_cached", True)


async def test_fields_that_are_refused_are_left_out(model_root: Path) -> None:
    fake = CachedServer(str(model_root))

    async def strict(call: Call) -> None:
        unknown = {"ignore_eos", "seed"} & set(call.body or {})
        if unknown:
            message = f"unknown field {sorted(unknown)[0]}"
            await call.reply({"error": {"message": message}}, 400)
        else:
            await fake(call)

    async with listening(strict) as url, Server(Target(url=url)) as server:
        facts = await discover(server, "", 200, "c0ffee")
    assert set(facts.extras) == {"logprobs"}
    assert facts.has_logprobs
    assert facts.max_model_len == 4096


async def refuse_all(call: Call) -> None:
    await call.reply({"error": "no"}, 500)


async def lists_nothing(call: Call) -> None:
    await call.reply({"data": "nothing"})


async def wants_a_key(call: Call) -> None:
    await call.reply({"error": "no"}, 401)


@pytest.mark.parametrize(
    ("handler", "words"),
    [
        (refuse_all, "name one with --model"),
        (lists_nothing, "name one with --model"),
        (wants_a_key, "give a key"),
    ],
)
async def test_a_server_that_cannot_be_asked_is_told(handler: Handler, words: str) -> None:
    async with listening(handler) as url, Server(Target(url=url)) as server:
        with pytest.raises(ConfigError, match=words):
            await discover(server, "", 200, "c0ffee")


async def test_a_model_can_be_named_where_none_is_listed(model_root: Path) -> None:
    fake = CachedServer(str(model_root))

    async def unlisted(call: Call) -> None:
        if call.path == "/v1/models":
            await call.reply({}, 404)
        else:
            await fake(call)

    async with listening(unlisted) as url, Server(Target(url=url)) as server:
        assert (await discover(server, "base", 200, "c0ffee")).model == "base"


async def outcomes(open_lab: OpenLab, fake: CachedServer, **settings: object) -> list[Outcome]:
    names = ("cached-logprobs", "two-adapters", "cache-salts", "reload-in-place", "prompt-embeds")
    async with open_lab(fake, **settings) as lab:
        return [one async for one in run(lab, chosen(names), 20.0)]


async def test_what_a_server_lacks_is_told_with_the_reason(
    open_lab: OpenLab, model_root: Path
) -> None:
    fake = CachedServer("", has_salts=False, has_reset=False, has_loads=False, tells_cached=False)
    found = await outcomes(open_lab, fake)
    assert exit_code(found) == EXIT_PASSED
    notes = {one.probe.name: one.note for one in found if one.verdict is Verdict.UNSUPPORTED}
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in notes["reload-in-place"]
    assert "no cache_salt" in notes["cache-salts"]
    assert "--model-path" in notes["prompt-embeds"] or "without the cache" in notes["prompt-embeds"]
    assert found[0].note == "the server counts no hits"


async def test_adapters_that_are_served_take_the_place_of_loaded_ones(
    open_lab: OpenLab, model_root: Path, tmp_path: Path
) -> None:
    fake = CachedServer(str(model_root))
    async with open_lab(fake) as lab:
        assert [one async for one in run(lab, chosen(["two-adapters"]), 20.0)]
        loaded = dict(fake.adapters)
    fake.has_loads, fake.adapters = False, dict(list(loaded.items())[:2])
    found = {one.probe.name: one.verdict for one in await outcomes(open_lab, fake)}
    assert found["two-adapters"] is Verdict.PASS
    assert found["reload-in-place"] is Verdict.UNSUPPORTED


async def test_a_tolerance_looks_past_rounding_and_not_past_other_weights(
    open_lab: OpenLab, model_root: Path
) -> None:
    noisy = CachedServer(str(model_root), noise=1e-3)
    for tolerance, verdict in ((0.0, Verdict.FAIL), (0.01, Verdict.PASS)):
        async with open_lab(noisy, tolerance=tolerance) as lab:
            (found,) = [one async for one in run(lab, chosen(["equal-prompts-at-once"]), 20.0)]
        assert found.verdict is verdict
    assert found.violation is None
    stale = CachedServer(str(model_root), Bug.KEY_HOLDS_THE_NAME, noise=1e-3)
    async with open_lab(stale, tolerance=0.01) as lab:
        (found,) = [one async for one in run(lab, chosen(["reload-in-place"]), 20.0)]
    assert found.verdict is Verdict.FAIL
    assert found.violation is not None
    assert not found.violation.is_rounding


async def test_after_the_server_is_gone_the_rest_is_not_run(
    open_lab: OpenLab, model_root: Path
) -> None:
    fake, names = CachedServer(str(model_root)), ("cached-logprobs", "stop-cached")
    async with open_lab(fake, timeout_seconds=0.3) as lab:
        fake.dies = True
        found = [one async for one in run(lab, chosen(names), 0.3)]
    assert [one.verdict for one in found] == [Verdict.ERROR] * 2
    assert "no longer answers since cached-logprobs" in found[1].note
    assert exit_code(found) == EXIT_NOT_RUN


async def test_a_server_that_dies_of_a_probe_fails_it(open_lab: OpenLab, model_root: Path) -> None:
    fake = CachedServer(str(model_root))
    async with open_lab(fake) as lab:
        fake.breaks = True
        found = [one async for one in run(lab, chosen(["cached-logprobs", "stop-cached"]), 20.0)]
    assert [one.verdict for one in found] == [Verdict.FAIL, Verdict.ERROR]
    assert "the engine is dead" in found[0].note


def test_failures_go_before_errors_in_the_exit_code() -> None:
    (probe,) = chosen(["pressure"])
    verdicts = (Verdict.PASS, Verdict.ERROR, Verdict.FAIL)
    found = [Outcome(probe=probe, verdict=verdict) for verdict in verdicts]
    codes = [exit_code(found[:number]) for number in (0, 1, 2, 3)]
    assert codes == [EXIT_NOT_RUN, EXIT_PASSED, EXIT_NOT_RUN, EXIT_FAILED]
