"""The one table of routes: who may use each, what it takes, and every status it may answer with.

It stands in the order of a reader's interest. The middleware, the OpenAPI document, the fuzzers of
bodies and the test of who may do what are made of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import msgspec
from pydantic import BaseModel

from lora_serve.server.admin.answers import (
    Aborted,
    AdapterChangeList,
    CallerInfo,
    IsPaused,
    Load,
    LoadedAdapters,
    LoRAList,
    LoRAStatus,
    RequestList,
    ServerInfo,
    Status,
    Success,
    Version,
    WorldSize,
)
from lora_serve.server.admin.operations import ALWAYS_RESET
from lora_serve.server.admin.pauses import PAUSE_MODES
from lora_serve.server.admin.protocol import (
    AbortAnyBody,
    LoadAdapterBody,
    LoadTensorsBody,
    LoRASourceBody,
    PauseBody,
    ResetPrefixCacheBody,
    ResumeBody,
    RootLoadAdapterBody,
    SageMakerAdapterBody,
    UnloadAdapterBody,
)
from lora_serve.server.admin.query import FLAGS
from lora_serve.server.admin.server_info import FORMATS
from lora_serve.server.anthropic.answers import AnthropicErrorAnswer, AnthropicMessage, TokenCount
from lora_serve.server.anthropic.protocol import CountTokensBody, MessagesBody
from lora_serve.server.http.auth import METRICS_PATH
from lora_serve.server.http.probes import LIVE_PATHS, READY_PATHS
from lora_serve.server.inference.answers import Generated
from lora_serve.server.inference.protocol import AbortRequestsBody, GenerateBody
from lora_serve.server.openai.answers import (
    ChatCompletion,
    Completion,
    Detokenized,
    EmbeddingList,
    ErrorAnswer,
    ModelCard,
    ModelList,
    RenderedPrompt,
    Tokenized,
    TokenizerInfo,
)
from lora_serve.server.openai.protocol import (
    ChatBatchBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    TokenizeBody,
)
from lora_serve.server.responses.answers import DeletedResponse, InputItemList, Response
from lora_serve.server.responses.protocol import ResponseBody
from lora_serve.server.sagemaker.protocol import InvocationBody
from lora_serve.server.ui.files import UI_FILES, UI_PATH

PLAIN_TEXT = "text/plain"
ANY_ROUTE = (403, 405, 408, 431, 500, 503)


class Access(Enum):
    """Who may use a route.

    The middleware lets in who may use it; an ADMIN route's handler asks `KeyRing.require_admin`.
    """

    OPEN = "every client: it says nothing of tenants"
    KEY = "callers with an API key, where there are keys"
    OPERATOR = "callers who run the server, where there are keys"
    ADMIN = "callers who may change the server for others"


@dataclass(frozen=True, slots=True)
class QueryParameter:
    """values: which it may have; any if empty."""

    name: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One route with one method.

    answer: a struct, or one of several, a media type, or None for an empty body. example: a body
    that is answered with 200 where it names what is there. generates: counted as a generation
    while it is answered. streams: events, if asked for. names_model: the caller names a model or an
    adapter. conflicts: another caller may end what this one asked for. may_be_wrong: it may be
    refused without a body or a query that is at fault. error: the body of every status above 399.
    is_list: there are several answers. names_response: the caller names a response that was kept.
    """

    method: str
    path: str
    summary: str
    access: Access
    answer: type[msgspec.Struct] | tuple[type[msgspec.Struct], ...] | str | None
    body: type[BaseModel] | None = None
    example: Mapping[str, object] = field(default_factory=dict)
    needs_body: bool = True
    generates: bool = False
    streams: bool = False
    names_model: bool = False
    is_list: bool = False
    error: type[msgspec.Struct] = ErrorAnswer
    in_query: tuple[QueryParameter, ...] = ()
    conflicts: bool = False
    may_be_wrong: bool = False
    names_response: bool = False

    @property
    def errors(self) -> frozenset[int]:
        """Every status besides 200 with which it may answer."""
        statuses = set(ANY_ROUTE)
        if self.access is not Access.OPEN:
            statuses.add(401)
        if self.body is not None:
            statuses |= {400, 413}
        if self.in_query or self.may_be_wrong:
            statuses.add(400)
        if self.conflicts:
            statuses.add(409)
        if self.names_model:
            statuses.add(404)
        if self.names_response:
            statuses |= {400, 404}
        return frozenset(statuses)


