"""A server as commands talk to it over HTTP: JSON in and out, and what went wrong in one line."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import httpx

from lora_serve.cli.server_arguments import DEFAULT_URL
from lora_serve.errors import LoraServeError
from lora_serve.server_url import base_url

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 900.0  # a load may wait for a download
MAX_TOLD_CHARS = 2000

Json = dict[str, Any]


class RemoteError(LoraServeError):
    """The server refused. status: of its answer."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class UnreachableError(LoraServeError):
    """No server answers there, or it broke off."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A name of GET /v1/models, with all that the server tells of it."""

    name: str
    facts: Mapping[str, Any]

    @property
    def is_adapter(self) -> bool:
        return bool(self.facts.get("parent"))


class Remote:
    """One server. Use it as a context."""

    def __init__(self, url: str | None, api_key: str | None) -> None:
        """Raises ConfigError unless the URL is one of HTTP, or of a Unix socket."""
        self.url = url or DEFAULT_URL
        socket, base = _place(self.url)
        self._http = httpx.Client(
            base_url=base,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
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
            self._http.get("/health", timeout=CONNECT_SECONDS)
        except httpx.HTTPError:
            return False
        return True

    def get(self, path: str) -> httpx.Response:
        """Raises RemoteError, UnreachableError."""
        return self._asked("GET", path)

    def post(self, path: str, body: Json) -> httpx.Response:
        """Raises RemoteError, UnreachableError."""
        return self._asked("POST", path, body)

    def models(self) -> list[ServedModel]:
        """The model's names and then the adapters. Raises RemoteError, UnreachableError."""
        try:
            cards = self.get("/v1/models").json()["data"]
            return [ServedModel(str(card["id"]), card) for card in cards]
        except (ValueError, KeyError, TypeError) as error:
            raise UnreachableError(
                f"{self.url}/v1/models gives no list of models; is this an OpenAI-compatible "
                "server?"
            ) from error

    @contextmanager
    def streamed(self, path: str, body: Json) -> Iterator[httpx.Response]:
        """An answer while it comes; leaving the context ends it.

        Raises:
            RemoteError, UnreachableError: also while it is read.
        """
        with self._told(), self._http.stream("POST", path, json=body) as response:
            if not response.is_success:
                response.read()
                raise self._refusal(response)
            yield response

    def _asked(self, method: str, path: str, body: Json | None = None) -> httpx.Response:
        with self._told():
            response = self._http.request(method, path, json=body)
        if not response.is_success:
            raise self._refusal(response)
        return response

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
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
            raise UnreachableError(f"{self.url}: the answer broke off: {what}") from error

    def _refusal(self, response: httpx.Response) -> RemoteError:
        told = _message(response)
        if response.has_redirect_location:  # not followed: that place would get the key
            place = response.headers["Location"][:MAX_TOLD_CHARS]
            told = f"{self.url} redirects to {place}; if that is the server, name it with --url"
        if response.status_code == 401:
            told = f"{told} (name a key with --api-key-file, --api-key or in the environment)"
        return RemoteError(told, response.status_code)


def _message(response: httpx.Response) -> str:
    try:
        error = response.json()["error"]
        return str(error["message"])[:MAX_TOLD_CHARS]
    except (ValueError, KeyError, TypeError):
        text = response.text.strip()[:MAX_TOLD_CHARS]
        return f"HTTP {response.status_code}: {text}" if text else f"HTTP {response.status_code}"


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
