"""A client of one server: completions, and loading and unloading of adapters."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import httpx

MAX_TOKENS, MAX_CHAT_TOKENS = 16, 64
_TIMEOUT_SECONDS = 300.0


class ServerRefusedError(RuntimeError):
    """The server answered with an error; the message is its own."""


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    num_prompt_tokens: int
    num_cached_tokens: int
    seconds: float


class Client:
    """One server; may be used by many threads at once."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        limits = httpx.Limits(max_connections=64)
        self._http = httpx.Client(base_url=base_url, timeout=_TIMEOUT_SECONDS, limits=limits)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._http.close()

    def complete(self, model: str, prompt: str, cache_salt: str | None = None) -> Answer:
        """The greedy answer, of at most MAX_TOKENS tokens."""
        body: dict[str, object] = {
            "model": model,
            "prompt": prompt,
            "temperature": 0,
            "top_p": 1,
            "max_tokens": MAX_TOKENS,
            "seed": 0,
        }
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        started = time.perf_counter()
        reply = self._post("/v1/completions", body).json()
        return Answer(
            text=reply["choices"][0]["text"],
            num_prompt_tokens=reply["usage"]["prompt_tokens"],
            num_cached_tokens=reply["usage"]["prompt_tokens_details"]["cached_tokens"],
            seconds=time.perf_counter() - started,
        )

    def chat(self, model: str, question: str) -> str:
        """The greedy answer to a question, of at most MAX_CHAT_TOKENS tokens."""
        body: dict[str, object] = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": MAX_CHAT_TOKENS,
        }
        reply = self._post("/v1/chat/completions", body).json()
        return str(reply["choices"][0]["message"]["content"])

    def load_adapter(self, name: str, path: Path, *, in_place: bool = False) -> None:
        body = {"lora_name": name, "lora_path": str(path), "load_inplace": in_place}
        self._post("/v1/load_lora_adapter", body)

    def unload_adapter(self, name: str) -> None:
        self._post("/v1/unload_lora_adapter", {"lora_name": name})

    def _post(self, path: str, body: dict[str, object]) -> httpx.Response:
        response = self._http.post(path, json=body)
        if response.status_code != 200:
            raise ServerRefusedError(f"POST {path}: {response.status_code} {response.text}")
        return response
