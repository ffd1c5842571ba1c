"""A span of OpenTelemetry for each request that generates, with vLLM's names of attributes.

A request's `traceparent` is taken as the parent, and the answer's `traceresponse` names its own
span. Spans are exported by a thread of the SDK's, which drops what a collector does not take, so
no answer waits for one. The package is an extra, and imported for --otlp-traces-endpoint alone.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from lora_serve import __version__
from lora_serve.config import ServerConfig
from lora_serve.errors import ConfigError
from lora_serve.identity import BASE_MODEL
from lora_serve.server.export_warnings import ExportWarnings
from lora_serve.server.http.request_record import RequestRecord
from lora_serve.server_url import without_password

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

SPAN_NAME = "llm_request"
GRPC, HTTP = "grpc", "http/protobuf"
GRPC_PORT = 4317
TRACES_PATH = "/v1/traces"
CLOSE_SECONDS = 3.0  # that the end of a server waits for the collector

Attributes = Mapping[str, str | int | float | bool]


class RequestTracing:
    """Makes the spans of one server. End with `close`."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        named = Resource({"service.name": "lora-serve", "service.version": __version__})
        resource = named.merge(OTELResourceDetector().detect())  # OTEL_SERVICE_NAME and the like
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer: Tracer = self._provider.get_tracer("lora_serve", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._warnings = ExportWarnings(without_password(endpoint))

    def begin(self, scope: Scope) -> RequestSpan:
        from opentelemetry.trace import SpanKind

        context = self._propagator.extract(Headers(scope=scope))
        return RequestSpan(
            self._tracer.start_span(SPAN_NAME, context=context, kind=SpanKind.SERVER)
        )

    def close(self) -> None:
        """Export what has ended, if the collector takes it in time."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        self._warnings.close()


class RequestSpan:
    """One request's span. traceresponse: names it, in the form of W3C's traceparent."""

    def __init__(self, span: Span) -> None:
        self._span = span
        context = span.get_span_context()
        self.trace_id = f"{context.trace_id:032x}"
        self.traceresponse = (
            f"00-{self.trace_id}-{context.span_id:016x}-{int(context.trace_flags):02x}"
        )

    def end(self, record: RequestRecord, route: str, status: int) -> None:
        if self._span.is_recording():
            self._span.set_attribute("http.route", route)
            self._span.set_attribute("http.response.status_code", status)
            self._span.set_attributes(attributes(record))
            if record.error:
                from opentelemetry.trace import Status, StatusCode

                self._span.set_attribute("error.type", record.error)
                self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


def attributes(record: RequestRecord) -> Attributes:
    """What is known of a request, by vLLM's names; ours begin with "lora_serve". Seconds."""
    known: dict[str, str | int | float | bool | None] = {}
    if record.requests:
        params = record.requests[0].params
        known |= {
            "gen_ai.request.id": record.requests[0].client_request_id,
            "gen_ai.request.n": params.n,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.response.model": record.model,
            "gen_ai.usage.prompt_tokens": record.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": record.num_output_tokens,
            "gen_ai.usage.num_sequences": sum(each.params.n for each in record.requests),
            "gen_ai.latency.time_in_queue": record.queue_seconds,
            "gen_ai.latency.time_to_first_token": record.first_token_seconds,
            "lora_serve.cached_tokens": record.num_cached_tokens,
            "lora_serve.finish_reason": record.finish_reason or None,
        }
    if record.adapter is not BASE_MODEL:
        known["lora_serve.adapter"] = record.adapter.name
        known["lora_serve.adapter.digest"] = record.adapter.digest.hex()
        known["lora_serve.adapter.generation"] = record.adapter.generation
    if (times := record.last_times) is not None:
        known |= {
            "gen_ai.latency.e2e": times.last_token - times.arrival,
            "gen_ai.latency.time_in_model_prefill": times.first_token - times.scheduled,
            "gen_ai.latency.time_in_model_decode": times.last_token - times.first_token,
            "gen_ai.latency.time_in_model_inference": times.last_token - times.scheduled,
        }
    return {name: value for name, value in known.items() if value is not None}


def check_tracing(config: ServerConfig) -> None:
    """Refuse an endpoint that cannot be exported to, before anything is loaded.

    Raises:
        ConfigError: it is no URL, or a package is missing.
    """
    endpoint = config.otlp_traces_endpoint
    if endpoint is None:
        return
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https", "grpc") or not url.hostname:
        raise ConfigError(
            f"--otlp-traces-endpoint {endpoint} must be a URL, such as http://127.0.0.1:4318 or "
            "grpc://127.0.0.1:4317"
        )
    form = "grpc" if _protocol(config) == GRPC else "http"
    for package in ("opentelemetry.sdk", f"opentelemetry.exporter.otlp.proto.{form}"):
        if not _is_installed(package):
            raise ConfigError(
                f"--otlp-traces-endpoint needs OpenTelemetry ({package} is missing): "
                "pip install 'lora-serve[otel]'"
            )


def open_tracing(config: ServerConfig) -> RequestTracing | None:
    """The tracing that the settings ask for; None if they name no endpoint."""
    endpoint = config.otlp_traces_endpoint
    if endpoint is None:
        return None
    if _protocol(config) == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        is_insecure = not endpoint.startswith("https:")
        url = endpoint.replace("grpc:", "http:", 1)
        return RequestTracing(Grpc(endpoint=url, insecure=is_insecure), endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

    has_path = urlsplit(endpoint).path.strip("/")
    url = endpoint if has_path else endpoint.rstrip("/") + TRACES_PATH
    return RequestTracing(Http(endpoint=url), endpoint)


def _protocol(config: ServerConfig) -> str:
    """The protocol that was asked for; else the endpoint tells, as gRPC has a port of its own."""
    if config.otlp_traces_protocol is not None:
        return config.otlp_traces_protocol
    url = urlsplit(config.otlp_traces_endpoint or "")
    return GRPC if url.scheme == "grpc" or url.port == GRPC_PORT else HTTP


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of what it is a part of
        return False
