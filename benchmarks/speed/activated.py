"""python -m benchmarks.speed.activated: an activated LoRA's first token over a hot base prefix.

The base model has read a prompt's prefix. Then an activated LoRA is asked, whose invocation tokens
stand behind it, and a plain LoRA of the same weights, which must read the prefix again; each turn
has a prefix of its own. Qwen2.5-0.5B's shape; the engine runs in this process.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import median

from benchmarks.common.busy import busy_cores
from benchmarks.common.facts import write_facts
from benchmarks.common.make_checkpoint import (
    ALL_PROJECTIONS,
    QWEN_0_5B,
    ModelShape,
    ensure_adapters,
    ensure_checkpoint,
)
from lora_serve.llm import LLM
from lora_serve.observability.table import text_table
from lora_serve.prompts import TokensPrompt
from lora_serve.sampling_params import SamplingParams

CACHE = Path("~/.cache/lora-serve/bench").expanduser()
INVOCATION = (7, 8, 9)
OWN_TOKENS = 16  # behind the invocation
FIRST_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokens:
    """Medians of the seconds to a first token, and the prompt tokens that were found."""

    prefix_tokens: int
    activated_seconds: float
    plain_seconds: float
    activated_found: int
    plain_found: int

    def rows(self) -> list[tuple[str, str]]:
        return [
            (f"plain, {self.plain_found:,} tokens found", f"{self.plain_seconds * 1e3:,.1f} ms"),
            (
                f"activated, {self.activated_found:,} tokens found",
                f"{self.activated_seconds * 1e3:,.1f} ms",
            ),
            ("activated, of plain", f"{self.activated_seconds / self.plain_seconds:.1%}"),
        ]


def activated_copy(adapter: Path, directory: Path) -> Path:
    """The adapter with invocation tokens, in a new directory."""
    shutil.copytree(adapter, directory)
    config = directory / "adapter_config.json"
    settings = json.loads(config.read_text()) | {"alora_invocation_tokens": INVOCATION}
    config.write_text(json.dumps(settings))
    return directory


def measure(
    model: Path, plain: Path, activated: Path, prefix_tokens: int, num_turns: int
) -> FirstTokens:
    rng = Random(prefix_tokens)
    seconds: dict[str, list[float]] = {"activated": [], "plain": []}
    found: dict[str, int] = {}
    with LLM(str(model), enable_lora=True) as llm:
        llm.load_lora_adapter("activated", str(activated))
        llm.load_lora_adapter("plain", str(plain))
        for turn in range(num_turns + 1):
            prefix = [rng.randrange(100, 1000) for _ in range(prefix_tokens)]
            own = [rng.randrange(100, 1000) for _ in range(OWN_TOKENS)]
            prompt = TokensPrompt((*prefix, *INVOCATION, *own))
            llm.generate(TokensPrompt(tuple(prefix)), FIRST_TOKEN)
            for name in seconds:
                start = time.perf_counter()
                (output,) = llm.generate(prompt, FIRST_TOKEN, lora_name=name)
                if turn:  # the first is for kernels and caches to get warm
                    seconds[name].append(time.perf_counter() - start)
                found[name] = output.num_cached_tokens
    return FirstTokens(
        prefix_tokens=prefix_tokens,
        activated_seconds=median(seconds["activated"]),
        plain_seconds=median(seconds["plain"]),
        activated_found=found["activated"],
        plain_found=found["plain"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefix-tokens", type=int, default=4000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--layers", type=int, default=QWEN_0_5B.num_hidden_layers)
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    args = parser.parse_args()
    shape: ModelShape = replace(QWEN_0_5B, num_hidden_layers=args.layers)
    suffix = "" if shape == QWEN_0_5B else f"-{args.layers}"
    model = ensure_checkpoint(CACHE / f"model{suffix}", shape)
    (plain,) = ensure_adapters(CACHE / f"r16{suffix}", 1, ALL_PROJECTIONS, shape).values()
    busy = busy_cores()
    with tempfile.TemporaryDirectory(prefix="lora-serve-activated-") as name:
        activated = activated_copy(plain, Path(name) / "adapter")
        figures = measure(model, plain, activated, args.prefix_tokens, args.turns)
    print(text_table(("first token", ""), figures.rows()))
    write_facts(args.out, busy_cores=busy, layers=args.layers, first_tokens=figures)


if __name__ == "__main__":
    main()
