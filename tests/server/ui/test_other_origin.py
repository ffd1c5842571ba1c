"""A page of another origin asks the server, as web apps do: with fetch, and with OpenAI's SDK."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Error, Page

from lora_serve.config import ServerConfig
from tests.fakes.browser import PATIENCE_MS
from tests.server.ui.conftest import served

SDK = Path.home() / ".cache/lora-serve/clients/openai_node/node_modules/openai"
KEY = "secret"
ASK = """async ([url, key, headers]) => {
    const body = {messages: [{role: "user", content: "hi"}], stream: true, max_tokens: 9};
    const answer = await fetch(url + "/v1/chat/completions", {
        method: "POST",
        headers: {"Content-Type": "application/json", Authorization: `Bearer ${key}`, ...headers},
        body: JSON.stringify(body),
    });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
        const {done, value} = await reader.read();
        if (done) return [answer.status, answer.headers.get("X-Request-Id"), text];
        text += value;
    }
}"""
ASK_BY_SDK = """async ([url, key]) => {
    const {default: OpenAI} = await import("/index.mjs");
    const client = new OpenAI(
        {baseURL: url + "/v1", apiKey: key, dangerouslyAllowBrowser: true, maxRetries: 0});
    const messages = [{role: "user", content: "hi"}];
    const whole = await client.chat.completions.create(
        {model: "alias", messages, max_tokens: 9}).withResponse();
    let streamed = "";
    const stream = await client.chat.completions.create(
        {model: "alias", messages, max_tokens: 9, stream: true});
    for await (const chunk of stream) streamed += chunk.choices[0]?.delta?.content ?? "";
    const {data} = await client.embeddings.create({model: "alias", input: "hi"});
    return [whole.data.choices[0].message.content, streamed, data[0].embedding.length,
            whole.request_id];
}"""


class Files(SimpleHTTPRequestHandler):
    """The SDK's modules, and an empty page in which the one name works that bundlers resolve."""

    def do_GET(self) -> None:
        if self.path != "/":
            super().do_GET()
            return
        state = {"#x509-transport-state": "/internal/auth/x509-transport-state.mjs"}
        page = f'<!doctype html><script type="importmap">{json.dumps({"imports": state})}</script>'
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(page.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def page_elsewhere(browser: Browser) -> Iterator[tuple[Page, str]]:
    """A page of another server, and its origin. Of the same machine: browsers ask before others."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=str(SDK))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        page = browser.new_page()
        try:
            page.set_default_timeout(PATIENCE_MS)
            origin = f"http://127.0.0.1:{server.server_port}"
            page.goto(f"{origin}/")
            yield page, origin
        finally:
            page.close()
            server.shutdown()
            thread.join()


def test_a_page_of_an_allowed_origin_streams_a_chat_and_no_other_page_does(
    browser: Browser,
) -> None:
    with page_elsewhere(browser) as (page, origin):
        with served(ServerConfig(allowed_origins=(origin,), api_key=(KEY,))) as site:
            status, request_id, text = page.evaluate(ASK, [site.url, KEY, {"X-Request-Id": "mine"}])
            assert (status, request_id) == (200, "mine")
            events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
            assert events[-1] == "[DONE]"
            deltas = [json.loads(each)["choices"][0]["delta"] for each in events[:-1]]
            assert "".join(delta.get("content", "") for delta in deltas)
            status, _, text = page.evaluate(ASK, [site.url, "wrong", {}])
            assert (status, json.loads(text)["error"]["code"]) == (401, 401)
        others = ServerConfig(allowed_origins=("http://app.example",), api_key=(KEY,))
        with served(others) as site, pytest.raises(Error, match="fetch"):
            page.evaluate(ASK, [site.url, KEY, {}])


def test_openais_sdk_works_in_a_page(browser: Browser) -> None:
    if not SDK.is_dir():
        pytest.skip("NO OPENAI SDK FOR NODE: python -m benchmarks.compat.clients installs it")
    with page_elsewhere(browser) as (page, origin):
        config = ServerConfig(allowed_origins=(origin,), api_key=(KEY,))
        with served(config) as site:
            whole, streamed, width, request_id = page.evaluate(ASK_BY_SDK, [site.url, KEY])
    assert whole == streamed != ""
    assert width == 8
    assert request_id
