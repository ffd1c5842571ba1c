"""Bodies of requests that change the server. Their rules are those of `openai/fields.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated
from urllib.parse import unquote

from pydantic import Field

from lora_serve.errors import InvalidRequestError
from lora_serve.messages import PauseMode
from lora_serve.server.openai.fields import Body, Ignored, JsonObject, Unsupported

MAX_REQUEST_IDS = 4096
AnyRequestId = Annotated[str, Field(min_length=1, max_length=512)]
RequestIds = Annotated[list[AnyRequestId], Field(max_length=MAX_REQUEST_IDS)]


@dataclass(frozen=True, slots=True)
class AdapterWish:
    """What a load is to bring about, in whichever form it was asked for."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    pinned: bool = False
    digest: str = ""


class LoadAdapterBody(Body):
    """POST /v1/load_lora_adapter. digest: which the adapter must have; any if left out."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    pinned: bool = False
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    is_3d_lora_weight: Unsupported = None

    @property
    def wish(self) -> AdapterWish:
        return AdapterWish(
            self.lora_name, self.lora_path, self.load_inplace, self.pinned, self.digest or ""
        )


class RootLoadAdapterBody(LoadAdapterBody):
    """POST /load_lora_adapter: replaces an adapter of that name, unless told otherwise."""

    load_inplace: bool = True


class LoadTensorsBody(Body):
    """POST /load_lora_adapter_from_tensors: the same with the adapter in the body.

    serialized_named_tensors: base64, one for each process that computes, of which there is one.
    expected_checksums: SHA-256 of each tensor's bytes, by its name.
    """

    lora_name: str
    config_dict: JsonObject
    serialized_named_tensors: list[str]
    expected_checksums: dict[str, str] | None = None
    load_format: str | None = None
    load_inplace: bool = True
    pinned: bool = False
    lora_id: Ignored = None
    added_tokens_config: Unsupported = None

    @property
    def payload(self) -> str:
        """Raises InvalidRequestError unless there is one, in a format that is read."""
        if self.load_format is not None:
            raise InvalidRequestError(
                f"load_format {self.load_format[:40]!r} is not read; leave it out and send base64 "
                "of torch.save of a dict of names and CPU tensors, or of a safetensors file",
                "load_format",
            )
        if len(self.serialized_named_tensors) != 1:
            raise InvalidRequestError(
                f"serialized_named_tensors has {len(self.serialized_named_tensors)} texts; send "
                "one: one process computes here",
                "serialized_named_tensors",
            )
        return self.serialized_named_tensors[0]


class LoRASource(Body):
    uri: str


class LoRASourceBody(Body):
    """POST /v1/loras: replaces an adapter of that name."""

    lora_name: str
    source: LoRASource

    @property
    def wish(self) -> AdapterWish:
        return AdapterWish(self.lora_name, path_of_uri(self.source.uri), load_inplace=True)


class SageMakerAdapterBody(Body):
    """POST /adapters."""

    name: Annotated[str, Field(min_length=1)]
    src: Annotated[str, Field(min_length=1)]
    pin: bool = False
    preload: Ignored = None  # a load is answered when the adapter serves

    @property
    def wish(self) -> AdapterWish:
        return AdapterWish(self.name, self.src, pinned=self.pin)


def path_of_uri(uri: str) -> str:
    """The directory or hub id that an adapter's URI names.

    Raises:
        InvalidRequestError: it is neither file:///… nor hf://….
    """
    scheme, _, rest = uri.partition("://")
    if scheme == "hf" and rest and not rest.startswith(("/", "~", ".")):
        return rest
    host, slash, path = rest.partition("/")
    if scheme == "file" and host in ("", "localhost") and path:
        return unquote(slash + path)
    raise InvalidRequestError(
        f"source.uri must be file:///DIRECTORY or hf://ORGANISATION/NAME, got {uri[:80]!r}",
        "source.uri",
    )


class UnloadAdapterBody(Body):
    """POST /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: Ignored = None


class ResetPrefixCacheBody(Body):
    """POST /reset_prefix_cache, which needs no body."""

    lora_name: str | None = None


class PauseBody(Body):
    """POST /pause, which needs no body: what its query may say, too."""

    mode: PauseMode | None = None
    clear_cache: bool | None = None


class ResumeBody(Body):
    """POST /resume, which needs no body and has no fields."""


class AbortAnyBody(Body):
    """POST /abort_requests: without the field all that are being answered, of [] none."""

    request_ids: RequestIds | None = None


class AbortRequestsBody(Body):
    """POST /inference/v1/abort_requests."""

    request_ids: RequestIds
