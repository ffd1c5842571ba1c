"""The table of questions: random prompts and settings, each with one right answer a version.

Nothing is left to chance in an answer: what draws has a seed. Questions share trunks, so that they
hit each other's KV.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np
import zmq
from safetensors.numpy import save

from lora_serve.demo.corpus import LABEL_REQUESTS

NUM_TRUNKS = 10
LONGEST_TRUNK = 320
VOCABULARY = range(3, 700)
BASE = "base"
UNCOPIED_BYTES = zmq.COPY_THRESHOLD


@dataclass(frozen=True, slots=True)
class Question:
    """path: of the route. fields: of the body, but for the model, the salt and streaming."""

    index: int
    path: str
    fields: dict[str, object]

    def body(self, model: str, *, cache_salt: str = "", stream: bool) -> dict[str, object]:
        body = {"model": model, "stream": stream, "return_token_ids": True, **self.fields}
        if stream:
            body["stream_options"] = {"include_usage": True}
        if cache_salt:
            body["cache_salt"] = cache_salt
        return body


def make_questions(seed: int, count: int, hidden_size: int) -> list[Question]:
    rng = Random(seed)
    trunks = [_token_ids(rng, rng.randrange(48, LONGEST_TRUNK)) for _ in range(NUM_TRUNKS)]
    kinds: list[Callable[[Random], tuple[str, dict[str, object]]]] = [
        lambda rng: _tokens(rng, trunks),
        lambda rng: _tokens(rng, trunks),
        lambda rng: _embeds(rng, hidden_size),
        _chat,
    ]
    questions = []
    for index in range(count):
        path, fields = kinds[index % len(kinds)](rng)
        questions.append(Question(index, path, fields | _settings(rng)))
    return questions


def large_question(hidden_size: int) -> Question:
    """Its message to the engine is sent without being copied; the first such begins a thread."""
    rows = np.zeros((1 + UNCOPIED_BYTES // (2 * hidden_size), hidden_size), dtype=np.float32)
    payload = base64.b64encode(save({"rows": rows})).decode()
    return Question(-1, "/v1/completions", {"prompt_embeds": payload, "max_tokens": 1})


def _tokens(rng: Random, trunks: list[list[int]]) -> tuple[str, dict[str, object]]:
    trunk = rng.choice(trunks)
    shared = trunk[: rng.randrange(16, len(trunk))]
    prompt = shared + _token_ids(rng, rng.randrange(1, 60))
    return "/v1/completions", {"prompt": prompt, "logprobs": rng.randrange(4)}


def _embeds(rng: Random, hidden_size: int) -> tuple[str, dict[str, object]]:
    draw = np.random.default_rng(rng.randrange(2**32))
    rows = draw.standard_normal((rng.randrange(8, 120), hidden_size), dtype=np.float32)
    payload = base64.b64encode(save({"rows": rows})).decode()
    return "/v1/completions", {"prompt_embeds": payload, "logprobs": rng.randrange(4)}


def _chat(rng: Random) -> tuple[str, dict[str, object]]:
    history = [
        {"role": role, "content": rng.choice(LABEL_REQUESTS)}
        for _ in range(rng.randrange(3))
        for role in ("user", "assistant")
    ]
    messages = [*history, {"role": "user", "content": rng.choice(LABEL_REQUESTS)}]
    top = {"logprobs": True, "top_logprobs": rng.randrange(4)} if rng.random() < 0.5 else {}
    return "/v1/chat/completions", {"messages": messages, **top}


def _settings(rng: Random) -> dict[str, object]:
    settings: dict[str, object] = {
        "max_tokens": rng.choice((1, 4, 8, 16, 32)),
        "n": rng.choice((1, 1, 1, 1, 2, 3)),
        "seed": rng.randrange(2**31),
        "temperature": rng.choice((0, 0, 0.7, 1.0)),
    }
    if rng.random() < 0.3:
        settings |= {"top_p": 0.9, "top_k": 40}
    if rng.random() < 0.2:
        settings |= {"stop": ["e", "th"]}
    if rng.random() < 0.3:
        settings |= {"ignore_eos": True}
    return settings


def _token_ids(rng: Random, count: int) -> list[int]:
    return [rng.choice(VOCABULARY) for _ in range(count)]
