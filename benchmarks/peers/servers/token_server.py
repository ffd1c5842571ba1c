"""/v1/completions for an engine that only knows tokens. Standard library only.

A thread a request; the engine calls `emit` for each token, and each becomes an event at once.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

Emit = Callable[[int], None]


class TokenEngine(Protocol):
    """Generates greedily, and exactly `max_tokens` tokens. Called from many threads at once."""

    def generate(
        self, token_ids: list[int], max_tokens: int, adapter: str | None, emit: Emit
    ) -> None: ...


def serve_tokens(engine: TokenEngine, port: int) -> None:
    """Serve on this machine until killed."""
    token_server(engine, port).serve_forever()


def token_server(engine: TokenEngine, port: int, base_name: str = "base") -> ThreadingHTTPServer:
    """A server that listens, and answers from the call of `serve` on."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"  # the connection's end is the answer's

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            try:
                self._generate(body)
            except Exception as error:
                traceback.print_exc()
                self._send({"error": f"{type(error).__name__}: {error}"})

        def _generate(self, body: dict[str, Any]) -> None:
            adapter = None if body["model"] == base_name else body["model"]
            count = 0

            def emit(token: int) -> None:
                nonlocal count
                count += 1
                reason = "length" if count == body["max_tokens"] else None
                self._send({"choices": [{"text": f" {token}", "finish_reason": reason}]})

            engine.generate(body["prompt"], body["max_tokens"], adapter, emit)
            self._send({"choices": [], "usage": {"completion_tokens": count}})
            self.wfile.write(b"data: [DONE]\n\n")

        def _send(self, event: dict[str, Any]) -> None:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.flush()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)