MESSAGES_EXAMPLE: Mapping[str, object] = {
    "model": "MODEL",
    "messages": [{"role": "user", "content": "Hello"}],
}
OPERATIONS = (
    Operation(
        method="post",
        path="/v1/completions",
        summary="Continue prompts",
        access=Access.KEY,
        answer=Completion,
        body=CompletionBody,
        example={"prompt": "Once upon a time", "max_tokens": 16},
        generates=True,
        streams=True,
        names_model=True,
    ),
    Operation(
        method="post",
        path="/v1/chat/completions",
        summary="Continue a conversation",
        access=Access.KEY,
        answer=ChatCompletion,
        body=ChatBody,
        example={"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16},
        generates=True,
        streams=True,
        names_model=True,
    ),
    Operation(
        method="post",
        path="/v1/chat/completions/batch",
        summary="Continue several conversations",
        access=Access.KEY,
        answer=ChatCompletion,
        body=ChatBatchBody,
        example={
            "messages": [[{"role": "user", "content": text}] for text in ("Hello", "Good day")],
            "max_tokens": 16,
        },
        generates=True,
        names_model=True,
    ),
    Operation(
        method="post",
        path="/v1/completions/render",
        summary="Show what prompts would be continued, and how",
        access=Access.KEY,
        answer=RenderedPrompt,
        is_list=True,
        body=CompletionBody,
        example={"prompt": "Once upon a time"},
        names_model=True,
    ),
    Operation(
        method="post",
        path="/v1/chat/completions/render",
        summary="Show what prompt a conversation makes",
        access=Access.KEY,
        answer=RenderedPrompt,
        body=ChatBody,
        example={"messages": [{"role": "user", "content": "Hello"}]},
        names_model=True,
    ),
    Operation(
        method="post",
        path="/v1/messages",
        summary="Continue a conversation, as Anthropic's clients ask for it",
        access=Access.KEY,
        answer=AnthropicMessage,
        body=MessagesBody,
        example={**MESSAGES_EXAMPLE, "max_tokens": 16},
        error=AnthropicErrorAnswer,
        generates=True,
        streams=True,
        names_model=True,
    ),
    Operation(
        method="post",
        path="/v1/messages/count_tokens",
        summary="Count the tokens of such a conversation",
        access=Access.KEY,
        answer=TokenCount,
        body=CountTokensBody,
        example=MESSAGES_EXAMPLE,
        error=AnthropicErrorAnswer,
        names_model=True,
    ),
    Operation(
        method="post",
        path="/v1/embeddings",
        summary="Embeddings of texts, by the model or an adapter",
        access=Access.KEY,
        answer=EmbeddingList,
        body=EmbeddingBody,
        example={"input": ["Once upon a time", "Hello"]},
        generates=True,
        names_model=True,
    ),
    Operation(
        method="post",
        path="/v1/responses",
        summary="Continue a conversation, of which the server may keep the earlier part",
        access=Access.KEY,
        answer=Response,
        body=ResponseBody,
        example={"input": "Hello", "max_output_tokens": 16},
        generates=True,
        streams=True,
        names_model=True,
    ),
    Operation(
        method="get",
        path="/v1/responses/{response_id}",
        summary="A response that was kept, or runs in the background",
        access=Access.KEY,
        answer=Response,
        names_response=True,
        in_query=(QueryParameter("stream"),),
    ),
    Operation(
        method="delete",
        path="/v1/responses/{response_id}",
        summary="Forget it",
        access=Access.KEY,
        answer=DeletedResponse,
        names_response=True,
    ),
    Operation(
        method="post",
        path="/v1/responses/{response_id}/cancel",
        summary="End it, if it runs in the background",
        access=Access.KEY,
        answer=Response,
        names_response=True,
    ),
    Operation(
        method="get",
        path="/v1/responses/{response_id}/input_items",
        summary="The conversation that it continues",
        access=Access.KEY,
        answer=InputItemList,
        names_response=True,
        in_query=(
            QueryParameter("limit"),
            QueryParameter("order", ("asc", "desc")),
            QueryParameter("after"),
        ),
    ),
    Operation(
        method="get",
        path="/v1/models",
        summary="The model and its adapters",
        access=Access.KEY,
        answer=ModelList,
    ),
    Operation(
        method="get",
        path="/v1/models/{model}",
        summary="One of them",
        access=Access.KEY,
        answer=ModelCard,
        names_model=True,
    ),
    Operation(
        method="post",
        path="/v1/load_lora_adapter",
        summary="Load or replace an adapter",
        access=Access.ADMIN,
        answer=PLAIN_TEXT,
        body=LoadAdapterBody,
        example={"lora_name": "tenant-a", "lora_path": "/adapters/a"},
        names_model=True,
    ),
    Operation(
        method="post",
        path="/v1/unload_lora_adapter",
        summary="Take an adapter away",
        access=Access.ADMIN,
        answer=PLAIN_TEXT,
        body=UnloadAdapterBody,
        example={"lora_name": "tenant-a"},
        names_model=True,
    ),
    Operation(
        method="post",
        path="/load_lora_adapter",
        summary="Load or replace an adapter, as SGLang has it",
        access=Access.ADMIN,
        answer=LoadedAdapters,
        body=RootLoadAdapterBody,
        example={"lora_name": "tenant-a", "lora_path": "/adapters/a"},
        names_model=True,
    ),
    Operation(
        method="post",
        path="/load_lora_adapter_from_tensors",
        summary="Load or replace an adapter that the body holds, as SGLang has it",
        access=Access.ADMIN,
        answer=LoadedAdapters,
        body=LoadTensorsBody,
        example={
            "lora_name": "tenant-a",
            "config_dict": {"peft_type": "LORA", "r": 16, "lora_alpha": 32},
            "serialized_named_tensors": ["BASE64"],
        },
        names_model=True,
    ),
    Operation(
        method="post",
        path="/unload_lora_adapter",
        summary="Take an adapter away, as SGLang has it",
        access=Access.ADMIN,
        answer=LoadedAdapters,
        body=UnloadAdapterBody,
        example={"lora_name": "tenant-a"},
        names_model=True,
    ),
    Operation(
        method="post",
        path="/v1/loras",
        summary="Load or replace an adapter, as Dynamo has it",
        access=Access.ADMIN,
        answer=LoRAStatus,
        body=LoRASourceBody,
        example={"lora_name": "tenant-a", "source": {"uri": "file:///adapters/a"}},
        names_model=True,
    ),
    Operation(
        method="get",
        path="/v1/loras",
        summary="The adapters and their paths",
        access=Access.ADMIN,
        answer=LoRAList,
        may_be_wrong=True,
    ),
    Operation(
        method="get",
        path="/adapter_changes",
        summary="The last loads and unloads, with what stood there before",
        access=Access.ADMIN,
        answer=AdapterChangeList,
    ),
    Operation(
        method="delete",
        path="/v1/loras/{lora_name}",
        summary="Take an adapter away, as Dynamo has it",
        access=Access.ADMIN,
        answer=LoRAStatus,
        names_model=True,
        may_be_wrong=True,
    ),
    Operation(
        method="post",
        path="/adapters",
        summary="Load an adapter, as SageMaker has it",
        access=Access.ADMIN,
        answer=PLAIN_TEXT,
        body=SageMakerAdapterBody,
        example={"name": "tenant-a", "src": "/adapters/a"},
        names_model=True,
    ),
    Operation(
        method="delete",
        path="/adapters/{lora_name}",
        summary="Take an adapter away, as SageMaker has it",
        access=Access.ADMIN,
        answer=PLAIN_TEXT,
        names_model=True,
        may_be_wrong=True,
    ),
    Operation(
        method="post",
        path="/invocations",
        summary="A chat, completions or embeddings, as SageMaker asks for them",
        access=Access.KEY,
        answer=(Completion, ChatCompletion, EmbeddingList),
        body=InvocationBody,
        example={"prompt": "Once upon a time", "max_tokens": 16},
        generates=True,
        streams=True,
        names_model=True,
    ),
    Operation(
        method="post",
        path="/reset_prefix_cache",
        summary="Forget cached KV",
        access=Access.ADMIN,
        answer=Success,
        body=ResetPrefixCacheBody,
        example={"lora_name": "tenant-a"},
        needs_body=False,
        names_model=True,
        in_query=(
            QueryParameter("lora_name"),
            *(QueryParameter(name, FLAGS) for name in ALWAYS_RESET),
        ),
    ),
    Operation(
        method="post",
        path="/pause",
        summary="Make no more steps",
        access=Access.ADMIN,
        answer=Status,
        body=PauseBody,
        example={"mode": "keep"},
        needs_body=False,
        in_query=(QueryParameter("mode", PAUSE_MODES), QueryParameter("clear_cache", FLAGS)),
        conflicts=True,
    ),
    Operation(
        method="post",
        path="/resume",
        summary="Go on after a pause",
        access=Access.ADMIN,
        answer=Status,
        body=ResumeBody,
        example={},
        needs_body=False,
    ),
    Operation(
        method="get",
        path="/is_paused",
        summary="Whether there is a pause",
        access=Access.KEY,
        answer=IsPaused,
    ),
    Operation(
        method="get",
        path="/v1/requests",
        summary="The requests that are being answered: of all callers for an admin, else one's own",
        access=Access.KEY,
        answer=RequestList,
        in_query=(QueryParameter("limit"),),
    ),
    Operation(
        method="get",
        path="/v1/caller",
        summary="What the caller may do",
        access=Access.KEY,
        answer=CallerInfo,
    ),
    Operation(
        method="post",
        path="/abort_requests",
        summary="End requests of all callers, all or by their ids",
        access=Access.ADMIN,
        answer=Aborted,
        body=AbortAnyBody,
        example={"request_ids": ["cmpl-1"]},
        needs_body=False,
    ),
    Operation(
        method="post",
        path="/inference/v1/generate",
        summary="Continue token ids by token ids",
        access=Access.KEY,
        answer=Generated,
        body=GenerateBody,
        example={"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 16}},
        generates=True,
        streams=True,
        names_model=True,
    ),
    Operation(
        method="post",
        path="/inference/v1/abort_requests",
        summary="End requests of one's own by their ids",
        access=Access.KEY,
        answer=Aborted,
        body=AbortRequestsBody,
        example={"request_ids": ["cmpl-1"]},
    ),
    Operation(
        method="get",
        path="/server_info",
        summary="How the server is set up",
        access=Access.KEY,
        answer=ServerInfo,
        in_query=(QueryParameter("config_format", FORMATS),),
    ),
    Operation(
        method="get",
        path="/get_world_size",
        summary="How many processes compute",
        access=Access.KEY,
        answer=WorldSize,
        in_query=(QueryParameter("include_dp", FLAGS),),
    ),
    Operation(
        method="post",
        path="/tokenize",
        summary="From text to tokens",
        access=Access.KEY,
        answer=Tokenized,
        body=TokenizeBody,
        example={"prompt": "Hello"},
        names_model=True,
    ),
    Operation(
        method="post",
        path="/detokenize",
        summary="From tokens to text",
        access=Access.KEY,
        answer=Detokenized,
        body=DetokenizeBody,
        example={"tokens": [1, 2, 3]},
        names_model=True,
    ),
    Operation(
        method="get",
        path="/tokenizer_info",
        summary="The tokenizer's special tokens and the chat template",
        access=Access.KEY,
        answer=TokenizerInfo,
        names_model=True,
    ),
    *(
        Operation(method="get", path=path, summary=summary, access=Access.OPEN, answer=None)
        for paths, summary in (
            (READY_PATHS, "Whether requests are being answered"),
            (LIVE_PATHS, "Whether the server runs"),
        )
        for path in paths
    ),
    Operation(method="post", path="/ping", summary="The same", access=Access.OPEN, answer=None),
    Operation(
        method="get",
        path="/load",
        summary="How many requests are being answered",
        access=Access.KEY,
        answer=Load,
    ),
    Operation(
        method="get",
        path="/version",
        summary="Of this server",
        access=Access.OPEN,
        answer=Version,
    ),
    Operation(
        method="get",
        path=METRICS_PATH,
        summary="For Prometheus",
        access=Access.OPERATOR,
        answer=PLAIN_TEXT,
    ),
    Operation(
        method="get",
        path=UI_PATH,
        summary="The page for browsers",
        access=Access.OPEN,
        answer="text/html",
    ),
    *(
        Operation(
            method="get",
            path=file.path,
            summary="A file of the page",
            access=Access.OPEN,
            answer=file.media_type,
        )
        for file in UI_FILES
    ),
)


OPEN_PATHS = frozenset(each.path for each in OPERATIONS if each.access is Access.OPEN)
STATE_PATHS = OPEN_PATHS | {METRICS_PATH}  # they go on while the server ends
GENERATING_PATHS = frozenset(each.path for each in OPERATIONS if each.generates)
