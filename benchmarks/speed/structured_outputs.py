"""python -m benchmarks.speed.structured_outputs: what grammars cost decode, as table and JSON.

    python -m benchmarks.speed.structured_outputs --requests 8 --seconds 140

takes less than three minutes where the checkpoint is there. Requests run in an engine of
Qwen2.5-0.5B's shape, each held to a grammar of its own, beside the same requests without one. The
one rule: both take turns, so that a neighbour on the machine slows both or neither. Greedy requests
are screened among what is allowed, as plain ones are among all tokens; sampled ones compute all
logits either way.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median

from benchmarks.common.facts import write_facts
from benchmarks.common.make_checkpoint import ensure_checkpoint
from lora_serve import LLM, SamplingParams, StructuredOutput, TokensPrompt

PROMPT_TOKENS = 64
SHORT, LONG = 8, 72  # tokens of an answer; a step is their difference
HEAD = (
    "| requests | drawn | turns | plain ms a step | with grammars | cost | of single turns |\n"
    "|--:|---|--:|--:|--:|--:|--:|"
)


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians over turns; cost, least, most: of the turns' own ratios, less 1."""

    num_requests: int
    drawn: str
    num_turns: int
    plain_ms: float
    held_ms: float
    cost: float
    least: float
    most: float


def grammar(number: int) -> StructuredOutput:
    """A schema like no other, which no answer of LONG tokens fulfils."""
    record = {
        "type": "object",
        "properties": {
            f"name_{number}": {"type": "string", "minLength": 4},
            "tags": {"type": "array", "items": {"enum": ["a", "bb", f"c{number}"]}, "minItems": 2},
            "size": {"type": "number"},
        },
        "required": [f"name_{number}", "tags", "size"],
        "additionalProperties": False,
    }
    return StructuredOutput.of(json={"type": "array", "items": record, "minItems": 1000})


def params(number: int, temperature: float, max_tokens: int, *, held: bool) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        seed=number,
        ignore_eos=True,
        structured_outputs=grammar(number) if held else None,
    )


def step_seconds(llm: LLM, num_requests: int, temperature: float, *, held: bool) -> float:
    """Seconds of one decode step, without what a prompt and an answer's begin take."""
    prompts = [
        TokensPrompt(tuple(range(1000 * number, 1000 * number + PROMPT_TOKENS)))
        for number in range(1, num_requests + 1)
    ]

    def seconds(max_tokens: int) -> float:
        chosen = [
            params(number, temperature, max_tokens, held=held) for number in range(num_requests)
        ]
        begin = time.perf_counter()
        outputs = llm.generate(prompts, chosen)
        taken = time.perf_counter() - begin
        assert all(len(output.outputs[0].token_ids) == max_tokens for output in outputs)
        return taken

    return (seconds(LONG) - seconds(SHORT)) / (LONG - SHORT)


def measure(
    llm: LLM, num_requests: int, temperature: float, num_turns: int, patience_seconds: float
) -> Cost:
    """patience_seconds: no turn begins after them, but for the first."""
    deadline = time.monotonic() + patience_seconds
    for held in (False, True):  # compiles, and fills the prefix cache
        step_seconds(llm, num_requests, temperature, held=held)
    plain, with_grammar = [], []
    while not plain or (len(plain) < num_turns and time.monotonic() < deadline):
        is_held_first = len(plain) % 2 == 1
        for held in (is_held_first, not is_held_first):
            times = with_grammar if held else plain
            times.append(step_seconds(llm, num_requests, temperature, held=held))
    ratios = [b / a for a, b in zip(plain, with_grammar, strict=True)]
    return Cost(
        num_requests,
        "sampled" if temperature else "greedy",
        len(plain),
        median(plain) * 1e3,
        median(with_grammar) * 1e3,
        median(ratios) - 1,
        min(ratios) - 1,
        max(ratios) - 1,
    )


def table_line(cost: Cost) -> str:
    return (
        f"| {cost.num_requests} | {cost.drawn} | {cost.num_turns} | {cost.plain_ms:.2f} | "
        f"{cost.held_ms:.2f} | {cost.cost:+.1%} | {cost.least:+.1%} to {cost.most:+.1%} |"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--turns", type=int, default=9, help="at most, of each line")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="for all turns; the last ones may be late"
    )
    parser.add_argument(
        "--checkpoint", type=Path, default=Path.home() / ".cache/lora-serve/benchmark-0.5b"
    )
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    costs = []
    model = str(ensure_checkpoint(arguments.checkpoint))
    size = {"max_model_len": 512, "num_gpu_blocks_override": 512}
    with LLM(model, speculation="off", **size) as llm:  # a step is one token
        print(HEAD, flush=True)
        lines = list(product(arguments.requests, (1.0, 0.0)))
        patience = arguments.seconds / len(lines)
        for num_requests, temperature in lines:
            costs.append(measure(llm, num_requests, temperature, arguments.turns, patience))
            print(table_line(costs[-1]), flush=True)
    write_facts(arguments.out, costs=costs)


if __name__ == "__main__":
    main()
