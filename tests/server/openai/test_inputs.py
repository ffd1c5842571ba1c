"""How much text is worked on at once, and where; what prompts become is the routes' tests'."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import ClassVar

import httpx
import pytest

from lora_serve.config import ServerConfig
from lora_serve.errors import PromptTooLongError
from lora_serve.server.app import create_app
from lora_serve.server.openai import text_work
from lora_serve.server.openai.inputs import Inputs
from lora_serve.server.openai.protocol import CompletionBody
from lora_serve.server.openai.text_work import (
    MAX_CHARS_ON_LOOP,
    SMALL_TEXT_CHARS,
    THREADS,
    TOKEN_CHARS,
    TextWork,
)
from tests.fakes.engine import FakeEngine, fake_config
from tests.fakes.tokenizer import ByteTokenizer
from tests.server.clients import client_for, error_of, eventually
from tests.server.openai.test_chat_prompt_embeds import payload

CHAT = {"messages": [{"role": "user", "content": "x" * 130}]}


class SlowTokenizer(ByteTokenizer):
    """Encodes a long text for each time that it may; counts how many characters it has at once.

    num_brought: texts that want to be encoded, or were. begun: the lengths of those that it got.
    """

    def __init__(self) -> None:
        super().__init__()
        self.may_encode = threading.Semaphore(0)
        self.num_chars = self.most_chars = self.num_brought = 0
        self.begun: list[int] = []
        self._lock = threading.Lock()

    @property
    def encode(self) -> Callable[..., list[int]]:
        self.num_brought += 1
        return self._encode

    def _encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        with self._lock:
            self.begun.append(len(text))
            self.num_chars += len(text)
            self.most_chars = max(self.most_chars, self.num_chars)
        if len(text) > SMALL_TEXT_CHARS:
            assert self.may_encode.acquire(timeout=60)
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
    inputs = Inputs(engine_with(tokenizer), TextWork(200_000))
    long = [asyncio.create_task(inputs.from_text("", "x" * 100_000)) for _ in range(5)]
    await asyncio.wait_for(inputs.from_text("", "short"), 60)
    tokenizer.may_encode.release(len(long))
    await asyncio.gather(*long)
    assert 100_000 <= tokenizer.most_chars <= 200_005


async def test_a_keys_text_waits_for_none_of_another_key_that_sends_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor does a short one stand in a thread's queue behind long ones."""
    monkeypatch.setattr(text_work, "WAIT_SECONDS", 60.0)  # a slow machine takes long to parse
    tokenizer = SlowTokenizer()
    config = ServerConfig(api_key=("greedy", "modest"))
    app = create_app(engine_with(tokenizer, max_model_len=3_000_000), config)

    async def tokenize(client: httpx.AsyncClient, key: str, num_chars: int) -> None:
        headers = {"Authorization": f"Bearer {key}"}
        answer = await client.post("/tokenize", json={"prompt": "x" * num_chars}, headers=headers)
        assert answer.status_code == 200, answer.text

    transport = httpx.ASGITransport(app)
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(6):
            group.create_task(tokenize(client, "greedy", 2_000_000))
        await eventually(lambda: tokenizer.num_chars >= 4_000_000, seconds=60)
        group.create_task(tokenize(client, "modest", 2_000_001))
        await eventually(lambda: tokenizer.num_brought == 7, seconds=60)
        await tokenize(client, "modest", 5)
        tokenizer.may_encode.release()  # one of the two that are being worked on ends
        await eventually(lambda: 2_000_001 in tokenizer.begun, seconds=60)
        tokenizer.may_encode.release(6)
    assert tokenizer.begun[:4] == [2_000_000, 2_000_000, 5, 2_000_001]


async def test_a_short_text_is_tokenized_without_a_thread() -> None:
    """Whose turn would come late while the loop sends others' tokens. Many texts would hold it."""

    class Noting(ByteTokenizer):
        threads: ClassVar[list[threading.Thread]] = []

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            self.threads.append(threading.current_thread())
            return super().encode(text, add_special_tokens)

    inputs = Inputs(engine_with(Noting()), TextWork())
    short, longer = "x" * MAX_CHARS_ON_LOOP, "x" * (MAX_CHARS_ON_LOOP + 1)
    for prompt in (short, longer, [short, "y"]):
        body = CompletionBody(model="m", prompt=prompt, add_special_tokens=False)
        made = await inputs.from_completion("", body, n=1)
        assert sum(item.num_tokens for item in made) == len("".join(prompt))
    loop = threading.current_thread()
    assert [thread is loop for thread in Noting.threads] == [True, False, False, False]


