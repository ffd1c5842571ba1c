"""Serves OpenVINO GenAI's continuous batching pipeline: python -m … MODEL PORT [NAME=FILE …].

Its step-by-step interface ignores adapters (tokens are the base's), and `generate`, which applies
them, blocks until its batch is done and streams one request only. So with adapters requests run
one by one; without, they are batched.
"""

from __future__ import annotations

import itertools
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy
import openvino
import openvino_genai
from openvino_genai.py_openvino_genai import GenerationHandle, GenerationStatus

from benchmarks.peers.servers.token_server import Emit, TokenEngine, serve_tokens

CACHE_GIB = 2
MAX_RUNNING = 8

Put = Callable[[int | Exception], None]
Request = tuple[list[int], openvino_genai.GenerationConfig, Put]


class BatchingEngine:
    """One thread adds requests and steps the pipeline, which is not safe to share."""

    def __init__(self, model: Path) -> None:
        self._pipeline = _pipeline(model, {})
        self._arrivals: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._running: list[tuple[GenerationHandle, Put]] = []
        self._numbers = itertools.count()
        threading.Thread(target=self._run, daemon=True).start()

    def generate(
        self, token_ids: list[int], max_tokens: int, adapter: str | None, emit: Emit
    ) -> None:
        tokens: queue.SimpleQueue[int | Exception] = queue.SimpleQueue()
        self._arrivals.put((token_ids, _greedy(max_tokens), tokens.put))
        for _ in range(max_tokens):
            token = tokens.get()
            if isinstance(token, Exception):
                raise token
            emit(token)

    def _run(self) -> None:
        while True:
            if not self._running:
                self._add(self._arrivals.get())
            while not self._arrivals.empty():
                self._add(self._arrivals.get())
            self._step()

    def _add(self, request: Request) -> None:
        token_ids, config, put = request
        try:
            handle = self._pipeline.add_request(next(self._numbers), _tensor(token_ids), config)
        except RuntimeError as error:
            put(error)
        else:
            self._running.append((handle, put))

    def _step(self) -> None:
        """Compute one token for each, and keep those that go on."""
        try:
            self._pipeline.step()
        except RuntimeError as error:
            for _, put in self._running:
                put(error)
            self._running = []
        for handle, put in self._running:
            while handle.can_read():
                for output in handle.read().values():
                    for token in output.generated_ids:
                        put(token)
        running = GenerationStatus.RUNNING
        self._running = [(h, put) for h, put in self._running if h.get_status() == running]


class AdapterEngine:
    """One request after another, each with its own adapter."""

    def __init__(self, model: Path, adapters: dict[str, Path]) -> None:
        self._adapters = {name: openvino_genai.Adapter(path) for name, path in adapters.items()}
        registered = openvino_genai.AdapterConfig(list(self._adapters.values()))
        self._pipeline = _pipeline(model, {"adapters": registered})
        self._turn = threading.Lock()

    def generate(
        self, token_ids: list[int], max_tokens: int, adapter: str | None, emit: Emit
    ) -> None:
        config = _greedy(max_tokens)
        chosen = [self._adapters[adapter]] if adapter else []
        config.adapters = openvino_genai.AdapterConfig(chosen)
        with self._turn:
            self._pipeline.generate([_tensor(token_ids)], [config], Streamer(emit))


class Streamer(openvino_genai.StreamerBase):
    """Hands on tokens as they come; the pipeline gives one, or several at once."""

    def __init__(self, emit: Emit) -> None:
        super().__init__()
        self._emit = emit

    def write(self, tokens: int | list[int]) -> openvino_genai.StreamingStatus:
        for token in [tokens] if isinstance(tokens, int) else tokens:
            self._emit(token)
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


def _pipeline(
    model: Path, properties: dict[str, object]
) -> openvino_genai.ContinuousBatchingPipeline:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GIB
    scheduler.enable_prefix_caching = True
    scheduler.max_num_seqs = MAX_RUNNING
    return openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)


def _greedy(max_tokens: int) -> openvino_genai.GenerationConfig:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = max_tokens
    config.ignore_eos = True
    config.do_sample = False
    return config


def _tensor(token_ids: list[int]) -> openvino.Tensor:
    return openvino.Tensor(numpy.array([token_ids], dtype=numpy.int64))


def main() -> None:
    model, port, *pairs = sys.argv[1:]
    adapters = {name: Path(path) for name, _, path in (pair.partition("=") for pair in pairs)}
    engine: TokenEngine = (
        AdapterEngine(Path(model), adapters) if adapters else BatchingEngine(Path(model))
    )
    serve_tokens(engine, int(port))


if __name__ == "__main__":
    main()
