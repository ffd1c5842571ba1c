"""`kv_transfer_params`: prefill here, decode there, as vLLM's proxies and llm-d's sidecar ask it.

KV is found by what shaped it, so nothing of it has to say where it lies: fields that do are taken
and mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from pydantic import PlainValidator

from lora_serve.config import KVTierConfig
from lora_serve.errors import InvalidRequestError
from lora_serve.outputs import RequestOutput
from lora_serve.server.openai.answers import KVTransferParams
from lora_serve.server.openai.fields import JsonObject

FIELD = "kv_transfer_params"


class KVTransfer(msgspec.Struct, frozen=True):
    """What a request asks for.

    do_remote_decode: its KV is for another server. do_remote_prefill: another has computed it.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False


def parse_kv_transfer(value: object) -> KVTransfer | None:
    """None where nothing is asked for. Raises ValueError."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    asked = {}
    for name in KVTransfer.__struct_fields__:
        flag = value.get(name)
        if flag is not None and not isinstance(flag, bool):
            raise ValueError(f"has {name} {str(flag)[:80]!r}, which must be true or false")
        asked[name] = bool(flag)
    if all(asked.values()):
        raise ValueError(
            "asks for do_remote_decode and do_remote_prefill; a request is one of both"
        )
    return KVTransfer(**asked) if any(asked.values()) else None


KVTransferField = Annotated[KVTransfer | None, PlainValidator(parse_kv_transfer, JsonObject | None)]


def check_kv_transfer(asked: KVTransfer | None, config: KVTierConfig) -> None:
    """Refuse what this server has no part in.

    Raises:
        InvalidRequestError: naming the flag that it lacks.
    """
    if asked is None:
        return
    if not config.is_shared:
        raise InvalidRequestError(
            f"{FIELD}: this server has no KV tier that another one looks into; start it with "
            "--kv-disk-path or --kv-redis-url",
            FIELD,
        )
    if asked.do_remote_decode and config.expanded().kv_role == "kv_consumer":
        raise InvalidRequestError(
            f"{FIELD}: this server stores no KV (--kv-role kv_consumer); send do_remote_decode to "
            "a kv_producer",
            FIELD,
        )


def answered(outputs: Sequence[RequestOutput], response_id: str) -> KVTransferParams | None:
    """What the answer says of its prompts' KV; None where that was not asked for."""
    stored = [out.num_stored_tokens for out in outputs if out.num_stored_tokens is not None]
    if not stored:
        return None
    return KVTransferParams(remote_request_id=response_id, remote_num_tokens=sum(stored))