async def test_the_pieces_of_a_chat_with_embeddings_are_tokenized_in_a_thread() -> None:
    """However short they are: there may be a thousand of them."""

    class Noting(ByteTokenizer):
        threads: ClassVar[list[threading.Thread]] = []

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            self.threads.append(threading.current_thread())
            return super().encode(text, add_special_tokens)

    engine = FakeEngine(fake_config(enable_prompt_embeds=True), tokenizer=Noting())
    part = {"type": "prompt_embeds", "data": payload(1)}
    async with client_for(engine) as client:
        body = {"messages": [{"role": "user", "content": [part, part]}]}
        response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert len(Noting.threads) >= 3
    assert threading.current_thread() not in Noting.threads


class HeldTokenizer(ByteTokenizer):
    """Notes which texts it is given, by their first letter; encodes them once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_encode = threading.Event()
        self.begun: list[str] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.begun.append(text[0])
        assert self.may_encode.wait(60)
        return [1]


async def test_a_keys_short_text_waits_for_few_of_another_key_that_sends_many() -> None:
    tokenizer = HeldTokenizer()
    inputs = Inputs(engine_with(tokenizer), TextWork())
    many = [
        asyncio.create_task(inputs.from_text("greedy", "g" * SMALL_TEXT_CHARS)) for _ in range(40)
    ]
    await eventually(lambda: len(tokenizer.begun) == THREADS)
    modest = asyncio.create_task(inputs.from_text("modest", "m" * SMALL_TEXT_CHARS))
    await asyncio.sleep(0)
    tokenizer.may_encode.set()
    await asyncio.gather(modest, *many)
    assert tokenizer.begun.index("m") <= 2 * THREADS


class HeldDecoder(ByteTokenizer):
    """Decodes a list for each time that it may; begun: the first ids of those that it got."""

    def __init__(self) -> None:
        super().__init__()
        self.may_decode = threading.Semaphore(0)
        self.begun: list[int] = []

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.begun.append(token_ids[0])
        assert self.may_decode.acquire(timeout=60)
        return "text"


async def test_a_keys_ids_wait_for_few_of_another_key_that_sends_many() -> None:
    tokenizer = HeldDecoder()
    app = create_app(engine_with(tokenizer), ServerConfig(api_key=("greedy", "modest")))

    async def detokenize(client: httpx.AsyncClient, key: str, token_id: int) -> None:
        headers = {"Authorization": f"Bearer {key}"}
        body = {"tokens": [token_id] * (SMALL_TEXT_CHARS // TOKEN_CHARS)}
        answer = await client.post("/detokenize", json=body, headers=headers)
        assert answer.status_code == 200, answer.text

    async with (
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(20):
            group.create_task(detokenize(client, "greedy", 7))
        await eventually(lambda: len(tokenizer.begun) == THREADS, seconds=60)
        group.create_task(detokenize(client, "modest", 8))
        while 8 not in tokenizer.begun:  # the first to begin, if it has come by then
            tokenizer.may_decode.release()
            with contextlib.suppress(TimeoutError):
                await eventually(lambda: 8 in tokenizer.begun, seconds=1)
        tokenizer.may_decode.release(21)
    assert tokenizer.begun.index(8) < 15


async def test_a_text_holds_its_room_until_its_thread_ends_whoever_has_left() -> None:
    tokenizer = HeldTokenizer()
    inputs = Inputs(engine_with(tokenizer), TextWork(100_000))
    left = asyncio.create_task(inputs.from_text("", "l" * 100_000))
    await eventually(lambda: tokenizer.begun == ["l"])
    left.cancel()
    waits = asyncio.create_task(inputs.from_text("", "w" * 100_000))
    await asyncio.sleep(0.1)
    left.cancel()  # a second time, as a server that ends does
    await asyncio.sleep(0.1)
    assert tokenizer.begun == ["l"]
    tokenizer.may_encode.set()
    await waits
    assert tokenizer.begun == ["l", "w"]
    assert left.cancelled()


async def test_a_text_may_be_as_long_as_the_longest_token_allows() -> None:
    engine = engine_with(ByteTokenizer(), max_model_len=10)
    most = 10 * engine.tokenizer.max_token_chars
    inputs = Inputs(engine, TextWork())
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
