"""The paths at which platforms ask how a server is, by the names that they use."""

from __future__ import annotations

READY_PATHS = (  # 200 while requests are being answered, else 503: a balancer's question
    *("/health", "/healthz", "/readyz", "/v1/health", "/v1/health/ready", "/v2/health/ready"),
    "/ping",
)
LIVE_PATHS = (  # 200 as long as the server runs, also while it starts a dead engine again
    *("/livez", "/v1/health/live", "/v2/health/live"),
)
