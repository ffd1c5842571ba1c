"""Bodies of requests that change the server. Their rules are those of `openai/fields.py`."""

from __future__ import annotations

from lora_serve.server.openai.fields import Body, Ignored, Unsupported


class LoadAdapterBody(Body):
    """POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    pinned: bool = False
    is_3d_lora_weight: Unsupported = None


class UnloadAdapterBody(Body):
    """POST /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: Ignored = None


class ResetPrefixCacheBody(Body):
    """POST /reset_prefix_cache, which needs no body."""

    lora_name: str | None = None
