from __future__ import annotations

import httpx
import pytest

from tests.server.clients import error_of

HEADER = "X-Request-Id"
BODY = {"prompt": "hi"}


async def test_the_clients_id_comes_back_with_every_kind_of_answer(
    client: httpx.AsyncClient,
) -> None:
    headers = {HEADER: "mine"}
    for method, path, body in (
        ("GET", "/health", None),
        ("GET", "/nowhere", None),
        ("POST", "/v1/completions", BODY),
        ("POST", "/v1/completions", {**BODY, "stream": True}),
        ("POST", "/v1/completions", {}),
    ):
        response = await client.request(method, path, json=body, headers=headers)
        assert response.headers[HEADER] == "mine"


async def test_without_one_each_answer_has_an_id_of_its_own(client: httpx.AsyncClient) -> None:
    answers = [await client.post("/v1/completions", json=BODY) for _ in range(2)]
    first, second = (answer.headers[HEADER] for answer in answers)
    assert first != second
    assert [answer.json()["id"] for answer in answers] == [f"cmpl-{first}", f"cmpl-{second}"]


@pytest.mark.parametrize("chosen", ["x" * 257, "", "caf\u00e9".encode("latin-1"), b"a\tb"])
async def test_what_no_header_should_hold_is_replaced(
    client: httpx.AsyncClient, chosen: str | bytes
) -> None:
    response = await client.get("/health", headers={HEADER: chosen})
    assert len(response.headers[HEADER]) == 32


async def test_an_error_has_the_id_too(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json={**BODY, "n": 0}, headers={HEADER: "e"})
    error_of(response, 400)
    assert response.headers[HEADER] == "e"
