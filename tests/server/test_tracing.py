"""Spans of requests, as a small collector in this process gets them by OTLP over HTTP."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from lora_serve.cli.environment import with_environment
from lora_serve.config import ServerConfig
from lora_serve.demo.server_process import free_port
from lora_serve.errors import ConfigError, OverloadedError
from lora_serve.server import tracing
from lora_serve.server.app import create_app
from lora_serve.server.export_warnings import ExportWarnings
from lora_serve.server.tracing import CLOSE_SECONDS, _protocol, check_tracing, open_tracing
from tests.fakes.engine import FakeEngine, write_adapter

pytest.importorskip("opentelemetry.sdk", reason="*** NO OPENTELEMETRY: traces are not tried ***")

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(ThreadingHTTPServer):
    """Keeps the bodies that it is sent. delay: before each answer."""

    daemon_threads = True
    delay = 0.0

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def spans(self) -> list[Any]:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        return [
            span
            for body in self.bodies
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(self.server.delay)
        self.server.bodies.append(body)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever, daemon=True)
        thread.start()
        yield collector
        collector.shutdown()
        thread.join()


@asynccontextmanager
async def traced(engine: FakeEngine, url: str) -> Any:
    """A client of a server that exports to `url`; all has been exported when it ends."""
    config = ServerConfig(otlp_traces_endpoint=url)
    check_tracing(config)
    requests = open_tracing(config)
    app = create_app(engine, config, tracing=requests)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client
    assert requests is not None
    requests.close()


def attributes(span: Any) -> dict[str, object]:
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes
    }


async def test_a_request_is_a_span_of_its_callers_trace_with_vllms_attributes(
    collector: Collector, tmp_path: Path
) -> None:
    engine = FakeEngine()
    loaded = await engine.load_lora_adapter("a", write_adapter(tmp_path / "a", "one"))
    body = {"model": "a", "prompt": "secret", "max_tokens": 5, "request_id": "mine", "top_p": 0.5}
    async with traced(engine, collector.url) as client:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        response = await client.post("/v1/completions", json=body, headers=headers)
        await client.get("/health")
    (span,) = collector.spans()
    assert span.name == "llm_request"
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert response.headers["traceresponse"] == f"00-{TRACE}-{span.span_id.hex()}-01"
    told = attributes(span)
    assert told == {
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "gen_ai.request.id": "mine",
        "gen_ai.request.n": 1,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_p": 0.5,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.response.model": "a",
        "gen_ai.usage.prompt_tokens": 7,
        "gen_ai.usage.completion_tokens": 5,
        "gen_ai.usage.num_sequences": 1,
        "gen_ai.latency.time_in_queue": 0.5,
        "gen_ai.latency.time_to_first_token": 1.0,
        "gen_ai.latency.e2e": 3.0,
        "gen_ai.latency.time_in_model_prefill": 0.5,
        "gen_ai.latency.time_in_model_decode": 2.0,
        "gen_ai.latency.time_in_model_inference": 2.5,
        "lora_serve.cached_tokens": 0,
        "lora_serve.finish_reason": "length",
        "lora_serve.adapter": "a",
        "lora_serve.adapter.digest": loaded.digest,
        "lora_serve.adapter.generation": 0,
    }
    assert b"secret" not in b"".join(collector.bodies)
    assert b"lora-serve" in collector.bodies[0]  # the service's name


async def test_a_request_that_fails_is_a_span_with_its_error(collector: Collector) -> None:
    engine = FakeEngine()
    engine.error = OverloadedError("full")
    async with traced(engine, collector.url) as client:
        await client.post("/v1/completions", json={"prompt": "x"})
        await client.post("/v1/completions", json={"nonsense": 1})
    told = [attributes(span) for span in collector.spans()]
    assert [each["http.response.status_code"] for each in told] == [503, 400]
    assert [each["error.type"] for each in told] == ["ServiceUnavailableError", "BadRequestError"]


async def test_a_trace_that_its_caller_does_not_sample_is_not_exported(
    collector: Collector,
) -> None:
    async with traced(FakeEngine(), collector.url) as client:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        response = await client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    assert response.status_code == 200
    assert not collector.spans()


@pytest.mark.parametrize("value", ["", "garbage", f"00-{'0' * 32}-{PARENT}-01", "ff-" + "x" * 9000])
async def test_a_traceparent_that_is_none_begins_a_trace(value: str, collector: Collector) -> None:
    async with traced(FakeEngine(), collector.url) as client:
        headers = {"traceparent": value}
        response = await client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    (span,) = collector.spans()
    assert response.headers["traceresponse"].split("-")[1] == span.trace_id.hex()
    assert not span.parent_span_id


@pytest.mark.parametrize("kind", ["dead", "slow"])
async def test_a_collector_that_does_not_answer_hurts_no_answer_and_holds_no_end(
    kind: str, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "CLOSE_SECONDS", 0.5)
    monkeypatch.setattr(collector, "delay", 5.0, raising=False)
    url = collector.url if kind == "slow" else f"http://127.0.0.1:{free_port()}"
    began = time.monotonic()
    async with traced(FakeEngine(), url) as client:
        for _ in range(20):
            response = await client.post("/v1/completions", json={"prompt": "x"})
            assert response.status_code == 200
    assert time.monotonic() - began < 4


def test_a_collector_that_is_gone_is_one_short_warning_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    warnings = ExportWarnings("http://gone:4318", clock=lambda: now[0])
    package = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    for now[0] in (0.0, 1.0, 59.0, 61.0):
        package.warning("Max retries exceeded (%s [Errno 111] Connection refused')", "x" * 500)
    now[0] = 200.0
    package.error("long " * 100)
    warnings.close()
    package.warning("afterwards")
    prefix = "no spans reach http://gone:4318 (--otlp-traces-endpoint)"
    assert caplog.messages == [
        f"{prefix}: Connection refused",
        f"{prefix}, 2 warnings untold: Connection refused",
        f"{prefix}: {('long ' * 100)[:120]}…",
        "afterwards",
    ]


async def test_no_warning_shows_the_collectors_password(caplog: pytest.LogCaptureFixture) -> None:
    url = f"http://user:secret@127.0.0.1:{free_port()}"
    async with traced(FakeEngine(), url) as client:
        await client.post("/v1/completions", json={"prompt": "x"})
    assert "no spans reach http://127.0.0.1:" in caplog.text
    assert "secret" not in caplog.text


def test_the_form_of_the_export_follows_the_endpoint_unless_it_is_said() -> None:
    for url, protocol in (
        ("http://c:4318", "http/protobuf"),
        ("http://c:4318/v1/traces", "http/protobuf"),
        ("http://c:4317", "grpc"),
        ("grpc://c", "grpc"),
    ):
        assert _protocol(ServerConfig(otlp_traces_endpoint=url)) == protocol
    said = ServerConfig(otlp_traces_endpoint="http://c:4317", otlp_traces_protocol="http/protobuf")
    assert _protocol(said) == "http/protobuf"
    with pytest.raises(ConfigError, match="--otlp-traces-protocol udp must be one of grpc, http"):
        ServerConfig(otlp_traces_protocol="udp")


def test_opentelemetrys_variables_stand_in_for_flags() -> None:
    variables = {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc",
    }
    config = with_environment(ServerConfig(), variables)
    assert config.otlp_traces_endpoint == "http://c:4318"
    assert config.otlp_traces_protocol == "grpc"
    given = ServerConfig(otlp_traces_endpoint="http://mine:4318")
    assert with_environment(given, variables).otlp_traces_endpoint == "http://mine:4318"
    assert with_environment(ServerConfig(), {}).otlp_traces_endpoint is None


@pytest.mark.parametrize("url", ["localhost:4318", "ftp://c", "http://"])
def test_an_endpoint_that_is_no_url_is_refused_at_start(url: str) -> None:
    with pytest.raises(ConfigError, match="must be a URL, such as http://127"):
        check_tracing(ServerConfig(otlp_traces_endpoint=url))


def test_a_missing_package_is_told_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_is_installed", lambda package: False)
    with pytest.raises(ConfigError, match=r"sdk is missing\): pip install 'lora-serve\[otel\]'"):
        check_tracing(ServerConfig(otlp_traces_endpoint="http://c:4318"))
    check_tracing(ServerConfig())
    assert CLOSE_SECONDS < 10


def test_no_sdk_is_imported_by_a_server_that_is_not_asked_for_traces() -> None:
    script = (
        "import sys, lora_serve.server.app\n"
        "assert not {'opentelemetry.sdk', 'opentelemetry.exporter', 'grpc'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
