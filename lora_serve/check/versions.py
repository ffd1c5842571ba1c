"""Finds two adapters that answer differently: the user's, made up ones, or those that are served.

Where there are none, the probes that need them learn why.
"""

from __future__ import annotations

from pathlib import Path

from lora_serve.check.adapters import ModelShape, write_adapter
from lora_serve.check.answers import distance
from lora_serve.check.findings import Need, NotSupportedError
from lora_serve.check.lab import LOAD, Lab
from lora_serve.check.server import ServerFaultError
from lora_serve.check.subjects import AskedModel, Version
from lora_serve.errors import ConfigError

Pair = tuple[Version, Version]

GAINS = (2.0, 8.0, 32.0)
LEAST_DISTANCE = 0.5  # of two versions' logprobs, so that no rounding is taken for another version
MOST_PROMPTS = 4  # asked of two versions before they are taken for alike
NO_ROUTE = (0, 401, 403, 404, 405, 501)
NAMES = ("the base model", "adapter A", "adapter B")


async def prepare(lab: Lab) -> None:
    """Give the lab its two versions, or the reason why it has none."""
    try:
        lab.pair = await _find(lab)
    except (ConfigError, NotSupportedError) as error:
        reason = str(error)
    except ServerFaultError as error:
        reason = f"an adapter could not be used: {error}"
    else:
        return
    lab.lack(Need.LOADS, reason)
    lab.lack(Need.ADAPTERS, reason)


async def _find(lab: Lab) -> Pair:
    settings = lab.settings
    status = await lab.server.status_of("POST", LOAD, {})
    if settings.served or status in NO_ROUTE:
        lab.lack(Need.LOADS, _no_loads(status))
        served = settings.served or tuple(map(AskedModel, lab.facts.adapters))
        if len(served) < 2:
            raise NotSupportedError(_no_loads(status))
        return await _distinct(lab, (Version("A", None, served[0]), Version("B", None, served[1])))
    if settings.adapters:
        copy = lab.workspace.copy_adapter
        one, two = settings.adapters
        return await _distinct(
            lab, (Version("A", copy(one, "version-a")), Version("B", copy(two, "version-b")))
        )
    return await _made_up(lab)


async def _made_up(lab: Lab) -> Pair:
    """Adapters for the shapes of the model, stronger and stronger until they answer unlike it."""
    path = lab.settings.model_path or lab.facts.root
    if not path or not Path(path).is_dir():
        raise NotSupportedError(
            "adapters can be made up only for a model whose config.json can be read here: give "
            "its directory with --model-path, or two adapters with --adapter"
        )
    shape = ModelShape.read(Path(path))
    for gain in GAINS:
        versions = []
        for seed, label in enumerate("AB"):
            directory = lab.workspace.root / f"version-{label.lower()}-{gain:g}"
            write_adapter(directory, shape, path, seed, gain)
            versions.append(Version(label, directory))
        try:
            return await _distinct(lab, (versions[0], versions[1]))
        except NotSupportedError as error:
            await lab.forget_references()
            reason = error
    raise reason


async def _distinct(lab: Lab, pair: Pair) -> Pair:
    """The pair, if it and the base model give three different answers to one of some prompts.

    One prompt is not enough: two versions may part at a token that both held for as likely.
    """
    least = max(LEAST_DISTANCE, 10 * lab.settings.tolerance)
    for _ in range(MOST_PROMPTS):
        prompt, answers = lab.prompt(), []
        for who in (None, *pair):
            speaker = lab.base if who is None else await lab.reference(who)
            body = {**lab.body(speaker, prompt), **await lab.cold_fields()}
            answers.append(await lab.server.complete(body))
        alike = [
            f"{NAMES[one]} and {NAMES[other]}"
            for one, other in ((0, 1), (0, 2), (1, 2))
            if distance(answers[one], answers[other]) < least
        ]
        if not alike:
            return pair
    raise NotSupportedError(
        f"{alike[0]} answer too much alike for a wrong answer to show; is the adapter applied? "
        "Else give stronger ones (--adapter)"
    )


def _no_loads(status: int) -> str:
    if status in (401, 403):
        return (
            f"the key may not load adapters (HTTP {status}); give one that may: "
            "--admin-api-key-file"
        )
    return (
        "it has no route that loads adapters (lora-serve: --enable-lora; vLLM: --enable-lora and "
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1); or name two that are served: --served-adapter"
    )
