"""The HTTP server: its address, its keys, and how long it waits for clients."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from lora_serve.config.json_settings import parse_json
from lora_serve.config.setting import read_quantities, require_at_least, require_choices, setting
from lora_serve.errors import ConfigError

ANY_HOST = frozenset({"", "0.0.0.0", "::"})
LOCALHOST = "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP server."""

    host: str = setting(
        "Address to listen on; the default can be reached only from this machine.",
        "127.0.0.1",
        metavar="ADDRESS",
    )
    port: int = setting("Port to listen on.", 8000)
    api_key: tuple[str, ...] = setting(
        "Keys that may generate; without any, everyone may. LORA_SERVE_API_KEY and VLLM_API_KEY "
        "are added.",
        (),
        repeat="nargs",
        metavar="KEY",
        is_secret=True,
    )
    api_key_file: str | None = setting(
        "File with such keys, one per line; read again on SIGHUP.", None, metavar="FILE"
    )
    admin_api_key: tuple[str, ...] = setting(
        "Keys that may also change the server: load and unload adapters, reset caches. "
        "LORA_SERVE_ADMIN_API_KEY is added.",
        (),
        repeat="nargs",
        metavar="KEY",
        is_secret=True,
    )
    admin_api_key_file: str | None = setting(
        "File with such keys, one per line; read again on SIGHUP.", None, metavar="FILE"
    )
    allow_runtime_lora_updating: bool = setting(
        "If there is no admin key, let every caller who may generate also change the server. The "
        "same as VLLM_ALLOW_RUNTIME_LORA_UPDATING=1.",
        False,
    )
    allowed_hosts: tuple[str, ...] = setting(
        "Hosts that requests may be addressed to and pages may come from. By default the names of "
        "loopback on a loopback address, and any elsewhere.",
        (),
        repeat="nargs",
        metavar="HOST",
    )
    allowed_origins: tuple[str, ...] = setting(
        "Origins whose pages may send requests and read answers, or * for any. By default those of "
        "the hosts above on a loopback address, and none elsewhere.",
        (),
        repeat="nargs",
        metavar="ORIGIN",
    )
    allowed_methods: tuple[str, ...] = setting(
        "Methods that pages of other origins may use.", ("*",), repeat="nargs", metavar="METHOD"
    )
    allowed_headers: tuple[str, ...] = setting(
        "Headers that pages of other origins may send.", ("*",), repeat="nargs", metavar="HEADER"
    )
    allow_credentials: bool = setting(
        "Let pages of --allowed-origins send cookies and certificates along.", False
    )
    root_path: str = setting(
        "Prefix that a proxy adds to all paths, as in /llm; requests may have it or not.",
        "",
        metavar="PATH",
    )
    uds: str | None = setting(
        "Listen on this Unix socket instead of --host and --port.", None, metavar="PATH"
    )
    http_timeout_keep_alive: int = setting(
        "Seconds that an idle connection is kept; set it above the idle time of a proxy before the "
        "server.",
        75,
    )
    disable_fastapi_docs: bool = setting("Serve neither /docs nor /openapi.json.", False)
    disable_ui: bool = setting("Do not serve the page for browsers, /ui.", False)
    ssl_keyfile: str | None = setting("Private key for TLS, as PEM.", None, metavar="FILE")
    ssl_certfile: str | None = setting(
        "Certificate chain for TLS, as PEM; the server then speaks https.", None, metavar="FILE"
    )
    ssl_ca_certs: str | None = setting(
        "Certificates that sign clients' certificates, as PEM; a client must then have one.",
        None,
        metavar="FILE",
    )
    isolate_api_keys: bool | None = setting(
        "Never share cached KV between API keys, because the time of an answer and its "
        "cached_tokens would show what others sent. On by default if there are keys.",
        None,
    )
    min_priority: int = setting(
        "Lowest `priority` (the first to be served) that a request without an admin key may have; "
        "by default 0. A server on a loopback address without keys accepts any.",
        0,
    )
    metrics_need_key: bool = setting(
        "If there are keys, /metrics, which names adapters, needs an admin key, or any key if "
        "there is no admin key.",
        True,
    )
    metrics_port: int | None = setting(
        "Port on which /metrics is served without a key, instead of --port.", None
    )
    metrics_host: str = setting(
        "Address to listen on for --metrics-port.", "127.0.0.1", metavar="ADDRESS"
    )
    otlp_traces_endpoint: str | None = setting(
        "Send a span of each request to this OTLP endpoint, as OTEL_EXPORTER_OTLP_TRACES_ENDPOINT "
        "does. Needs the extra otel.",
        None,
        metavar="URL",
    )
    otlp_traces_protocol: str | None = setting(
        "Protocol of the traces, as in OTEL_EXPORTER_OTLP_TRACES_PROTOCOL; by default gRPC for "
        "port 4317 or grpc://, otherwise HTTP.",
        None,
        choices=("grpc", "http/protobuf"),
    )
    ignore_unknown_fields: bool = setting(
        "Ignore unknown fields of request bodies instead of refusing them by name.", False
    )
    chat_template: str | None = setting(
        "Chat template to use instead of the tokenizer's: a file, or the template itself.",
        None,
        metavar="FILE",
    )
    trust_request_chat_template: bool = setting(
        "Accept a chat_template in requests. It is a program, run in a sandbox and in a process of "
        "its own, for 2 s of processor time and in 256 MiB.",
        False,
    )
    return_tokens_as_token_ids: bool = setting(
        'Write tokens in logprobs as "token_id:N" instead of their text, unless a request says '
        "otherwise.",
        False,
    )
    enable_tokenizer_info_endpoint: bool = setting(
        "Answer GET /tokenizer_info: the tokenizer's special tokens and the chat template.", False
    )
    enable_per_request_metrics: bool = setting(
        "Add `metrics` to each answer, or to the usage of a stream: how long it took.", False
    )
    enable_force_include_usage: bool = setting(
        "Send the usage in every chunk of a stream, as if stream_options asked for it.", False
    )
    tool_call_parser: str = setting(
        "Format of tool calls: hermes, llama3_json, mistral, pythonic, …; auto, by the chat "
        "template; or none.",
        "auto",
        metavar="NAME",
    )
    enable_auto_tool_choice: bool = setting(
        "Refuse to start if the format of tool calls is not known. Calls are read without this "
        "flag, too.",
        False,
    )
    reasoning_parser: str = setting(
        "Format of reasoning: qwen3, deepseek_r1, mistral, granite; auto, by the chat template; or "
        "none.",
        "auto",
        metavar="NAME",
    )
    max_stored_responses: int = setting(
        "Most responses of /v1/responses that are kept for previous_response_id and GET; 0 for "
        "none.",
        1024,
    )
    max_stored_response_bytes: int = setting(
        "Most memory for kept responses, with the conversations that they continue.",
        64 * 2**20,
        quantity="bytes",
    )
    stored_response_seconds: float = setting("Seconds for which a response is kept.", 3600.0)
    max_body_bytes: int = setting("Largest request body accepted.", 4 * 2**20, quantity="bytes")
    max_embeds_body_bytes: int = setting(
        "Largest request body with prompt_embeds, if --enable-prompt-embeds allows them.",
        64 * 2**20,
        quantity="bytes",
    )
    max_lora_body_bytes: int = setting(
        "Largest request body of /load_lora_adapter_from_tensors, and of all of these at once.",
        64 * 2**20,
        quantity="bytes",
    )
    max_lora_spool_bytes: int = setting(
        "Most disk space for adapters that came in such bodies, below TMPDIR.",
        16 * 2**30,
        quantity="bytes",
    )
    max_total_body_bytes: int = setting(
        "Most memory for request bodies that are being received and parsed. Beyond it, the slowest "
        "get 408, and one above 64 KiB waits for room for 5 s and then gets 503. A body that is "
        "larger alone is read alone.",
        64 * 2**20,
        quantity="bytes",
    )
    max_connections: int = setting(
        "Most connections open at once, as far as the system's limit on open files allows; a "
        "further one replaces an idle one, or gets 503.",
        16384,
    )
    max_connections_per_address: int = setting(
        "Most connections from one client address (with IPv6, from one /64 network); a further one "
        "gets 503. 0 for any number: behind a proxy, all clients have its address.",
        0,
    )
    request_head_timeout: float = setting(
        "Seconds in which a connection must send the whole head of a request; 0 for no limit.", 10.0
    )
    request_body_timeout: float = setting(
        "Seconds in which a request's body must be sent; 0 for no limit.", 60.0
    )
    response_read_timeout: float = setting(
        "Seconds in which a client must read some of the answer that waits for it; 0 for no limit. "
        "Works only on Linux.",
        60.0,
    )
    drain_timeout: float = setting(
        "Seconds that answers have to finish after SIGTERM before they are cut off.",
        30.0,
        aliases=("--shutdown-timeout",),
    )

    def __post_init__(self) -> None:
        read_quantities(self)
        for flag, port in (("--port", self.port), ("--metrics-port", self.metrics_port)):
            if port is not None and not 0 <= port <= 65535:
                raise ConfigError(f"{flag} {port} must be in [0, 65535]")
        require_choices(self)
        self._check_metrics_address()
        self._check_keys()
        self._check_tls()
        self._check_pages()
        if self.root_path and not re.fullmatch(r"(/[\w.~-]+)+", self.root_path):
            raise ConfigError(f"--root-path {self.root_path} must look like /llm or /a/b")
        if self.root_path.split("/")[1:2] == ["v1"]:
            raise ConfigError("--root-path must not begin with /v1, where the routes begin, too")
        require_at_least(1, "--http-timeout-keep-alive", self.http_timeout_keep_alive)
        require_at_least(0, "--max-stored-responses", self.max_stored_responses)
        require_at_least(1, "--max-stored-response-bytes", self.max_stored_response_bytes)
        require_at_least(1, "--stored-response-seconds", self.stored_response_seconds)
        require_at_least(1, "--max-body-bytes", self.max_body_bytes)
        require_at_least(1, "--max-embeds-body-bytes", self.max_embeds_body_bytes)
        require_at_least(1, "--max-lora-body-bytes", self.max_lora_body_bytes)
        require_at_least(1, "--max-lora-spool-bytes", self.max_lora_spool_bytes)
        require_at_least(1, "--max-total-body-bytes", self.max_total_body_bytes)
        require_at_least(1, "--max-connections", self.max_connections)
        require_at_least(0, "--max-connections-per-address", self.max_connections_per_address)
        require_at_least(0, "--request-head-timeout", self.request_head_timeout)
        require_at_least(0, "--request-body-timeout", self.request_body_timeout)
        require_at_least(0, "--response-read-timeout", self.response_read_timeout)
        require_at_least(0, "--drain-timeout", self.drain_timeout)

    @property
    def has_keys(self) -> bool:
        """Whether some key is asked for, by some flag."""
        return bool(
            self.api_key or self.admin_api_key or self.api_key_file or self.admin_api_key_file
        )

    @property
    def requires_api_key(self) -> bool:
        """Whether a request for an answer needs a key; with admin keys alone it needs none."""
        return bool(self.api_key or self.api_key_file)

    @property
    def is_local(self) -> bool:
        """Whether the server listens on a loopback address, which this machine alone reaches.

        A Unix socket does not count: proxies bring it clients from anywhere.
        """
        return self.uds is None and is_loopback(self.host)

    @property
    def isolates_keys(self) -> bool:
        """Whether cached KV is found only by the API key whose requests computed it."""
        return self.has_keys and self.isolate_api_keys is not False

    def _check_metrics_address(self) -> None:
        has_same_host = self.host == self.metrics_host or not ANY_HOST.isdisjoint(
            (self.host, self.metrics_host)
        )
        is_same = self.metrics_port == self.port != 0 and has_same_host
        if is_same and self.uds is None:
            raise ConfigError(
                f"--metrics-port {self.metrics_port} is the --port of the server itself; give "
                "/metrics another one, or leave the flag out to serve it with the rest"
            )

    def _check_keys(self) -> None:
        for flag, keys in (("--api-key", self.api_key), ("--admin-api-key", self.admin_api_key)):
            if not all(key.strip() for key in keys):
                raise ConfigError(
                    f"{flag} got an empty key, which any client could send; is the variable set "
                    "that should hold it?"
                )

    def _check_pages(self) -> None:
        """Take lists as JSON, too, as vLLM writes them."""
        for name in ("allowed_origins", "allowed_methods", "allowed_headers"):
            values = _listed(name, getattr(self, name))
            object.__setattr__(self, name, values)  # it is being made, and not yet shared
        if self.allow_credentials and (not self.allowed_origins or "*" in self.allowed_origins):
            raise ConfigError(
                "--allow-credentials needs --allowed-origins, without *: any page could act with "
                "its reader's certificate"
            )

    def _check_tls(self) -> None:
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ConfigError("--ssl-keyfile and --ssl-certfile go together; give both")
        if self.ssl_ca_certs and not self.ssl_certfile:
            raise ConfigError("--ssl-ca-certs needs --ssl-keyfile and --ssl-certfile")


def is_loopback(host: str) -> bool:
    """Whether a name or address, as --host takes it, is reached from this machine alone."""
    if host == LOCALHOST:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listed(name: str, values: tuple[str, ...]) -> tuple[str, ...]:
    """The values, and those of each that is a JSON list itself."""
    listed: list[str] = []
    for value in values:
        texts = [value]
        if value.startswith("["):
            try:
                texts = parse_json(value)
            except ValueError:
                texts = []
            if not texts or not all(isinstance(text, str) for text in texts):
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f'{flag} {value:.80} must be a JSON list of texts, as in ["*"]')
        listed += texts
    return tuple(listed)
