"""The one table of routes: who may use each, what it takes, and every status it may answer with.

The rows stand beside what answers them, here in the order of a reader's interest. The middleware,
the OpenAPI document, the fuzzers of bodies and the test of who may do what are made of them.
"""

from __future__ import annotations

from types import MappingProxyType

from lora_serve.server.admin import routes as admin
from lora_serve.server.admin import state_routes as state
from lora_serve.server.anthropic import routes as anthropic
from lora_serve.server.api_page import routes as api_page
from lora_serve.server.http.auth import METRICS_PATH
from lora_serve.server.inference import routes as inference
from lora_serve.server.openai import routes as openai
from lora_serve.server.operation import Access
from lora_serve.server.pooling import routes as pooling
from lora_serve.server.responses import routes as responses
from lora_serve.server.sagemaker import routes as sagemaker
from lora_serve.server.sglang import routes as sglang
from lora_serve.server.ui import routes as ui

OPERATIONS = (
    *openai.OPERATIONS,
    *pooling.OPERATIONS,
    *anthropic.OPERATIONS,
    *responses.OPERATIONS,
    *admin.OPERATIONS,
    *inference.OPERATIONS,
    *sglang.OPERATIONS,
    *sagemaker.OPERATIONS,
    *state.OPERATIONS,
    *ui.OPERATIONS,
    *api_page.OPERATIONS,
)

PATHS = frozenset(each.path for each in OPERATIONS)
OPEN_PATHS = frozenset(each.path for each in OPERATIONS if each.access is Access.OPEN)
STATE_PATHS = OPEN_PATHS | {METRICS_PATH}  # they go on while the server ends
# Why a route of vLLM's is not there; it follows the route's name.
NOT_SERVED = MappingProxyType(
    {"/classify": ": no classifier head is served; /v1/embeddings and /pooling give hidden states"}
)
GENERATING_PATHS = frozenset(each.path for each in OPERATIONS if each.generates)
