"""A server that answers with labels and remembers prompts by a key of the test's choice.

It speaks the routes that the demo needs. A prompt that it has seen under a key is answered with
the label of the adapter that wrote it, as a prefix cache with that key would do. The label of an
adapter is the text of the file `label` in its directory.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

BLOCK = 16


@dataclass(frozen=True)
class LoadedAdapter:
    name: str
    path: str
    label: str


Key = Callable[[LoadedAdapter], tuple[str, ...]]


def by_content(adapter: LoadedAdapter) -> tuple[str, ...]:
    return (adapter.name, adapter.label)


def by_name(adapter: LoadedAdapter) -> tuple[str, ...]:
    return (adapter.name,)


def by_name_and_path(adapter: LoadedAdapter) -> tuple[str, ...]:
    return (adapter.name, adapter.path)


def by_nothing(adapter: LoadedAdapter) -> tuple[str, ...]:
    return ()


class LabelServer:
    """key=None remembers nothing."""

    def __init__(self, base_model: str, base_label: str, key: Key | None) -> None:
        self._key = key
        self._adapters = {base_model: LoadedAdapter(base_model, "", base_label)}
        self._written: dict[tuple[object, ...], str] = {}
        self._lock = threading.Lock()

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            adapter = self._adapters[body["model"]]
            num_tokens = len(body["prompt"].split())
            text, num_cached = adapter.label, 0
            if self._key is not None:
                seen = (self._key(adapter), body.get("cache_salt"), body["prompt"])
                num_cached = num_tokens // BLOCK * BLOCK if seen in self._written else 0
                text = self._written.setdefault(seen, text)
        details = {"cached_tokens": num_cached}
        usage = {"prompt_tokens": num_tokens, "prompt_tokens_details": details}
        return {"choices": [{"text": text}], "usage": usage}

    def load(self, body: dict[str, Any]) -> int:
        name, path = body["lora_name"], body["lora_path"]
        with self._lock:
            if name in self._adapters and not body["load_inplace"]:
                return 400
            file = Path(path) / "label"
            if not file.exists():
                return 404
            self._adapters[name] = LoadedAdapter(name, path, file.read_text())
            return 200

    def unload(self, body: dict[str, Any]) -> int:
        with self._lock:
            return 200 if self._adapters.pop(body["lora_name"], None) else 404


@contextmanager
def serving(server: LabelServer) -> Iterator[str]:
    """Its base URL, while it is served on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.path == "/v1/completions":
                self._reply(200, server.complete(body))
            elif self.path == "/v1/load_lora_adapter":
                self._reply(server.load(body), {})
            else:
                self._reply(server.unload(body), {})

        def _reply(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Http(ThreadingHTTPServer):
        request_queue_size = 64

    with Http(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()
            thread.join()
