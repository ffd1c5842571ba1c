"""Whether the Hugging Face Hub can be reached, found out once and before anything needs it.

Its client library tries for three quarters of a minute, and every library that builds on it anew.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from lora_serve.errors import ConfigError
from lora_serve.gguf.location import hub_parts

logger = logging.getLogger(__name__)

PROBE_SECONDS = 5.0
OFFLINE = "HF_HUB_OFFLINE"  # read when the client library is imported, here and in child processes


def prepare_hub(models: Sequence[str], revision: str | None) -> None:
    """Have the hub's client use only what is on this machine, if the hub cannot be reached.

    models: directories, which need no hub, or hub ids.

    Raises:
        ConfigError: the hub cannot be reached, and one of them is not here.
    """
    hub_ids = [model for model in models if is_hub_id(model)]
    if not hub_ids or os.environ.get(OFFLINE):
        return
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    reason = unreachable(endpoint)
    if reason is None:
        return
    os.environ[OFFLINE] = "1"
    from huggingface_hub import try_to_load_from_cache

    for model in hub_ids:
        if hub_parts(model):  # which file is meant is known when the repository is looked into
            continue
        if not isinstance(try_to_load_from_cache(model, "config.json", revision=revision), str):
            raise ConfigError(
                f"model {model!r} is not a directory here, and the hub at {endpoint} cannot be "
                f"reached ({reason}); name a directory, check the network, or set HF_ENDPOINT to a "
                "mirror"
            )
    logger.warning(
        "the hub at %s cannot be reached (%s); serving what was downloaded before",
        endpoint,
        reason,
    )


def is_hub_id(model: str) -> bool:
    """Whether this is "organisation/name", and nothing here."""
    is_path = model.startswith((".", "/", "~")) or Path(model).exists()
    return model.count("/") == 1 and not is_path


def unreachable(endpoint: str) -> str | None:
    """Why a server at a URL does not answer in PROBE_SECONDS; None if it does."""
    reasons: list[str | None] = []
    # A thread, since each of a host's addresses has the timeout, and a name server has none.
    probe = threading.Thread(target=lambda: reasons.append(_fault_of(endpoint)), daemon=True)
    probe.start()
    probe.join(PROBE_SECONDS + 1)
    return reasons[0] if reasons else f"no answer in {PROBE_SECONDS:g} s"


def _fault_of(endpoint: str) -> str | None:
    import httpx  # slow to import; a model in a directory needs none

    try:
        httpx.head(endpoint, timeout=PROBE_SECONDS)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        return str(error) or type(error).__name__
    return None
