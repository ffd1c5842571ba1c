"""Serves transformers: python -m … MODEL PORT (batching | one-by-one) [NAME=DIRECTORY …].

One by one is `generate`, with PEFT for adapters; batching is transformers' own continuous
batching, which knows no adapters.
"""

from __future__ import annotations

import itertools
import queue
import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput
from transformers.generation.streamers import BaseStreamer

from benchmarks.peers.servers.token_server import Emit, TokenEngine, serve_tokens

MAX_MODEL_LEN = 2048
MAX_RUNNING = 8
PAGE_SIZE = 256


class BatchingEngine:
    """transformers' manager computes in a thread of its own; another hands out what it gives."""

    def __init__(self, model: Path) -> None:
        config = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=MAX_MODEL_LEN)
        cache = ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            num_blocks=MAX_RUNNING * MAX_MODEL_LEN // PAGE_SIZE,
            max_batch_tokens=MAX_MODEL_LEN,
            max_requests_per_batch=MAX_RUNNING,
        )
        self._manager = _load(model).init_continuous_batching(
            generation_config=config, continuous_batching_config=cache
        )
        self._numbers = itertools.count()
        self._outputs: dict[str, queue.SimpleQueue[GenerationOutput]] = {}
        self._manager.start()
        threading.Thread(target=self._hand_out, daemon=True).start()

    def generate(
        self, token_ids: list[int], max_tokens: int, adapter: str | None, emit: Emit
    ) -> None:
        name = str(next(self._numbers))
        outputs = self._outputs[name] = queue.SimpleQueue()
        self._manager.add_request(token_ids, name, max_new_tokens=max_tokens, streaming=True)
        sent = 0
        while sent < max_tokens:
            output = outputs.get()
            if output.error:
                raise RuntimeError(output.error)
            for token in output.generated_tokens[sent:]:
                emit(token)
            sent = len(output.generated_tokens)
        del self._outputs[name]

    def _hand_out(self) -> None:
        for output in self._manager:
            outputs = self._outputs.get(output.request_id)
            if outputs is not None:  # else it has all its tokens already
                outputs.put(output)


class OneByOneEngine:
    """PEFT's active adapter is a state of the whole model, so requests take turns."""

    def __init__(self, model: Path, adapters: dict[str, Path]) -> None:
        self._model = _load(model)
        for number, (name, path) in enumerate(adapters.items()):
            if number == 0:
                self._model = PeftModel.from_pretrained(self._model, path, adapter_name=name)
            else:
                self._model.load_adapter(path, adapter_name=name)
        self._turn = threading.Lock()

    def generate(
        self, token_ids: list[int], max_tokens: int, adapter: str | None, emit: Emit
    ) -> None:
        with self._turn, self._choice(adapter):
            ids = torch.tensor([token_ids])
            self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                do_sample=False,
                streamer=Streamer(emit),
            )

    def _choice(self, adapter: str | None) -> AbstractContextManager[None]:
        """Switch to the adapter, or to the base while the context lasts."""
        if not isinstance(self._model, PeftModel):
            return nullcontext()
        if adapter is None:
            return self._model.disable_adapter()
        self._model.set_adapter(adapter)
        return nullcontext()


class Streamer(BaseStreamer):
    """Hands on each token; the first call brings the prompt."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if not self._is_prompt:
            for token in value.flatten().tolist():
                self._emit(token)
        self._is_prompt = False

    def end(self) -> None:
        pass


def _load(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, trust_remote_code=False
    ).eval()


def main() -> None:
    model, port, way, *pairs = sys.argv[1:]
    adapters = {name: Path(path) for name, _, path in (pair.partition("=") for pair in pairs)}
    engine: TokenEngine
    if way == "batching":
        engine = BatchingEngine(Path(model))
    else:
        engine = OneByOneEngine(Path(model), adapters)
    serve_tokens(engine, int(port))


if __name__ == "__main__":
    main()
