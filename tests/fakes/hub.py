"""A Hugging Face Hub of one repository, over real HTTP on a port of its own."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c" * 40


def _handler(repo_id: str, files: Mapping[str, bytes]) -> type[BaseHTTPRequestHandler]:
    def answer(path: str) -> tuple[int, bytes, str]:
        """Status, body and kind of body."""
        path = path.partition("?")[0]
        if path in (f"/api/models/{repo_id}", f"/api/models/{repo_id}/revision/main"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
            info = {"id": repo_id, "sha": COMMIT, "siblings": siblings}
            return 200, json.dumps(info).encode(), "application/json"
        if path.startswith(f"/api/models/{repo_id}/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                for name, data in files.items()
            ]
            return 200, json.dumps(tree).encode(), "application/json"
        name = path.removeprefix(f"/{repo_id}/resolve/{COMMIT}/")
        if name in files:
            return 200, files[name], "application/octet-stream"
        return 404, b"{}", "application/json"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body, kind = answer(self.path)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            if status == 404:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    return Handler


@contextmanager
def serve_hub(repo_id: str, files: Mapping[str, bytes]) -> Iterator[str]:
    """Serve `files` as one repository; gives the endpoint's URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(repo_id, files))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
