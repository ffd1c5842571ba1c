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
from lora_serve.server.openai.fields import JsonObject, parse_tokens

FIELD = "kv_transfer_params"


class KVTransfer(msgspec.Struct, frozen=True):
    """What a request asks for.

    do_remote_decode: its KV is for another server. do_remote_prefill: another has computed it.
    prompt_token_ids: of a chat, as the other server wrote it; () if it is to be written here.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    prompt_token_ids: tuple[int, ...] = ()

    @property
    def moves_kv(self) -> bool:
        return self.do_remote_decode or self.do_remote_prefill


FLAGS = ("do_remote_decode", "do_remote_prefill")


def parse_kv_transfer(value: object) -> KVTransfer | None:
    """Read what is asked for; None if nothing is. Raises ValueError."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    asked = {}
    for name in FLAGS:
        flag = value.get(name)
        if flag is not None and not isinstance(flag, bool):
            raise ValueError(f"has {name} {str(flag)[:80]!r}, which must be true or false")
        asked[name] = bool(flag)
    if all(asked.values()):
        raise ValueError(
            "asks for do_remote_decode and do_remote_prefill; a request is one of both"
        )
    token_ids = _prompt_token_ids(value.get("prompt_token_ids"))
    if not token_ids and not any(asked.values()):
        return None
    return KVTransfer(**asked, prompt_token_ids=token_ids)


def _prompt_token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    try:
        token_ids = parse_tokens(value)
    except ValueError as error:
        raise ValueError(f"has prompt_token_ids, which {error}") from None
    if not token_ids:
        raise ValueError("has no prompt_token_ids in their list; leave it out")
    return token_ids


KVTransferField = Annotated[KVTransfer | None, PlainValidator(parse_kv_transfer, JsonObject | None)]


def check_kv_transfer(asked: KVTransfer | None, config: KVTierConfig) -> None:
    """Refuse what this server has no part in.

    Raises:
        InvalidRequestError: naming the flag that it lacks.
    """
    if asked is None or not asked.moves_kv:
        return
    if not config.is_shared:
        raise InvalidRequestError(
            f"{FIELD}: this server has no KV tier that another one looks into; start it with "
            "--kv-disk-path or --kv-redis-url",
            FIELD,
        )
    if asked.do_remote_decode and config.kv_role == "kv_consumer":
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
