"""Whose share a request counts to, as --fair-share says: one rule for queue and scheduler."""

from __future__ import annotations

from lora_serve.generate_request import GenerateRequest
from lora_serve.identity import BASE_MODEL, BASE_MODEL_NAME


def share_of(request: GenerateRequest, fair_share: str) -> str:
    """The adapter's name, or the API key's; without fair shares all are one."""
    match fair_share:
        case "adapter":
            return BASE_MODEL_NAME if request.lora_name is BASE_MODEL else request.lora_name
        case "key":
            return request.tenant
    return ""
