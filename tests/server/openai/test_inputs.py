"""How much text is worked on at once, and where; what prompts become is the routes' tests'."""

from __future__ import annotations

import asyncio
import threading

import httpx
import pytest

from lora_serve.config import ServerConfig
from lora_serve.errors import PromptTooLongError
from lora_serve.server.app import create_app
from lora_serve.server.openai.inputs import SMALL_TEXT_CHARS, Inputs
from tests.fakes.engine import FakeEngine
from tests.fakes.tokenizer import ByteTokenizer
from tests.server.clients import client_for, error_of, eventually

CHAT = {"messages": [{"role": "user", "content": "x" * 130}]}


class SlowTokenizer(ByteTokenizer):
    """Encodes once it may; counts how many characters it is given at once."""

    def __init__(self) -> None:
        super().__init__()
        self.may_encode = threading.Event()
        self.num_chars = self.most_chars = 0
        self._lock = threading.Lock()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        with self._lock:
            self.num_chars += len(text)
            self.most_chars = max(self.most_chars, self.num_chars)
        if len(text) > SMALL_TEXT_CHARS:
            assert self.may_encode.wait(10)
        with self._lock:
            self.num_chars -= len(text)
        return [1] * add_special_tokens


class ThreadNotingTokenizer(ByteTokenizer):
    def __init__(self) -> None:
        super().__init__()
        self.threads: set[threading.Thread] = set()

    def token_text(self, token_id: int) -> str:
        self.threads.add(threading.current_thread())
        return super().token_text(token_id)

    def token_piece(self, token_id: int) -> str:
        self.threads.add(threading.current_thread())
        return super().token_piece(token_id)


def engine_with(tokenizer: ByteTokenizer, max_model_len: int = 200_000) -> FakeEngine:
    engine = FakeEngine(tokenizer=tokenizer)
    engine.model_info = type(engine.model_info)(
        vocab_size=300, hidden_size=8, max_model_len=max_model_len, num_blocks=64
    )
    return engine


async def test_long_texts_are_tokenized_within_a_bound_and_short_ones_beside_it() -> None:
    tokenizer = SlowTokenizer()
    inputs = Inputs(engine_with(tokenizer), max_chars_at_once=200_000)
    long = [asyncio.create_task(inputs.from_text("", "x" * 100_000)) for _ in range(5)]
    await asyncio.wait_for(inputs.from_text("", "short"), 5)
    tokenizer.may_encode.set()
    await asyncio.gather(*long)
    assert 100_000 <= tokenizer.most_chars <= 200_005


async def test_a_keys_text_waits_for_none_of_another_key_that_sends_many() -> None:
    """Nor does a short one stand in a thread's queue behind long ones."""
    tokenizer = SlowTokenizer()
    config = ServerConfig(api_key=("greedy", "modest"))
    app = create_app(engine_with(tokenizer, max_model_len=3_000_000), config)
    done: list[str] = []

    async def tokenize(client: httpx.AsyncClient, key: str, num_chars: int) -> None:
        headers = {"Authorization": f"Bearer {key}"}
        answer = await client.post("/tokenize", json={"prompt": "x" * num_chars}, headers=headers)
        assert answer.status_code == 200, answer.text
        done.append(f"{key} {num_chars}")

    transport = httpx.ASGITransport(app)
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(6):
            group.create_task(tokenize(client, "greedy", 2_000_000))
        await eventually(lambda: tokenizer.num_chars >= 4_000_000)
        group.create_task(tokenize(client, "modest", 2_000_001))
        await asyncio.sleep(0.1)
        await tokenize(client, "modest", 5)
        tokenizer.may_encode.set()
    assert done[0] == "modest 5"
    assert done.index("modest 2000001") <= 3  # two of the other's were being worked on


async def test_a_text_may_be_as_long_as_the_longest_token_allows() -> None:
    engine = engine_with(ByteTokenizer(), max_model_len=10)
    most = 10 * engine.tokenizer.max_token_chars
    inputs = Inputs(engine)
    await inputs.from_text("", "x" * most)
    with pytest.raises(PromptTooLongError, match=f"{most + 1} characters, more than the {most}"):
        await inputs.from_text("", "x" * (most + 1))


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": "", "name": "n" * 200}] * 20},
        {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": "x" * 4000}},
    ],
)
async def test_all_that_a_template_is_given_counts(fields: dict) -> None:
    async with client_for(engine_with(ByteTokenizer(), max_model_len=512)) as client:
        for url in ("/v1/chat/completions", "/tokenize"):
            error = error_of(await client.post(url, json=fields), 400)
            assert "characters, more than the 3072 that" in error["message"]


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/tokenize", {"prompt": "x" * 400, "return_token_strs": True}),
        ("/v1/completions", {"prompt": "x" * 400, "prompt_logprobs": 2, "max_tokens": 1}),
        ("/v1/chat/completions", {**CHAT, "n": 3, "logprobs": True, "max_tokens": 150}),
    ],
)  # fmt: skip
async def test_long_answers_are_written_beside_the_event_loop(url: str, body: dict) -> None:
    tokenizer = ThreadNotingTokenizer()
    async with client_for(FakeEngine(tokenizer=tokenizer)) as client:
        response: httpx.Response = await client.post(url, json=body)
    assert response.status_code == 200, response.text
    assert tokenizer.threads
    assert threading.current_thread() not in tokenizer.threads
