"""The HTTP server: its address, its keys, and how long it waits for clients."""

from __future__ import annotations

from dataclasses import dataclass

from lora_serve.config.setting import require_at_least, setting
from lora_serve.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP server."""

    host: str = setting("Address to listen on.", "0.0.0.0", metavar="ADDRESS")
    port: int = setting("Port to listen on.", 8000)
    api_key: tuple[str, ...] = setting(
        "Keys that may use the API; open to all if left out.", (), repeat="nargs", metavar="KEY"
    )
    admin_api_key: tuple[str, ...] = setting(
        "Keys that may also load and unload adapters and reset caches; every key may if left out.",
        (),
        repeat="nargs",
        metavar="KEY",
    )
    isolate_api_keys: bool = setting("Never share cached KV between API keys.", False)
    ignore_unknown_fields: bool = setting(
        "Ignore unknown fields of request bodies instead of refusing them by name.", False
    )
    chat_template: str | None = setting(
        "File with a chat template to use instead of the tokenizer's.", None, metavar="FILE"
    )
    max_body_bytes: int = setting("Largest request body accepted, in bytes.", 256 * 2**20)
    max_connections: int = setting(
        "Most connections open at once, as far as the system's limit of open files allows; a "
        "further one takes the place of one without a request, or gets 503.",
        16384,
    )
    request_head_timeout: float = setting(
        "Seconds in which a connection must have sent a whole request's head; 0 for any.", 10.0
    )
    request_body_timeout: float = setting(
        "Seconds in which a request's body must have been sent; 0 for any.", 60.0
    )
    response_read_timeout: float = setting(
        "Seconds in which a client must take some of the answer that waits for it; 0 for any. Only "
        "Linux can tell.",
        60.0,
    )
    drain_timeout: float = setting(
        "Seconds that answers may still take after SIGTERM before they are ended.", 30.0
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port} must be in [0, 65535]")
        if self.isolate_api_keys and not (self.api_key or self.admin_api_key):
            raise ConfigError("--isolate-api-keys needs --api-key")
        require_at_least(1, "--max-body-bytes", self.max_body_bytes)
        require_at_least(1, "--max-connections", self.max_connections)
        require_at_least(0, "--request-head-timeout", self.request_head_timeout)
        require_at_least(0, "--request-body-timeout", self.request_body_timeout)
        require_at_least(0, "--response-read-timeout", self.response_read_timeout)
        require_at_least(0, "--drain-timeout", self.drain_timeout)
