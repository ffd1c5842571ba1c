"""`lora-serve top`: its arithmetic, its lines, and a real terminal that it gives back."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from lora_serve.cli.main import main
from lora_serve.cli.remote import ServedModel
from lora_serve.cli.top_samples import Interval, read_scrape
from lora_serve.cli.top_screen import View, screen
from tests.cli.conftest import FakeServer
from tests.cli.test_chat import load
from tests.fakes.engine import write_adapter
from tests.fakes.terminal import Terminal

BEFORE = """
vllm:generation_tokens_total 100
vllm:time_to_first_token_seconds_bucket{le="0.1"} 5
vllm:time_to_first_token_seconds_bucket{le="0.2"} 5
vllm:time_to_first_token_seconds_bucket{le="+Inf"} 5
lora_serve:adapter_requests_total{lora_name="a"} 9
"""
NOW = """
vllm:generation_tokens_total 400
vllm:num_requests_running 3
vllm:num_requests_waiting 2
vllm:num_requests_waiting_by_reason{reason="capacity"} 2
vllm:num_requests_waiting_by_reason{reason="grammar"} 0
vllm:kv_cache_usage_perc 0.25
vllm:prefix_cache_queries_total 80
vllm:prefix_cache_hits_total 60
vllm:time_to_first_token_seconds_bucket{le="0.1"} 5
vllm:time_to_first_token_seconds_bucket{le="0.2"} 15
vllm:time_to_first_token_seconds_bucket{le="+Inf"} 15
lora_serve:adapter_requests_total{lora_name="a"} 10
lora_serve:adapter_requests_total{lora_name="b"} 4
lora_serve:kv_tier_bytes{tier="disk"} 1048576
lora_serve:kv_tier_capacity_bytes{tier="disk"} 2097152
lora_serve:kv_tier_load_breaker_open{tier="disk"} 1
"""
MODELS = [
    ServedModel("base", {}),
    *(ServedModel(name, {"parent": "base", "residency": "resident"}) for name in "cab"),
]


def interval() -> Interval:
    return Interval(read_scrape(BEFORE, 10.0), read_scrape(NOW, 12.0))


def test_two_scrapes_give_rates_and_quantiles() -> None:
    seen = interval()
    assert seen.rate("vllm:generation_tokens_total") == 150
    assert seen.quantile("vllm:time_to_first_token_seconds", 0.5) == pytest.approx(0.15)
    assert seen.quantile("vllm:inter_token_latency_seconds", 0.5) is None
    began_anew = Interval(seen.now, seen.before)
    assert began_anew.growth("vllm:generation_tokens_total") == 100


def test_the_screen_shows_the_busiest_adapters_first_and_fits_its_width() -> None:
    lines = screen(View("http://server", interval(), MODELS), 60)
    text = "\n".join(lines)
    assert "tokens/s    150 generated" in text
    assert "3 running, 2 waiting (2 capacity)" in text
    assert "first token p50 150 ms" in text
    assert "█████░░░░░░░░░░░░░░░  25% in use, 75% of" in text
    assert "KV disk     1.0 MiB of 2.0 MiB, " in text
    assert [line.split()[0] for line in lines[-3:]] == ["b", "a", "c"]
    assert max(map(len, lines)) <= 60
    assert len(screen(View("http://server", interval(), MODELS), 60, 5)) == 5


def test_one_look_at_a_server(
    fake_server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load(fake_server, "tenant", write_adapter(tmp_path / "a", "ALPHA"))
    httpx.post(f"{fake_server.url}/v1/completions", json={"prompt": "hi", "model": "tenant"})
    assert main(["top", "--once", "--interval", "0.1", "--url", fake_server.url]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{fake_server.url}  base/model, alias")
    assert "adapters: 1, 1 resident" in out
    assert "\x1b" not in out
    assert main(["top", "--interval", "0"]) == 2
    assert main(["top", "--once", "--url", "http://127.0.0.1:1"]) == 2


def test_metrics_on_a_port_of_their_own(
    fake_server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    api = f"{fake_server.url}/absent"  # has no /metrics, as the API's port with --metrics-port
    command = ["top", "--once", "--interval", "0.1", "--url", api]
    assert main(command) == 2
    assert "--metrics-url http://HOST:PORT" in capsys.readouterr().err
    apart = ["top", "--once", "--interval", "0.1", "--url", fake_server.url]
    assert main([*apart, "--metrics-url", f"{fake_server.url}/metrics"]) == 0
    assert "base/model" in capsys.readouterr().out
    assert main([*apart, "--metrics-url", api]) == 2  # it is there that metrics are asked for


def test_a_terminal_is_given_back_as_it_was(fake_server: FakeServer) -> None:
    import sys

    command = (sys.executable, "-m", "lora_serve.cli.main", "top", "--interval", "0.2")
    for key in ("q", "\x03"):
        with Terminal([*command, "--url", fake_server.url], columns=70) as terminal:
            terminal.expect("\x1b\\[\\?1049h.*KV cache.*\x1b\\[H")
            terminal.type(key)
            assert terminal.wait() == 0
            assert terminal.shown.endswith("\x1b[?25h\x1b[?1049l")
            assert terminal.settings == terminal.settings_before
