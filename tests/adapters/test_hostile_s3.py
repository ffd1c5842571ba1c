"""Adapters of an S3 that lies about its objects, never ends, or is slow."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lora_serve.adapters import remote
from lora_serve.adapters.location import S3Adapter
from lora_serve.adapters.remote import download_from_s3
from lora_serve.errors import AdapterNotFoundError, AdapterUnavailableError

ADAPTER = S3Adapter("s3://bucket/a")
MANY, SIZE = 2**30, 10 * 2**10
FILES = ("adapter_config.json", "adapter_model.safetensors")


class Lying(BaseHTTPRequestHandler):
    """Objects of SIZE bytes, as far as it says. how: what it does instead."""

    protocol_version = "HTTP/1.1"
    how = ""
    pause = 0.0

    def do_HEAD(self) -> None:
        is_there = self.path.endswith(FILES)
        self.send_response(200 if is_there else 404)
        self.send_header("Content-Length", str(SIZE if is_there else 0))
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Sat, 28 Nov 2026 09:00:00 GMT")
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Sat, 28 Nov 2026 09:00:00 GMT")
        if self.how == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(self.length))
        self.end_headers()
        try:
            getattr(self, f"_send_{self.how}")()
        except OSError:
            self.close_connection = True

    @property
    def length(self) -> int:
        return {"endless": 2**40, "drips": SIZE, "short": SIZE - 1}.get(self.how, SIZE)

    def _send_whole(self) -> None:
        for _ in range(10):
            self.wfile.write(bytes(SIZE // 10))
            time.sleep(self.pause)

    def _send_cut(self) -> None:
        self.wfile.write(bytes(SIZE // 2))
        self.close_connection = True

    def _send_short(self) -> None:
        self.wfile.write(bytes(SIZE - 1))

    def _send_endless(self) -> None:
        while True:
            self.wfile.write(bytes(2**20))

    def _send_chunked(self) -> None:
        while True:
            self.wfile.write(b"%x\r\n%b\r\n" % (2**20, bytes(2**20)))

    def _send_drips(self) -> None:
        while True:
            self.wfile.write(b"x")
            time.sleep(0.05)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def lying(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Lying]]:
    class Handler(Lying):
        pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=partial(server.serve_forever, 0.01))
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tests")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "tests")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    yield Handler
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("how", ["endless", "chunked", "short", "cut"])
def test_what_is_not_as_long_as_s3_has_said_is_no_adapter(
    how: str, lying: type[Lying], tmp_path: Path
) -> None:
    """Else one object fills the disk, whatever --lora-max-download-bytes says."""
    lying.how = how
    with pytest.raises(AdapterUnavailableError, match="s3://bucket/a could not be fetched"):
        download_from_s3(ADAPTER, tmp_path, MANY, MANY, 60)
    assert [*tmp_path.iterdir()] == []


def test_bytes_that_never_end_are_given_up_when_nobody_waits_for_them(
    lying: type[Lying], tmp_path: Path
) -> None:
    """Else each try leaves a thread behind, and after eight nothing is downloaded any more."""
    lying.how = "drips"
    began = time.monotonic()
    with pytest.raises(AdapterUnavailableError):
        download_from_s3(ADAPTER, tmp_path, MANY, MANY, 0.5)
    assert time.monotonic() - began < 20


def test_a_slow_answer_is_not_given_up_while_it_comes(
    lying: type[Lying], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "S3_SECONDS", "300ms")
    lying.how, lying.pause = "whole", 0.08
    directory = Path(download_from_s3(ADAPTER, tmp_path, MANY, MANY, 60))
    assert all((directory / name).stat().st_size == SIZE for name in FILES)


def test_an_answer_that_stands_still_is_given_up(
    lying: type[Lying], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "S3_SECONDS", "100ms")
    monkeypatch.setattr(remote, "MAX_S3_RETRIES", 0)
    lying.how, lying.pause = "whole", 1.0
    with pytest.raises(AdapterUnavailableError):
        download_from_s3(ADAPTER, tmp_path, MANY, MANY, 60)


def test_an_adapter_that_s3_has_not_is_not_found(lying: type[Lying], tmp_path: Path) -> None:
    lying.how = "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.adapters.test_hostile_s3.FILES", ())
        with pytest.raises(AdapterNotFoundError):
            download_from_s3(ADAPTER, tmp_path, MANY, MANY, 60)
