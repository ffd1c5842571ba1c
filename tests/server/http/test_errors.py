from __future__ import annotations

import inspect
import logging

import httpx
import pytest

from lora_serve import errors
from lora_serve.errors import (
    AdapterFormatError,
    EngineDeadError,
    LoraServeError,
    OverloadedError,
    PromptTooLongError,
)
from lora_serve.server.http.errors import INTERNAL, error_response, status_and_type
from tests.fakes.engine import FakeEngine
from tests.server.clients import error_of

URL = "/v1/completions"
ROUTES = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/base/model"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/health"),
    ("GET", "/ping"),
    ("POST", "/ping"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/load"),
]
WITH_BODY = [
    url
    for method, url in ROUTES
    if method == "POST" and url not in ("/ping", "/reset_prefix_cache")
]


def test_every_error_a_user_can_cause_has_a_status_of_its_own_kind() -> None:
    kinds = [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, LoraServeError)
        and kind not in (LoraServeError, errors.ConfigError)  # these never come from a request
    ]
    assert len(kinds) >= 12
    for kind in kinds:
        status, _ = status_and_type(kind.__new__(kind))
        assert status in (400, 401, 403, 404, 408, 409, 500, 503), kind


def test_a_subclass_is_answered_like_its_nearest_base() -> None:
    assert status_and_type(PromptTooLongError("x")) == (400, "BadRequestError")
    assert status_and_type(AdapterFormatError("/a", ["x"])) == (400, "InvalidUserInput")
    assert status_and_type(LoraServeError("x")) == INTERNAL
    assert status_and_type(KeyError("x")) == INTERNAL


def test_an_overloaded_server_says_when_to_come_back() -> None:
    response = error_response(OverloadedError("the queue is full", retry_after_seconds=7))
    assert response.status_code == 503
    assert response.headers["Retry-After"] == "7"
    assert error_response(EngineDeadError("gone")).headers["Retry-After"] == "1"


async def test_an_unknown_route_is_a_404_in_the_common_shape(client: httpx.AsyncClient) -> None:
    error = error_of(await client.get("/v2/nothing"), 404)
    assert error["message"] == "there is no route /v2/nothing"


@pytest.mark.parametrize(("method", "url"), ROUTES)
async def test_another_method_is_a_405_in_the_common_shape(
    client: httpx.AsyncClient, method: str, url: str
) -> None:
    response = await client.request("DELETE", url)
    assert error_of(response, 405)["message"].startswith(f"DELETE is not allowed on {url}; use ")
    assert response.headers["Allow"]


@pytest.mark.parametrize("url", WITH_BODY)
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "Invalid JSON: EOF"),
        (b"{", "Invalid JSON"),
        (b"[]", "the body: must be an object"),
        (b"null", "the body: must be an object"),
        (b'{"a": 1,}', "Invalid JSON: trailing comma"),
        (b'{"model": "\\ud800"}', "Invalid JSON"),
        (b'{"model": "\xff"}', "Invalid JSON: invalid unicode"),
        (b"\xff\xfe", "Invalid JSON"),
        (b'{"model": ' + b"[" * 10_000, "Invalid JSON: recursion limit"),
        (b'{"model": ' + b"[" * 100_000, "the body holds 100001 lists and objects"),
        (b'{"model": ' + b"9" * 100_000 + b"}", "number out of range"),
    ],
)
async def test_what_is_no_json_object_is_a_400(
    client: httpx.AsyncClient, url: str, content: bytes, words: str
) -> None:
    headers = {"Content-Type": "application/json"}
    error = error_of(await client.post(url, content=content, headers=headers), 400)
    assert words in error["message"]
    assert error["type"] == "BadRequestError"


@pytest.mark.parametrize("url", WITH_BODY)
@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
async def test_another_content_type_is_a_400(
    client: httpx.AsyncClient, url: str, content_type: str | None
) -> None:
    headers = {"Content-Type": content_type} if content_type else {}
    error = error_of(await client.post(url, content=b"{}", headers=headers), 400)
    expected = "Unsupported Media Type: Only 'application/json' is allowed"
    assert error["message"].startswith(expected)


