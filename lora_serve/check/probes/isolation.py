"""One prompt, asked of several adapters, in several namespaces, or as embeddings."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from pathlib import Path

from lora_serve.check.adapters import ModelShape
from lora_serve.check.answers import Answer
from lora_serve.check.findings import Need, NotSupportedError, ProbeFailedError, Violation
from lora_serve.check.lab import Lab
from lora_serve.check.probe import Probe
from lora_serve.check.server import ServerFaultError
from lora_serve.check.subjects import AskedModel, Embeds
from lora_serve.errors import ConfigError

NUM_ROWS = 300  # of embeddings: some blocks of a cache
MOST_SHARED = 0.25  # of a prompt: first tokens that two prompts may have in common


async def _two_adapters(lab: Lab) -> str:
    a, b = await lab.versions()
    return await _in_turn(lab, {"adapter A": await lab.speaker_of(a),
                                "adapter B": await lab.speaker_of(b)})  # fmt: skip


async def _adapter_and_base(lab: Lab) -> str:
    a, _ = await lab.versions()
    return await _in_turn(lab, {"the base model": lab.base, "adapter A": await lab.speaker_of(a)})


async def _in_turn(lab: Lab, speakers: Mapping[str, AskedModel]) -> str:
    """All ask one prompt in turn, in both orders; each must answer as it does alone."""
    for order in (list(speakers), list(speakers)[::-1]):
        prompt = lab.prompt()
        right = {name: await lab.ask_cold(speakers[name], prompt) for name in order}
        for name in order * 2:
            got = await lab.ask(speakers[name], prompt)
            what = f"After others had asked the same prompt, {name} did not answer as alone."
            lab.must_equal(got, right[name], what, right)
    return lab.hits()


async def _salts(lab: Lab) -> str:
    """Equal prompts under different salts find nothing of each other; under one salt, they do."""
    prompt = lab.prompt()
    right = await lab.cold(None, prompt)
    salts = [f"tenant-{one}-{lab.settings.nonce}" for one in ("a", "b", "a")]
    first, second, third = [await lab.ask(lab.base, prompt, cache_salt=salt) for salt in salts]
    unsalted = await lab.ask(lab.base, prompt)
    for got in (first, second, third, unsalted):
        lab.must_equal(got, right, "A prompt with a cache_salt was answered otherwise.")
    for name, got in (("another salt", second), ("no salt", unsalted)):
        if _shares(got):
            raise ProbeFailedError(
                Violation(
                    what=f"A request with {name} found {got.num_cached_tokens} tokens of KV that "
                    "was cached under the first salt."
                )
            )
    return lab.hits()


async def _embeds(lab: Lab) -> str:
    one, two = (_random_embeds(lab, seed) for seed in (1, 2))
    right = {
        "the first embeddings": await _cold_of_embeds(lab, one),
        "the second embeddings": await _cold_of_embeds(lab, two),
    }
    names = list(right)
    for embeds, name in zip((one, two) * 2, names * 2, strict=True):
        got = await lab.ask(lab.base, embeds)
        what = f"After others of their length, {name} were not answered as alone."
        lab.must_equal(got, right[name], what, right)
    return lab.hits()


async def _cold_of_embeds(lab: Lab, embeds: Embeds) -> Answer:
    try:
        return await lab.ask_cold(lab.base, embeds)
    except ServerFaultError as error:
        if error.status in (0, 500):
            raise
        raise NotSupportedError(
            f"it takes no prompt_embeds (lora-serve, vLLM: --enable-prompt-embeds): {error}"
        ) from error


def _random_embeds(lab: Lab, seed: int) -> Embeds:
    """Random rows of the model's width, as torch.save writes them; other ones in each run."""
    path = lab.settings.model_path or lab.facts.root
    if not path or not Path(path).is_dir():
        raise NotSupportedError("the width of its embeddings is not known; give --model-path")
    try:
        width = ModelShape.read(Path(path)).hidden_size
    except ConfigError as error:
        raise NotSupportedError(str(error)) from error
    import torch  # slow to import; only this probe needs it

    length = min(NUM_ROWS, (lab.facts.max_model_len or 2 * NUM_ROWS) // 2)
    generator = torch.Generator().manual_seed(int(lab.settings.nonce, 16) + seed)
    rows = torch.randn(length, width, generator=generator)
    buffer = io.BytesIO()
    torch.save(rows, buffer)
    return Embeds(base64.b64encode(buffer.getvalue()).decode())


def _shares(answer: Answer) -> bool:
    asked = answer.num_prompt_tokens or 0
    return (answer.num_cached_tokens or 0) > MOST_SHARED * asked


PROBES = (
    Probe(
        name="two-adapters",
        proves="two adapters with one prompt: neither decodes on the other's KV",
        needs=(Need.ADAPTERS, Need.COLD),
        run=_two_adapters,
    ),
    Probe(
        name="adapter-and-base",
        proves="the base model and an adapter with one prompt: neither decodes on the other's KV",
        needs=(Need.ADAPTERS, Need.COLD),
        run=_adapter_and_base,
    ),
    Probe(
        name="cache-salts",
        proves="a prompt finds no KV that was cached under another cache_salt",
        needs=(Need.SALTS, Need.CACHED_TOKENS),
        run=_salts,
    ),
    Probe(
        name="prompt-embeds",
        proves="embeddings of one length and different content never share KV",
        needs=(Need.EMBEDS, Need.COLD),
        run=_embeds,
    ),
)
