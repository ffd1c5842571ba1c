"""Adapters: how many, how large, from where."""

from __future__ import annotations

from dataclasses import dataclass

from lora_serve.config.json_settings import parse_json
from lora_serve.config.setting import read_quantities, require_at_least, setting
from lora_serve.errors import ConfigError

MAX_LORAS = 8
DIRECTORY, HUB, S3 = "dir:", "hf", "s3://"  # how a place of --lora-resolver begins


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAConfig:
    """Adapters: how many, how large, from where."""

    enable_lora: bool = setting("Serve LoRA adapters, and allow loading them at run time.", False)
    max_loras: int = setting(
        f"Most different adapters in one step; {MAX_LORAS} if left out, or --max-cpu-loras if that "
        "is less.",
        None,
    )
    max_cpu_loras: int | None = setting(
        "Most adapters kept in memory; others are read again when needed. 8 x max-loras if left "
        "out.",
        None,
    )
    max_lora_rank: int = setting("Highest rank an adapter may have.", 64)
    max_lora_expert_rank: int | None = setting(
        "Highest rank an adapter may have on experts that tokens choose. If left out, it is "
        "max-lora-rank on CPUs, and adapters change no experts on GPUs, which set memory aside for "
        "them.",
        None,
    )
    max_lora_vocab_bytes: int = setting(
        "Most memory for what an adapter changes of embeddings and LM head: rows of tokens, whole "
        "copies, and LoRA on these two.",
        32 * 2**20,
        quantity="bytes",
    )
    lora_modules: tuple[str, ...] = setting(
        'Adapters to load at start, as NAME=PATH or {"name": …, "path": …}.',
        (),
        repeat="nargs",
        metavar="NAME=PATH",
    )
    lora_allowed_roots: tuple[str, ...] = setting(
        "Only load adapters below these directories; anywhere if left out.",
        (),
        repeat="nargs",
        metavar="DIR",
    )
    lora_allow_hub: bool = setting(
        "Let callers load adapters from the Hugging Face Hub, as ORGANISATION/NAME or with "
        "@REVISION; those of --lora-modules may always come from there.",
        False,
    )
    lora_max_download_bytes: int = setting(
        "Largest adapter that is downloaded.", 2 * 2**30, quantity="bytes"
    )
    lora_hub_cache_bytes: int = setting(
        "Most disk space for adapters in the hub's cache, and as much for those of S3; beyond it, "
        "none is downloaded.",
        64 * 2**30,
        quantity="bytes",
    )
    lora_load_timeout: float = setting(
        "Seconds that reading an adapter for a load may take, waiting included.",
        120.0,
        metavar="SECONDS",
    )
    lora_reload_timeout: float = setting(
        "Seconds that reading an evicted adapter again may take; its requests wait no longer, but "
        "for a download.",
        60.0,
        metavar="SECONDS",
    )
    lora_download_timeout: float = setting(
        "Seconds that downloading an adapter may take.", 600.0, metavar="SECONDS"
    )
    lora_resolver: tuple[str, ...] = setting(
        "When a request names an adapter that is not loaded, load it by its name from one of these "
        "places: dir:PATH for PATH/NAME, hf for the hub id NAME, s3://BUCKET/PREFIX for "
        "PREFIX/NAME.",
        (),
        repeat="nargs",
        metavar="PLACE",
    )
    lora_s3_cache_path: str = setting(
        "Where adapters from S3 are kept on this disk.",
        "~/.cache/lora-serve/s3",
        metavar="DIR",
    )

    def __post_init__(self) -> None:
        read_quantities(self)
        require_at_least(1, "--lora-max-download-bytes", self.lora_max_download_bytes)
        require_at_least(1, "--lora-hub-cache-bytes", self.lora_hub_cache_bytes)
        if self.lora_allow_hub and self.lora_allowed_roots:
            raise ConfigError(
                "--lora-allow-hub has no effect with --lora-allowed-roots, which keeps adapters "
                "below its directories; leave one of them out"
            )
        require_at_least(0.1, "--lora-load-timeout", self.lora_load_timeout)
        require_at_least(0.1, "--lora-reload-timeout", self.lora_reload_timeout)
        require_at_least(0.1, "--lora-download-timeout", self.lora_download_timeout)
        require_at_least(1, "--max-cpu-loras", self.max_cpu_loras)
        if self.max_loras is None:
            most = MAX_LORAS if self.max_cpu_loras is None else min(MAX_LORAS, self.max_cpu_loras)
            object.__setattr__(self, "max_loras", most)  # it is being made, and not yet shared
        require_at_least(1, "--max-loras", self.max_loras)
        require_at_least(1, "--max-lora-rank", self.max_lora_rank)
        require_at_least(0, "--max-lora-expert-rank", self.max_lora_expert_rank)
        require_at_least(0, "--max-lora-vocab-bytes", self.max_lora_vocab_bytes)
        if (self.max_lora_expert_rank or 0) > self.max_lora_rank:
            raise ConfigError(
                f"--max-lora-expert-rank {self.max_lora_expert_rank} is above --max-lora-rank "
                f"{self.max_lora_rank}; lower it, or raise --max-lora-rank"
            )
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"--max-cpu-loras {self.max_cpu_loras} is below --max-loras {self.max_loras}; "
                "adapters of one step must all be in memory"
            )
        names = [name for name, _ in self.modules]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"--lora-modules names {name!r} {names.count(name)} times")
        if self.lora_modules and not self.enable_lora:
            raise ConfigError("--lora-modules needs --enable-lora")
        if self.lora_resolver and not self.enable_lora:
            raise ConfigError("--lora-resolver needs --enable-lora")
        for place in self.lora_resolver:
            _check_place(place, self.lora_allow_hub)

    @property
    def modules(self) -> list[tuple[str, str]]:
        """(name, path) of each of `lora_modules`.

        Raises:
            ConfigError: for one that is neither NAME=PATH nor such JSON.
        """
        return [_name_and_path(module) for module in self.lora_modules]

    @property
    def resolver_directories(self) -> list[str]:
        """The directories of --lora-resolver dir:PATH."""
        return [place[len(DIRECTORY) :] for place in self.lora_resolver if _is_directory(place)]

    @property
    def resolver_buckets(self) -> list[str]:
        """The places of --lora-resolver s3://BUCKET/PREFIX, without a slash at the end."""
        return [place.rstrip("/") for place in self.lora_resolver if place.startswith(S3)]

    @property
    def cpu_lora_limit(self) -> int:
        return self.max_cpu_loras if self.max_cpu_loras is not None else 8 * self.max_loras


def _is_directory(place: str) -> bool:
    return place.startswith(DIRECTORY)


def _check_place(place: str, allows_hub: bool) -> None:
    """Raise ConfigError unless it is a place that adapters can be resolved from."""
    if place == HUB and not allows_hub:
        raise ConfigError("--lora-resolver hf needs --lora-allow-hub")
    is_bucket = place.startswith(S3) and bool(place.removeprefix(S3).strip("/"))
    if place != HUB and place != DIRECTORY and not (_is_directory(place) or is_bucket):
        place = place or "''"
        raise ConfigError(f"--lora-resolver {place}: must be dir:PATH, hf or s3://BUCKET/PREFIX")
    if place == DIRECTORY:
        raise ConfigError("--lora-resolver dir: names no directory; write dir:PATH")


def _name_and_path(module: str) -> tuple[str, str]:
    name, _, path = module.partition("=")
    if module.startswith("{"):
        try:
            entry = parse_json(module)
            name, path = entry["name"], entry["path"]
        except (ValueError, KeyError):
            name = path = ""
    if not (name and path and isinstance(name, str) and isinstance(path, str)):
        raise ConfigError(
            f'--lora-modules {module:.80}: must be NAME=PATH or {{"name": …, "path": …}}'
        )
    return name, path