@pytest.mark.parametrize("url", WITH_BODY)
async def test_unknown_fields_are_all_named(client: httpx.AsyncClient, url: str) -> None:
    error = error_of(await client.post(url, json={"temprature": 1, "best-of": 2}), 400)
    assert "unknown fields `temprature`, `best-of`" in error["message"]
    assert "--ignore-unknown-fields" in error["message"]


@pytest.mark.parametrize("url", WITH_BODY)
async def test_unknown_fields_that_are_null_ask_for_nothing(
    client: httpx.AsyncClient, url: str
) -> None:
    nulls = {"new_field": None, "newer-field": None}
    plain = await client.post(url, json={"temprature": 1})
    both = await client.post(url, json={"temprature": 1, **nulls})
    assert error_of(both, 400)["message"] == error_of(plain, 400)["message"]
    assert "unknown field" not in (await client.post(url, json=nulls)).text


async def test_a_null_hides_no_other_fault(client: httpx.AsyncClient) -> None:
    """What is checked of a message as a whole is checked when its fields are known to be right."""
    chat = {"messages": [{"role": "user", "content": None, "new_field": None}]}
    error = error_of(await client.post("/v1/chat/completions", json=chat), 400)
    assert "messages[0]: has no content" in error["message"]
    whole = {"messages": [{"role": "user", "content": "hi", "new_field": None}], "newer": None}
    assert (await client.post("/v1/chat/completions", json=whole)).status_code == 200


async def test_a_bug_is_logged_and_kept_from_the_client(
    engine: FakeEngine, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    engine.error = KeyError("secret of /etc/passwd")
    for is_stream in (False, True):
        response = await client.post(URL, json={"prompt": "hi", "stream": is_stream})
        error = error_of(response, 500)
        assert error["type"] == "InternalServerError"
        assert "secret" not in response.text
    records = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(records) == 2
    assert all(record.exc_info for record in records)
    assert "secret" in caplog.text


async def test_a_full_queue_is_a_503_before_a_stream_begins(
    engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    engine.error = OverloadedError("256 requests wait already", retry_after_seconds=3)
    response = await client.post(URL, json={"prompt": "hi", "stream": True})
    error = error_of(response, 503)
    assert error["type"] == "ServiceUnavailableError"
    assert error["message"] == "256 requests wait already"
    assert response.headers["Retry-After"] == "3"


async def test_a_dead_engine_is_a_503_wherever_it_is_needed(
    engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    engine.is_alive = False
    for method, url, body in (
        ("POST", URL, {"prompt": "hi"}),
        ("GET", "/v1/models", None),
        ("POST", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": "a"}),
        ("POST", "/reset_prefix_cache", {}),
        ("GET", "/health", None),
        ("GET", "/ping", None),
    ):
        response = await client.request(method, url, json=body)
        error_of(response, 503)
        assert response.headers["Retry-After"] == "1"


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/completions", "/v1/completions"),
        ("/models", "/v1/models"),
        ("/v1/v1/embeddings", "/v1/embeddings"),
        ("/completions/", "/v1/completions"),
    ],
)
async def test_a_base_url_that_is_not_quite_right_is_told(
    path: str, near: str, client: httpx.AsyncClient
) -> None:
    error = error_of(await client.post(path, json={}), 404)
    assert error["message"] == (
        f"there is no route {path}; there is {near}: set the client's base URL to end in /v1, "
        "without a slash"
    )


@pytest.mark.parametrize(
    ("path", "near", "place"),
    [
        ("/v1/completions/", "/v1/completions", "end"),
        ("/generate/", "/generate", "end"),
        ("//v1/completions", "/v1/completions", "beginning"),
    ],
)
async def test_a_slash_too_many_is_told(
    path: str, near: str, place: str, client: httpx.AsyncClient
) -> None:
    error = error_of(await client.post(f"http://localhost{path}", json={}), 404)
    assert error["message"] == (
        f"there is no route {path}; there is {near}: leave out the slash at the {place}"
    )


@pytest.mark.parametrize("path", ["/v1", "/v1/"])
async def test_the_base_url_itself_is_told_to_be_one(path: str, client: httpx.AsyncClient) -> None:
    error = error_of(await client.get(path), 404)
    assert error["message"].startswith(f"there is no route {path}: it is a base URL")
