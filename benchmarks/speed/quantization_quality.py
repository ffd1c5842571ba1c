"""What quantisation costs in quality: python -m benchmarks.speed.quantization_quality.

Each arithmetic computes the same token sequences in one pass, and is compared with float32: on
the trained demo model by perplexity and greedy choice, on random weights of Qwen2.5-0.5B's shape
by logits. Large models lose less by quantisation than so small a one; random weights lose most,
since nothing was ever trained to stand out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.common.facts import write_json
from benchmarks.common.make_checkpoint import QWEN_0_5B, ensure_checkpoint
from lora_serve.bench.machine import describe_machine
from lora_serve.config import ModelConfig
from lora_serve.demo.corpus import facts, filler
from lora_serve.demo.model import ensure_demo
from lora_serve.identity import BASE_MODEL
from lora_serve.step import AskedOutputs, PromptScoring, ScheduledRequest
from lora_serve.worker.batch_builder import BatchBuilder
from lora_serve.worker.device import CpuDevice
from lora_serve.worker.kv_cache import allocate_kv_caches
from lora_serve.worker.loaded_model import LoadedModel, load_model

BLOCK_SIZE = 16
BASE = "float32"
ARITHMETICS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "int8": {"quantization": "int8"},
    "int8, activations in 8 bits": {"quantization": "int8", "quantize_activations": True},
    "int4": {"quantization": "int4"},
    "int4, activations in 8 bits": {"quantization": "int4", "quantize_activations": True},
}
Tokens = Sequence[int]


@dataclass(frozen=True, slots=True)
class Quality:
    """Against float32, over all positions of all sequences.

    perplexity: of the sequences themselves; of random weights it says nothing. agreement: share of
    positions with the same greedy choice. max_error, rms_error: of logits, in units of the
    standard deviation that float32's logits have at a position.
    """

    arithmetic: str
    perplexity: float
    agreement: float
    max_error: float
    rms_error: float


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and what it computes."""

    title: str
    directory: Path
    sequences: Sequence[Tokens]
    is_trained: bool


def demo_subject() -> Subject:
    """Every fact that the model was taught, as a chat; and prose that it was taught to read."""
    directory = ensure_demo(lambda line: print(line, file=sys.stderr)).model
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    chats = [
        [{"role": "user", "content": fact.request}, {"role": "assistant", "content": fact.answer}]
        for fact in facts()
    ]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    texts += [filler(Random(seed), 40) for seed in range(8)]
    return Subject("The trained demo model", directory, list(map(tokenizer.encode, texts)), True)


def random_subject() -> Subject:
    rng, vocabulary = Random(0), range(QWEN_0_5B.vocab_size)
    directory = ensure_checkpoint(Path.home() / ".cache" / "lora-serve" / "bench" / "model")
    sequences = [rng.choices(vocabulary, k=48) for _ in range(4)]
    return Subject("Random weights in the shape of Qwen2.5-0.5B", directory, sequences, False)


SUBJECTS: dict[str, Callable[[], Subject]] = {"demo": demo_subject, "random": random_subject}


@torch.inference_mode()
def all_logits(directory: Path, arithmetic: str, sequences: Sequence[Tokens]) -> list[Tensor]:
    """(num_tokens, V) of each sequence, computed alone."""
    settings = ARITHMETICS.get(arithmetic, {"dtype": BASE})
    settings = {"model": str(directory), "dtype": "bfloat16", "device": "cpu"} | settings
    config = ModelConfig(**settings)
    model = load_model(config, CpuDevice(), BLOCK_SIZE)
    return [logits_of(model, sequence) for sequence in sequences]


def logits_of(model: LoadedModel, tokens: Tokens) -> Tensor:
    num_blocks = -(-len(tokens) // BLOCK_SIZE)
    caches = allocate_kv_caches(
        model.spec.kv_specs(), model.ops, num_blocks, BLOCK_SIZE, model.dtype
    )
    hidden_size, group_of = model.spec.hidden_size, [0] * len(caches)
    builder = BatchBuilder(model.ops, model.device, BLOCK_SIZE, hidden_size, model.dtype, group_of)
    request = ScheduledRequest(
        "all",
        BASE_MODEL,
        0,
        tokens,
        [range(num_blocks)],
        asked=AskedOutputs(scoring=PromptScoring(tokens, 0)),
    )
    rows = builder.lay_out([request], lambda _: None)
    hidden = model.model.forward(builder.to_device(rows), caches)
    return model.model.logits(hidden).float()


def compare(
    arithmetic: str, sequences: Sequence[Tokens], got: Sequence[Tensor], base: Sequence[Tensor]
) -> Quality:
    losses = [
        torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:]), reduction="none")
        for logits, tokens in zip(got, sequences, strict=True)
    ]
    same = [g.argmax(-1) == b.argmax(-1) for g, b in zip(got, base, strict=True)]
    errors = [(g - b) / b.std(-1, keepdim=True) for g, b in zip(got, base, strict=True)]
    return Quality(
        arithmetic=arithmetic,
        perplexity=torch.cat(losses).mean().exp().item(),
        agreement=torch.cat(same).float().mean().item(),
        max_error=max(error.abs().max().item() for error in errors),
        rms_error=torch.cat([error.square().mean(-1) for error in errors]).mean().sqrt().item(),
    )


def judge(directory: Path, sequences: Sequence[Tokens]) -> list[Quality]:
    base = all_logits(directory, BASE, sequences)
    results = [compare(BASE, sequences, base, base)]
    for arithmetic in ARITHMETICS:
        got = all_logits(directory, arithmetic, sequences)
        results.append(compare(arithmetic, sequences, got, base))
        print(results[-1], file=sys.stderr, flush=True)
    return results


def write_results(subject: Subject, qualities: Sequence[Quality], stem: Path) -> str:
    """Write stem.md and stem.json; what the page says."""
    machine = describe_machine()
    num_tokens = sum(map(len, subject.sequences))
    lines = [
        f"Commit {machine.commit}, {machine.cpu}, torch {machine.packages['torch']}. "
        f"{subject.title}, {num_tokens:,} tokens; logit errors are in standard deviations of "
        "float32's logits at a position.",
        "",
        "| | perplexity | greedy agreement | logit error, most | logit error, rms |",
        "|---|--:|--:|--:|--:|",
    ]
    for q in qualities:
        perplexity = f"{q.perplexity:.4f}" if subject.is_trained else "–"
        lines.append(
            f"| {q.arithmetic} | {perplexity} | {q.agreement:.2%} | {q.max_error:.3f} | "
            f"{q.rms_error:.4f} |"
        )
    page = "\n".join(lines) + "\n"
    document = {
        "format": "lora-serve/quantization-quality/1",
        "machine": machine,
        "title": subject.title,
        "num_tokens": num_tokens,
        "qualities": qualities,
    }
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".md").write_text(page)
    write_json(stem.with_suffix(".json"), document)
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=SUBJECTS)
    stem = Path("benchmarks/results/quantization_quality")
    parser.add_argument("--results", type=Path, metavar="STEM", default=stem)
    args = parser.parse_args()
    for name in [args.only] if args.only else SUBJECTS:
        subject = SUBJECTS[name]()
        qualities = judge(subject.directory, subject.sequences)
        print(write_results(subject, qualities, Path(f"{args.results}_{name}")))


if __name__ == "__main__":
    main()
