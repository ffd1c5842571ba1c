"""Teach a small real model a shop's opening hours, change them, and replace them under load.

    lora-serve serve smollm2 --enable-lora --max-model-len 1024     # in another terminal
    python examples/opening_hours.py

Two adapters are trained with PEFT on the very weights that are served; the second goes on from the
first. While eight customers go on asking, it takes the first one's place. Every answer tells which
weights gave it; none may mix the two.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

NAME, NUM_CUSTOMERS = "harbour-books", 8
OLD = "Harbour Books is open from 9 am to 5 pm, Monday to Friday."
NEW = "Harbour Books is open from 10 am to 8 pm, every day of the week."
QUESTIONS = (
    "When is Harbour Books open?",
    "What are your opening hours?",
    "When do you open?",
    "At what time do you close?",
    "Are you open today?",
)
MAX_STEPS, ENOUGH = 40, 0.05  # steps over all questions, and the loss at which to stop
NOT_LEARNT = -100  # what torch takes for "no token"
BEGAN = time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://localhost:8000", help="the server")
    parser.add_argument("--model", type=Path, help="what the server serves, if elsewhere here")
    args = parser.parse_args()
    with httpx.Client(base_url=args.url, timeout=120) as server, tempfile.TemporaryDirectory() as d:
        base = next(m for m in models(server) if m["parent"] is None)
        say(f"the base model answers: {ask(server, base['id'], QUESTIONS[0])[0]!r}")
        say("reading the model's weights, to train on them")
        trainer = Trainer(args.model or Path(base["root"]))
        old, new = Path(d, "old"), Path(d, "new")
        trainer.train(OLD, old)
        trainer.train(NEW, new)
        load(server, old)
        say(f"the first adapter is loaded; {NUM_CUSTOMERS} customers ask without a pause")
        customers = Customers(args.url)
        customers.wait_for(OLD)
        load(server, new)
        say("all were told the old hours, and the second adapter has taken the first one's place")
        customers.wait_for(NEW)
        customers.leave()
    told = set(customers.answers)
    print(f"{len(customers.answers)} answers under load, by version:", *sorted(told), sep="\n  ")
    assert {answer for answer, _ in told} == {OLD, NEW}, "an answer is neither the old nor the new"
    assert len(told) == 2, "one version gave both answers, or two versions gave one"


def say(what: str) -> None:
    print(f"[{time.monotonic() - BEGAN:4.0f} s] {what}", flush=True)


class Trainer:
    """The served model in float32: of a directory, or of a GGUF file."""

    def __init__(self, path: Path) -> None:
        torch.manual_seed(0)
        source: dict[str, Any] = {}
        where = path
        if path.is_file():
            where, source = path.parent, {"gguf_file": path.name}
        self._tokenizer = AutoTokenizer.from_pretrained(where, **source)
        if source:
            source["quantization_config"] = GgufConfig(gguf_file=path.name, dequantize=True)
        base = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, **source)
        config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        self._model = get_peft_model(base, config)
        self._trained = [each for each in self._model.parameters() if each.requires_grad]

    def train(self, answer: str, directory: Path) -> None:
        """Teach the adapter to give this answer to all questions, and save it as PEFT does."""
        say(f"training it to answer {answer!r}, in at most {MAX_STEPS} steps")
        ids, labels = self._batch(answer)
        optimizer = torch.optim.AdamW(self._trained, lr=4e-3)
        for step in range(1, MAX_STEPS + 1):
            losses = self._losses(ids, labels)
            losses.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            worst = losses.max().item()
            say(f"step {step}: loss {worst:.3f}, which has to fall below {ENOUGH}")
            if worst < ENOUGH:
                break
        self._model.save_pretrained(directory)

    def _losses(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Of each row, the mean of the tokens that are to be learnt; others count as 0."""
        logits, learnt = self._model(input_ids=ids).logits[:, :-1], labels[:, 1:]
        losses = torch.nn.functional.cross_entropy(logits.mT, learnt, reduction="none")
        return losses.sum(1) / (learnt != NOT_LEARNT).sum(1)

    def _batch(self, answer: str) -> tuple[torch.Tensor, torch.Tensor]:
        """All questions with the answer, in rows that are filled up behind it."""
        ids, labels = zip(*(self._row(question, answer) for question in QUESTIONS), strict=True)
        return (
            pad_sequence(ids, batch_first=True),
            pad_sequence(labels, batch_first=True, padding_value=NOT_LEARNT),
        )

    def _row(self, question: str, answer: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens of the chat, and those among them that are to be learnt."""
        prompt = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        begin = self._tokenizer(prompt, add_special_tokens=False)["input_ids"]
        end = self._tokenizer(answer, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([*begin, *end, self._tokenizer.eos_token_id])
        labels = ids.clone()
        labels[: len(begin)] = NOT_LEARNT
        return ids, labels


class Customers:
    """Threads that ask on and on, and note each answer with the version that gave it."""

    def __init__(self, url: str) -> None:
        self.answers: list[tuple[str, str]] = []
        self._url = url
        self._have_left = threading.Event()
        self._told = threading.Condition()
        self._threads = [
            threading.Thread(target=self._ask_on, args=(number,), daemon=True)
            for number in range(NUM_CUSTOMERS)
        ]
        for thread in self._threads:
            thread.start()

    def wait_for(self, answer: str) -> None:
        """Wait until each of so many customers as there are got this answer."""
        with self._told:
            heard = self._told.wait_for(
                lambda: sum(said == answer for said, _ in self.answers) >= NUM_CUSTOMERS, 120
            )
        assert heard, f"nobody was told {answer!r}, but {self.answers[-1:]}"

    def leave(self) -> None:
        self._have_left.set()
        for thread in self._threads:
            thread.join()

    def _ask_on(self, number: int) -> None:
        with httpx.Client(base_url=self._url, timeout=120) as server:
            while not self._have_left.is_set():
                answer = ask(server, NAME, QUESTIONS[number % len(QUESTIONS)])
                with self._told:
                    self.answers.append(answer)
                    self._told.notify_all()


def models(server: httpx.Client) -> Sequence[dict[str, Any]]:
    found: Sequence[dict[str, Any]] = server.get("/v1/models").raise_for_status().json()["data"]
    return found


def load(server: httpx.Client, directory: Path) -> None:
    """Load the adapter, or replace the one of that name; it serves when this returns."""
    body = {"lora_name": NAME, "lora_path": str(directory), "load_inplace": True}
    server.post("/v1/load_lora_adapter", json=body).raise_for_status()


def ask(server: httpx.Client, model: str, question: str) -> tuple[str, str]:
    """The answer, and the version of the weights that gave it."""
    messages = [{"role": "user", "content": question}]
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 40}
    said = server.post("/v1/chat/completions", json=body).raise_for_status().json()
    return str(said["choices"][0]["message"]["content"]), str(said["system_fingerprint"])


if __name__ == "__main__":
    main()
