"""What a reset of KV said was forgotten is not found by the next server, however this one ends."""

from __future__ import annotations

from pathlib import Path

import httpx

from lora_serve.demo.model import DemoPaths
from lora_serve.demo.server_process import ServerProcess
from tests.e2e.conftest import StartServer
from tests.e2e.metrics import metric, wait_for
from tests.e2e.test_kv_tiers import BLOCK_SIZE, ask, end_it, num_findable, serving
from tests.fakes.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]

NUM_TOKENS = 256
PROMPT = {"model": "tenant", "prompt": [3 + i % 700 for i in range(NUM_TOKENS)]}
NUM_TIERS = 2


def reset(server: ServerProcess) -> httpx.Response:
    url = f"{server.base_url}/reset_prefix_cache"
    return httpx.post(url, json={"lora_name": "tenant"}, timeout=60)


def store_in_both(server: ServerProcess) -> None:
    name = "lora_serve:kv_tier_saved_blocks_total"
    wanted = NUM_TIERS * (NUM_TOKENS // BLOCK_SIZE)
    wait_for(lambda: metric(server.base_url, name) >= wanted, "the KV to be stored")


def allow_to_forget(redis: RedisServer, is_allowed: bool) -> None:
    with redis.client() as client:
        client.execute_command("ACL", "SETUSER", "default", "+hdel" if is_allowed else "-hdel")


def test_a_reset_is_confirmed_when_no_kill_can_undo_it(
    demo_paths: DemoPaths, start_server: StartServer, redis_server: RedisServer, tmp_path: Path
) -> None:
    flags = (
        *("--kv-disk-path", str(tmp_path / "kv"), "--kv-redis-url", redis_server.url),
        *("--lora-modules", f"tenant={demo_paths.alpha}"),
    )
    with serving(start_server, demo_paths, tmp_path / "first.log", *flags) as server:
        cold = ask(server, **PROMPT)
        assert cold.found == 0
        store_in_both(server)
        assert ask(server, **PROMPT).found == num_findable(NUM_TOKENS)
        allow_to_forget(redis_server, False)
        refused = reset(server)
        assert refused.status_code == 503
        message = refused.json()["error"]["message"]
        assert "not yet forgotten by redis (" in message
        assert "disk" not in message
        after = ask(server, **PROMPT)
        assert after.same_as(cold)
        assert after.found == 0, "this server does not use it any more, forgotten or not"
        allow_to_forget(redis_server, True)
        confirmed = reset(server)
        end_it(server)
        assert confirmed.json() == {"success": True}
    with serving(start_server, demo_paths, tmp_path / "second.log", *flags) as server:
        answer = ask(server, **PROMPT)
        assert answer.same_as(cold)
        assert answer.found == 0
