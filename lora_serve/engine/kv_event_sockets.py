"""The sockets over which KV events are published, as the settings name their endpoints."""

from __future__ import annotations

import zmq

from lora_serve.config import KVEventsConfig
from lora_serve.config.server import is_loopback
from lora_serve.errors import ConfigError

_TCP = "tcp://"
MOST_REQUEST_BYTES = 1024  # of one that subscribes, or asks for what it has missed


class EventSockets:
    """The endpoints, bound or connected. One thread at a time uses them."""

    def __init__(self, config: KVEventsConfig) -> None:
        """Raises ConfigError, naming the endpoint that cannot be had."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # An XPUB is told of each consumer that subscribes, also of one that comes back.
        self.publisher = self._context.socket(zmq.XPUB)
        self.publisher.set_hwm(config.kv_events_hwm)
        self.publisher.set(zmq.XPUB_VERBOSE, 1)
        self.publisher.set(zmq.MAXMSGSIZE, MOST_REQUEST_BYTES)
        self.replay = self._context.socket(zmq.ROUTER)
        self.replay.set(zmq.SNDHWM, config.kv_events_buffer_steps + 1)
        self.replay.set(zmq.MAXMSGSIZE, MOST_REQUEST_BYTES)
        try:
            _attach(self.publisher, "endpoint", config.kv_events_endpoint)
            if config.kv_events_replay_endpoint is not None:
                _attach(self.replay, "replay_endpoint", config.kv_events_replay_endpoint, True)
        except ConfigError:
            self.close(0.0)
            raise

    def close(self, linger_seconds: float) -> None:
        self._context.destroy(linger=int(linger_seconds * 1e3))


def binds_at(endpoint: str) -> bool:
    """Whether a publisher binds there; else it connects to a consumer's address."""
    return "*" in endpoint or "::" in endpoint or not endpoint.startswith(_TCP)


def open_endpoints(config: KVEventsConfig) -> list[str]:
    """The endpoints that other machines may reach."""
    endpoints = config.endpoints
    bound = [one for name, one in endpoints.items() if name != "endpoint" or binds_at(one)]
    return [one for one in bound if one.startswith(_TCP) and not is_loopback(_host(one))]


def _host(endpoint: str) -> str:
    return endpoint.removeprefix(_TCP).rpartition(":")[0].strip("[]")


def _attach(socket: zmq.Socket[bytes], name: str, endpoint: str, binds: bool = False) -> None:
    """Bind, or connect to one that another process has bound, by vLLM's rule."""
    binds = binds or binds_at(endpoint)
    if "[" in endpoint:
        socket.set(zmq.IPV6, 1)
    try:
        if binds:
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"--kv-events-config: {name} {endpoint} cannot be used: {error.strerror}; name another"
        ) from error


def check_endpoints(config: KVEventsConfig) -> None:
    """Refuse endpoints that cannot be had now. Raises ConfigError."""
    if config.is_enabled:
        EventSockets(config).close(0.0)
