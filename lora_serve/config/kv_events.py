"""What consumers are told of the KV that can be found here, as JSON in vLLM's form or as flags."""

from __future__ import annotations

from dataclasses import dataclass

from lora_serve.config.json_settings import take_in_json
from lora_serve.config.setting import require_at_least, require_choices, setting
from lora_serve.errors import ConfigError

PUBLISHERS = ("zmq", "null")
ENCODINGS = ("map", "array")
TRANSPORTS = ("tcp://", "ipc://", "inproc://")
_FLAG = "kv-events-config"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """What consumers are told of the KV that can be found here."""

    kv_events_enable_kv_cache_events: bool = setting(
        "Publish which KV blocks can be found here, with their tokens, to whoever connects.",
        False,
        flag=f"{_FLAG}.enable-kv-cache-events",
    )
    kv_events_publisher: str = setting(
        "How they are published: over ZMQ, or not at all.",
        "zmq",
        choices=PUBLISHERS,
        flag=f"{_FLAG}.publisher",
    )
    kv_events_endpoint: str = setting(
        "Where: bound if it has a * or ::, or is ipc, such as tcp://*:5557; else connected to.",
        "tcp://*:5557",
        flag=f"{_FLAG}.endpoint",
    )
    kv_events_replay_endpoint: str | None = setting(
        "Where consumers ask for what they have missed, such as tcp://*:5558; it is bound.",
        None,
        flag=f"{_FLAG}.replay-endpoint",
    )
    kv_events_buffer_steps: int = setting(
        "Messages kept for the replay endpoint, at most 256 MiB.",
        10_000,
        flag=f"{_FLAG}.buffer-steps",
    )
    kv_events_hwm: int = setting(
        "Messages that wait for one slow consumer, which loses those beyond it.",
        100_000,
        flag=f"{_FLAG}.hwm",
    )
    kv_events_max_queue_size: int = setting(
        "Messages that wait to be encoded; with more, consumers are sent everything anew.",
        100_000,
        flag=f"{_FLAG}.max-queue-size",
    )
    kv_events_topic: str = setting(
        "Topic of all messages; llm-d reads kv@HOST:PORT@MODEL.", "", flag=f"{_FLAG}.topic"
    )
    kv_events_encoding: str = setting(
        "How events are written: map, with names, or array, by position, as vLLM did earlier.",
        "map",
        choices=ENCODINGS,
        flag=f"{_FLAG}.encoding",
    )
    kv_events_config: str | None = setting(
        "The settings above as JSON in vLLM's form, such as "
        '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}.',
        None,
        metavar="JSON",
    )

    def __post_init__(self) -> None:
        take_in_json(self, "kv_events_config", "kv_events_")
        require_choices(self)
        require_at_least(0, f"--{_FLAG}.buffer-steps", self.kv_events_buffer_steps)
        require_at_least(1, f"--{_FLAG}.hwm", self.kv_events_hwm)
        require_at_least(1, f"--{_FLAG}.max-queue-size", self.kv_events_max_queue_size)
        for name, endpoint in self.endpoints.items():
            if not endpoint.startswith(TRANSPORTS):
                raise ConfigError(
                    f"--{_FLAG}: {name} {endpoint!r} must begin with {', '.join(TRANSPORTS)}"
                )

    @property
    def is_enabled(self) -> bool:
        return self.kv_events_enable_kv_cache_events and self.kv_events_publisher == "zmq"

    @property
    def endpoints(self) -> dict[str, str]:
        """The endpoints that are given, by their names."""
        endpoints = {"endpoint": self.kv_events_endpoint}
        if self.kv_events_replay_endpoint is not None:
            endpoints["replay_endpoint"] = self.kv_events_replay_endpoint
        return endpoints
