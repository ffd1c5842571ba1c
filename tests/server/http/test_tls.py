from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path

import httpx
import pytest
import trustme

from lora_serve.config import ServerConfig
from lora_serve.errors import ConfigError
from lora_serve.server.http import tls
from lora_serve.server.http.listener import check_tls
from tests.fakes.engine import FakeEngine
from tests.server.clients import eventually, serving

Wire = tuple[asyncio.StreamReader, asyncio.StreamWriter]

CA = trustme.CA()
OTHER_CA = trustme.CA()


def tls_config(directory: Path, **more: object) -> ServerConfig:
    certificate = CA.issue_cert("127.0.0.1")
    key, chain = directory / "key.pem", directory / "chain.pem"
    certificate.private_key_pem.write_to_path(key)
    for blob in certificate.cert_chain_pems:
        blob.write_to_path(chain, append=True)
    return ServerConfig(ssl_keyfile=str(key), ssl_certfile=str(chain), **more)  # type: ignore[arg-type]


def trusting_context(ca: trustme.CA = CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    ca.configure_trust(context)
    return context


async def test_a_server_with_a_certificate_speaks_https(engine: FakeEngine, tmp_path: Path) -> None:
    async with serving(engine, tls_config(tmp_path)) as url:
        assert url.startswith("https://")
        async with httpx.AsyncClient(verify=trusting_context()) as client:
            body = {"prompt": "hi", "max_tokens": 3}
            assert (await client.post(f"{url}/v1/completions", json=body)).status_code == 200
        async with httpx.AsyncClient(verify=trusting_context(OTHER_CA)) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(f"{url}/health")


async def test_with_ca_certs_a_client_needs_a_certificate_of_theirs(
    engine: FakeEngine, tmp_path: Path
) -> None:
    authority = tmp_path / "ca.pem"
    CA.cert_pem.write_to_path(authority)
    async with serving(engine, tls_config(tmp_path, ssl_ca_certs=str(authority))) as url:
        for ca, is_welcome in ((CA, True), (OTHER_CA, False), (None, False)):
            context = trusting_context()
            if ca is not None:
                ca.issue_cert("client.example").configure_cert(context)
            async with httpx.AsyncClient(verify=context) as client:
                if is_welcome:
                    assert (await client.get(f"{url}/health")).status_code == 200
                else:
                    with pytest.raises(httpx.TransportError):
                        await client.get(f"{url}/health")


async def test_new_connections_get_a_renewed_certificate_and_never_half_of_one(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "SECONDS_BETWEEN_LOOKS", 0.0)
    config = tls_config(tmp_path)
    renewed = OTHER_CA.issue_cert("127.0.0.1")

    async def is_trusted(ca: trustme.CA) -> bool:
        async with httpx.AsyncClient(verify=trusting_context(ca)) as client:
            try:
                return (await client.get(f"{url}/health")).status_code == 200
            except httpx.ConnectError:
                return False

    async with (
        serving(engine, config) as url,
        httpx.AsyncClient(verify=trusting_context()) as kept,
    ):
        assert (await kept.get(f"{url}/health")).status_code == 200
        renewed.private_key_pem.write_to_path(tmp_path / "key.pem")
        assert await is_trusted(CA), "the certificate of that key is not there yet"
        (tmp_path / "chain.pem").write_bytes(
            b"".join(blob.bytes() for blob in renewed.cert_chain_pems)
        )
        assert await is_trusted(OTHER_CA)
        assert not await is_trusted(CA)
        assert (await kept.get(f"{url}/health")).status_code == 200


@pytest.mark.parametrize(
    "flags",
    [{"ssl_keyfile": "k"}, {"ssl_certfile": "c"}, {"ssl_ca_certs": "a"}],
)
def test_half_of_what_tls_needs_is_refused(flags: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="--ssl-"):
        ServerConfig(**flags)


@pytest.mark.parametrize("broken", ["key.pem", "chain.pem", "ca.pem"])
def test_files_that_are_no_certificates_are_refused_before_the_model_is_read(
    tmp_path: Path, broken: str
) -> None:
    config = tls_config(tmp_path, ssl_ca_certs=str(tmp_path / "ca.pem"))
    CA.cert_pem.write_to_path(tmp_path / "ca.pem")
    check_tls(config)
    (tmp_path / broken).write_text("not PEM")
    with pytest.raises(ConfigError, match="cannot be used"):
        check_tls(config)


async def silent(url: str) -> Wire:
    """A connection on which no handshake begins."""
    host, port = url.removeprefix("https://").split(":")
    return await asyncio.open_connection(host, int(port))


async def test_a_handshake_that_does_not_come_is_not_waited_for(
    engine: FakeEngine, tmp_path: Path
) -> None:
    async with serving(engine, tls_config(tmp_path, request_head_timeout=0.2)) as url:
        reader, writer = await silent(url)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()


async def test_silent_handshakes_count_as_connections_and_give_way(
    engine: FakeEngine, tmp_path: Path
) -> None:
    async with serving(engine, tls_config(tmp_path, max_connections=3)) as url:
        wires = [await silent(url) for _ in range(3)]
        async with httpx.AsyncClient(verify=trusting_context()) as client:
            assert (await client.get(f"{url}/health")).status_code == 200
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(wires[0][0].read(), 5) == b"", "the first of them"
        for _, writer in wires:
            writer.close()


async def test_a_failed_handshake_makes_its_room_free(engine: FakeEngine, tmp_path: Path) -> None:
    engine.gate.clear()
    async with (
        serving(engine, tls_config(tmp_path, max_connections=2)) as url,
        httpx.AsyncClient(verify=trusting_context()) as client,
    ):
        body = {"prompt": "hi", "max_tokens": 3}
        answer = asyncio.create_task(client.post(f"{url}/v1/completions", json=body))
        await eventually(lambda: engine.growing)
        for _ in range(3):
            reader, writer = await silent(url)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), 5)
            writer.close()
        async with httpx.AsyncClient(verify=trusting_context()) as other:
            assert (await other.get(f"{url}/health")).status_code == 200
        engine.gate.set()
        assert (await answer).status_code == 200
