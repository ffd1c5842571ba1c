"""Whose share a request counts to, as --fair-share says: one rule for queue and scheduler."""

from __future__ import annotations

from lora_serve.generate_request import GenerateRequest


def share_of(request: GenerateRequest, fair_share: str) -> str:
    """The adapter's name, or the API key's; without fair shares all are one."""
    match fair_share:
        case "adapter":
            return request.lora_name or ""
        case "key":
            return request.tenant
    return ""
