"""The images' HEALTHCHECK asks a real server at the address that its command line says."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import trustme

from lora_serve.config import ServerConfig
from tests.fakes.engine import FakeEngine
from tests.server.clients import serving

FILE = Path(__file__).parents[2] / "docker" / "healthcheck.py"
RunsServer = Callable[..., Path]


@pytest.fixture(scope="module")
def healthcheck() -> ModuleType:
    spec = importlib.util.spec_from_file_location("healthcheck", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def processes(tmp_path: Path) -> RunsServer:
    """Makes a directory like /proc in which a server runs beside other programs."""

    def make(*flags: str) -> Path:
        for number, words in enumerate(
            (
                ["tini", "--", "lora-serve", "bench"],
                ["/opt/venv/bin/python", "/opt/venv/bin/lora-serve", "serve", "m", *flags],
                ["python", "-c", "from multiprocessing import spawn"],
            )
        ):
            (tmp_path / str(number)).mkdir()
            (tmp_path / str(number) / "cmdline").write_text("\0".join(words) + "\0")
        return tmp_path

    return make


async def checked(healthcheck: ModuleType, processes: Path) -> int:
    return int(await asyncio.to_thread(healthcheck.main, processes))


async def test_it_finds_the_port_that_the_server_was_given(
    healthcheck: ModuleType, processes: RunsServer
) -> None:
    engine = FakeEngine()
    async with serving(engine) as address:
        proc = processes("--host", "0.0.0.0", "--port", address.rpartition(":")[2])
        assert await checked(healthcheck, proc) == 0
        engine.is_alive = False
        assert await checked(healthcheck, proc) == 1


async def test_it_names_an_allowed_host(healthcheck: ModuleType, processes: RunsServer) -> None:
    config = ServerConfig(allowed_hosts=("llm.example.org",))
    async with serving(FakeEngine(), config) as address:
        proc = processes(
            f"--port={address.rpartition(':')[2]}", "--allowed_hosts", "llm.example.org"
        )
        assert await checked(healthcheck, proc) == 0


async def test_it_speaks_tls_where_the_server_does(
    healthcheck: ModuleType, processes: RunsServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("tls")
    certificate = trustme.CA().issue_cert("llm.example.org")
    certificate.private_key_pem.write_to_path(directory / "key")
    certificate.cert_chain_pems[0].write_to_path(directory / "cert")
    files = {"ssl_certfile": str(directory / "cert"), "ssl_keyfile": str(directory / "key")}
    async with serving(FakeEngine(), ServerConfig(**files)) as address:
        flags = [word for name, file in files.items() for word in (f"--{name}", file)]
        proc = processes("--port", address.rpartition(":")[2], *flags)
        assert await checked(healthcheck, proc) == 0


async def test_no_server_is_not_well(
    healthcheck: ModuleType,
    processes: RunsServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert await checked(healthcheck, tmp_path) == 1
    assert "no `lora-serve serve` runs here" in capsys.readouterr().out
    assert await checked(healthcheck, processes("--port", "1")) == 1


@pytest.mark.parametrize("image", ["cpu", "cuda"])
def test_the_images_run_it(image: str) -> None:
    text = (FILE.parent / f"Dockerfile.{image}").read_text()
    assert "COPY docker/healthcheck.py /opt/healthcheck.py" in text
    assert 'CMD ["python", "/opt/healthcheck.py"]' in text
