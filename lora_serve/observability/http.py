"""Counts of HTTP requests by route and status, and how many generations are in flight.

Labels come from the routes that exist, never from what a client writes, so there are few series.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.exposition import generate_latest

METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
NO_ROUTE = "none"


class HTTPMetrics:
    """One server's counts, in a registry of their own.

    num_generating: requests for completions that have not been answered to the end.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.num_generating = 0
        self._requests = Counter(
            "http_requests",
            "Requests by route, method and status.",
            ("handler", "method", "status"),
            registry=self._registry,
        )
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "From a request's head to the end of its answer.",
            ("handler", "method"),
            buckets=SECONDS,
            registry=self._registry,
        )
        ProcessCollector(registry=self._registry)

    def observe(self, route: str | None, method: str, status: int, seconds: float) -> None:
        """Count one answered request; `route` is its path template, None if it had no route."""
        handler = route or NO_ROUTE
        known_method = method if method in METHODS else "other"
        self._requests.labels(handler, known_method, str(status)).inc()
        self._seconds.labels(handler, known_method).observe(seconds)

    def render(self) -> bytes:
        """Write the metrics in Prometheus' text format."""
        return generate_latest(self._registry)
