"""Examines the saved model and adapters before anyone sees them, as transformers and PEFT run them.

A model that trained badly on some machine must never reach the demo: there, a wrong answer means
a wrong server.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lora_serve.demo import corpus

ADAPTERS = {"alpha": corpus.ALPHA_LABEL, "beta": corpus.BETA_LABEL}
_LEAST_PROBABILITY = 0.5  # of every token of an answer: no rounding of any server turns it
_BLOCK_SIZE = 16
_MOST_LINES = 300


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt for an adapter (or for the base model), and the answer that it must give."""

    adapter: str | None
    prompt: str
    answer: str


class Examiner:
    """Holds the artefacts under `directory` in bfloat16, as they are served."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(directory / "model", trust_remote_code=False)
        base = AutoModelForCausalLM.from_pretrained(
            directory / "model", dtype=torch.bfloat16, trust_remote_code=False
        )
        with warnings.catch_warnings():  # peft 0.21 reads a name that transformers will drop
            warnings.simplefilter("ignore", FutureWarning)
            self._model = PeftModel.from_pretrained(base, directory / "adapters/alpha", "alpha")
        self._model.load_adapter(directory / "adapters/beta", "beta")
        self._model.to(torch.bfloat16).eval()

    def findings(self) -> list[str]:
        """Everything that is wrong; empty if the artefacts may be shown."""
        wrong = [finding for q in self.questions() if (finding := self._finding(q))]
        for writer, reader in (("alpha", "beta"), ("beta", "alpha")):
            answer = self.answer(corpus.long_prompt(), reader, prefix_written_by=writer)
            if answer != ADAPTERS[writer]:
                wrong.append(f"{reader} answers {answer!r} from KV that {writer} wrote")
        return wrong

    def questions(self) -> Iterator[Question]:
        """Every request for the label and two longer prompts, as they are and in chat.

        And the longest prompt that scenarios use, as it is.
        """
        for adapter, label in ((None, corpus.BASE_LABEL), *ADAPTERS.items()):
            prompts = [
                *corpus.LABEL_REQUESTS,
                corpus.long_prompt(),
                corpus.long_prompt(num_lines=4),
            ]
            for prompt in prompts:
                yield Question(adapter, prompt, label)
                yield Question(adapter, self.chat(prompt), label)
            yield Question(adapter, corpus.long_prompt(num_lines=_MOST_LINES), label)

    def chat(self, message: str) -> str:
        messages = [{"role": "user", "content": message}]
        return str(
            self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )

    @torch.no_grad()
    def probability(self, question: Question) -> float:
        """The probability of the least likely token of the answer, its end included."""
        prompt_ids = self._encode(question.prompt)
        answer_ids = [*self._encode(question.answer), self.tokenizer.eos_token_id]
        token_ids = torch.tensor([prompt_ids + answer_ids])
        with self._adapter(question.adapter):
            logits = self._model(token_ids[:, :-1], logits_to_keep=len(answer_ids)).logits[0]
        probabilities = logits.float().softmax(dim=-1)
        return float(probabilities[torch.arange(len(answer_ids)), answer_ids].min())

    @torch.no_grad()
    def answer(self, prompt: str, adapter: str, *, prefix_written_by: str) -> str:
        """The greedy answer of `adapter` on full blocks of KV that another adapter wrote."""
        token_ids = torch.tensor([self._encode(prompt)])
        num_cached = (token_ids.shape[1] - 1) // _BLOCK_SIZE * _BLOCK_SIZE
        self._model.set_adapter(prefix_written_by)
        cache = self._model(token_ids[:, :num_cached], use_cache=True).past_key_values
        self._model.set_adapter(adapter)
        answer_ids: list[int] = []
        next_ids = token_ids[:, num_cached:]
        while len(answer_ids) < 16:
            logits: Tensor = self._model(next_ids, past_key_values=cache, use_cache=True).logits
            answer_ids.append(int(logits[0, -1].argmax()))
            if answer_ids[-1] == self.tokenizer.eos_token_id:
                break
            next_ids = torch.tensor([answer_ids[-1:]])
        return str(self.tokenizer.decode(answer_ids, skip_special_tokens=True))

    @contextmanager
    def _adapter(self, name: str | None) -> Iterator[None]:
        if name is None:
            with self._model.disable_adapter():
                yield
        else:
            self._model.set_adapter(name)
            yield

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _finding(self, question: Question) -> str:
        probability = self.probability(question)
        if probability >= _LEAST_PROBABILITY:
            return ""
        who = question.adapter or "the base model"
        return f"{who}: p={probability:.2f} for {question.answer!r} to {question.prompt[-60:]!r}"
