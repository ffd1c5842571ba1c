"""A server as commands talk to it over HTTP: JSON in and out, and what went wrong in one line."""

from __future__ import annotations

import ipaddress
import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import httpx

from lora_serve.cli.server_arguments import DEFAULT_URL
from lora_serve.errors import LoraServeError
from lora_serve.observability.sizes import shown_bytes
from lora_serve.server_url import base_url

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 900.0  # a load may wait for a download
MAX_TOLD_CHARS = 2000
MAX_ANSWER_BYTES = 64 * 2**20  # /v1/models of 100,000 adapters
MAX_STREAM_BYTES = 256 * 2**20  # an answer of a million tokens

Json = dict[str, Any]


class RemoteError(LoraServeError):
    """The server refused. status: of its answer. param: the field at fault, if it names one.

    kind: what the server calls such errors, "" if it does not.
    """

    def __init__(self, message: str, status: int, param: str = "", kind: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.kind = kind


class UnreachableError(LoraServeError):
    """No server answers there, or it broke off."""


class BrokenOffError(UnreachableError):
    """The connection was lost when the server had been asked: it may have done what it was."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A name of GET /v1/models, with all that the server tells of it."""

    name: str
    facts: Mapping[str, Any]

    @property
    def is_adapter(self) -> bool:
        return bool(self.facts.get("parent"))


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer that has come whole."""

    text: str
    headers: Mapping[str, str] = field(default_factory=dict)

    def json(self) -> Any:
        """Raises ValueError."""
        try:
            return json.loads(self.text)
        except RecursionError as error:
            raise ValueError("the JSON is nested too deeply") from error


class Remote:
    """One server. Use it as a context."""

    def __init__(self, url: str | None, api_key: str | None) -> None:
        """Raises ConfigError unless the URL is one of HTTP, or of a Unix socket."""
        self.url = url or DEFAULT_URL
        socket, base = _place(self.url)
        self._http = httpx.Client(
            base_url=base,
            # Not compressed: a small answer could become one of any size.
            headers={"Accept-Encoding": "identity"}
            | ({"Authorization": f"Bearer {api_key}"} if api_key else {}),
            timeout=httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
            transport=httpx.HTTPTransport(uds=socket) if socket else None,
            verify=ssl.create_default_context() if base.startswith("https:") else False,
            trust_env=not (socket or _is_loopback(base)),  # no proxy leads to this machine
        )

    def __enter__(self) -> Remote:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._http.close()

    def is_there(self) -> bool:
        """Whether something answers HTTP."""
        try:
            with self._http.stream("GET", "/health", timeout=CONNECT_SECONDS):
                return True
        except httpx.HTTPError:
            return False

    def get(self, path: str) -> Reply:
        """Raises RemoteError, UnreachableError."""
        return self._asked("GET", path)

    def post(self, path: str, body: Json) -> Reply:
        """Raises RemoteError, UnreachableError."""
        return self._asked("POST", path, body)

    def delete(self, path: str) -> Reply:
        """Raises RemoteError, UnreachableError."""
        return self._asked("DELETE", path)

    def models(self, *, not_served: bool = False) -> list[ServedModel]:
        """The model's names and then the adapters. Raises RemoteError, UnreachableError.

        not_served: also those that a catalog names and this server has not.
        """
        try:
            cards = self.get(f"/v1/models{'?not_served=true' * not_served}").json()["data"]
            return [ServedModel(str(card["id"]), card) for card in cards]
        except (ValueError, KeyError, TypeError) as error:
            raise UnreachableError(
                f"{self.url}/v1/models gives no list of models; is this an OpenAI-compatible "
                "server?"
            ) from error

    @contextmanager
    def streamed(self, path: str, body: Json) -> Iterator[Iterator[str]]:
        """The lines of an answer while it comes; leaving the context ends it.

        Raises:
            RemoteError, UnreachableError: also while it is read.
        """
        with self._answering("POST", path, body) as response:
            yield self._lines(response)

    def _asked(self, method: str, path: str, body: Json | None = None) -> Reply:
        with self._answering(method, path, body) as response:
            return Reply(self._whole(response), response.headers)

    @contextmanager
    def _answering(self, method: str, path: str, body: Json | None) -> Iterator[httpx.Response]:
        """A success whose body has still to come."""
        with self._told(), self._http.stream(method, path, json=body) as response:
            if not response.is_success:
                raise self._refusal(response, self._whole(response))
            yield response

    def _whole(self, response: httpx.Response) -> str:
        return b"".join(self._pieces(response, MAX_ANSWER_BYTES)).decode(errors="replace")

    def _lines(self, response: httpx.Response) -> Iterator[str]:
        rest = b""
        for piece in self._pieces(response, MAX_STREAM_BYTES):
            first, *others = piece.split(b"\n")
            rest += first
            for start in others:
                yield rest.decode(errors="replace").removesuffix("\r")
                rest = start
        if rest:
            yield rest.decode(errors="replace")

    def _pieces(self, response: httpx.Response, max_bytes: int) -> Iterator[bytes]:
        """The body as it comes. Raises UnreachableError where it is larger, or compressed."""
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            raise UnreachableError(
                f"{self.url}: the answer is compressed ({encoding[:MAX_TOLD_CHARS]}), which was "
                "not asked for; name the server itself, not what stands before it"
            )
        num_bytes = 0
        for piece in response.iter_raw():
            num_bytes += len(piece)
            if num_bytes > max_bytes:
                raise UnreachableError(
                    f"{self.url}: the answer is larger than {shown_bytes(max_bytes)}; is this an "
                    "OpenAI-compatible server?"
                )
            yield piece

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            if "WRONG_VERSION_NUMBER" in str(error):  # it has answered, but not in TLS
                raise UnreachableError(
                    f"the server at {self.url} does not speak TLS; name it with http://"
                ) from error
            raise UnreachableError(
                f"no server answers at {self.url} ({error}); start one with `lora-serve serve "
                "MODEL`, or name another with --url"
            ) from error
        except httpx.HTTPError as error:
            what = str(error) or type(error).__name__
            raise BrokenOffError(f"{self.url}: the answer broke off: {what}") from error

    def _refusal(self, response: httpx.Response, text: str) -> RemoteError:
        told, param, kind = _fault(response.status_code, text)
        if response.has_redirect_location:  # not followed: that place would get the key
            place = response.headers["Location"][:MAX_TOLD_CHARS]
            told = f"{self.url} redirects to {place}; if that is the server, name it with --url"
        if response.status_code == 401:
            told = f"{told} (name a key with --api-key-file, --api-key or in the environment)"
        return RemoteError(told, response.status_code, param, kind)


def _fault(status: int, text: str) -> tuple[str, str, str]:
    """What an error says, the field at fault, and the error's kind."""
    try:
        error = Reply(text).json()["error"]
        told = str(error["message"])[:MAX_TOLD_CHARS]
        return told, str(error.get("param") or ""), str(error.get("type") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        text = text.strip()[:MAX_TOLD_CHARS]
        return f"HTTP {status}: {text}" if text else f"HTTP {status}", "", ""


def _place(url: str) -> tuple[str | None, str]:
    """The Unix socket, if it is one, and the base URL. Raises ConfigError."""
    if url.startswith("unix:"):
        return url.removeprefix("unix:").removeprefix("//"), "http://localhost"
    return None, base_url(url, also="unix:/PATH")


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
