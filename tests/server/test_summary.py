from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
from msgspec import structs

from lora_serve.config import (
    CacheConfig,
    EngineConfig,
    KVEventsConfig,
    KVTierConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    ServerConfig,
    SpeculativeConfig,
)
from lora_serve.messages import EngineReady
from lora_serve.model_info import DraftModelInfo
from lora_serve.observability.log import JsonFormatter
from lora_serve.server.adapter_names.catalogued import NOT_KNOWN
from lora_serve.server.summary import start_summary, tell_summary

READY = EngineReady(
    dtype="bfloat16",
    num_blocks=1000,
    kernels="cpu-avx2-3",
    max_request_tokens=8192,
    num_longest_requests=22,
    kv_bytes=4 * 2**30,
    architecture="LlamaForCausalLM",
    device="cpu",
    num_threads=2,
    num_parameters=134_515_008,
    weights="GGUF (Q4_1, F32)",
)
ENGINE = EngineConfig(
    model=ModelConfig(model="/models/a", served_model_name=("a", "b"), quantization="int8"),
    cache=CacheConfig(block_size=16),
    lora=LoRAConfig(enable_lora=True, max_loras=4, lora_modules=("x=/x",)),
)


def test_each_subject_is_told_with_its_numbers() -> None:
    summary = start_summary(ENGINE, ServerConfig(), READY, "1 loaded")
    assert summary["model"] == (
        "a, b: LlamaForCausalLM, 135 M parameters, bfloat16 from GGUF (Q4_1, F32), linear layers "
        "in int8"
    )
    assert summary["runs on"] == "cpu, 2 threads, kernels cpu-avx2-3"
    assert summary["KV cache"].startswith(
        "4.0 GiB for 16,000 tokens; the longest request has 8,192"
    )
    assert "22 fit at once" in summary["KV cache"]
    assert summary["adapters"].startswith("1 loaded; 4 in one step, 32 in memory")
    assert summary["pages"].startswith("/ui (load, adapters and requests, and a playground), /docs")


def test_no_number_of_adapters_is_told_before_the_catalog_has_answered() -> None:
    summary = start_summary(ENGINE, ServerConfig(), READY, NOT_KNOWN, "redis://r, as replica 'a'")
    assert summary["adapters"].startswith("not known until the catalog answers; 4 in one step")
    assert " loaded" not in summary["adapters"]


def test_ranks_are_told_with_the_threads_of_each() -> None:
    ranks = replace(ENGINE, parallel=ParallelConfig(tensor_parallel_size=2))
    ready = structs.replace(READY, num_threads=1)
    told = start_summary(ranks, ServerConfig(), ready, "")["runs on"]
    assert told == "cpu, 2 ranks, 1 thread each, kernels cpu-avx2-3"


def test_what_servers_share_is_told() -> None:
    """No word of it where nothing is shared."""
    plain = start_summary(ENGINE, ServerConfig(), READY, "")
    assert "catalog" not in " ".join(plain.values())
    assert "KV events" not in plain
    shared = replace(
        ENGINE,
        lora=LoRAConfig(enable_lora=True, lora_resolver=("dir:/adapters", "s3://bucket/a")),
        kv_tiers=KVTierConfig(kv_redis_url="redis://r", kv_role="kv_consumer"),
        kv_events=KVEventsConfig(
            kv_events_enable_kv_cache_events=True, kv_events_replay_endpoint="tcp://*:5558"
        ),
    )
    catalog = "redis://r:1/0, as replica 'one'"
    told = start_summary(shared, ServerConfig(), READY, "", catalog)
    assert told["adapters"].endswith(
        "; others on their first request, from dir:/adapters, s3://bucket/a; their names stand in "
        "the catalog at redis://r:1/0, as replica 'one'"
    )
    assert told["KV cache"].endswith("; also fetched from Redis, never stored there (kv_consumer)")
    assert told["KV events"] == "published at tcp://*:5557, replayed at tcp://*:5558"
    disk = KVTierConfig(kv_disk_path="/kv", kv_role="kv_producer")
    producer = start_summary(replace(ENGINE, kv_tiers=disk), ServerConfig(), READY, "")
    assert producer["KV cache"].endswith("; also stored in disk, never fetched (kv_producer)")


def test_only_pages_that_there_are_are_told() -> None:
    bare = start_summary(ENGINE, ServerConfig(disable_ui=True), READY, "")
    assert bare["pages"] == "/docs (the API)"
    none = ServerConfig(disable_ui=True, disable_fastapi_docs=True)
    assert "pages" not in start_summary(ENGINE, none, READY, "")


@pytest.mark.parametrize(
    ("server", "told"),
    [
        (ServerConfig(), "programs of this machine may use it without a key, and may change"),
        (
            ServerConfig(host="0.0.0.0"),
            "every client that reaches it may use it without a key, and",
        ),
        (ServerConfig(host="0.0.0.0"), "nothing over HTTP changes it"),
        (ServerConfig(api_key=("k",)), "using it needs an API key; nothing over HTTP changes"),
        (
            ServerConfig(api_key=("k",), allow_runtime_lora_updating=True),
            "every key may change its adapters",
        ),
        (ServerConfig(admin_api_key=("k",)), "using it needs no key; an admin key may change"),
    ],
)
def test_who_may_do_what_is_told(server: ServerConfig, told: str) -> None:
    access = start_summary(ENGINE, server, READY, "")["access"]
    assert told in access
    without = start_summary(replace(ENGINE, lora=LoRAConfig()), server, READY, "")["access"]
    assert without == access.replace("change its adapters", "pause and reset it")


def test_programs_read_a_value_for_each_subject(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        tell_summary(start_summary(ENGINE, ServerConfig(), READY, ""))
    (record,) = caplog.records
    line = json.loads(JsonFormatter("server").format(record))
    assert line["runs_on"] == "cpu, 2 threads, kernels cpu-avx2-3"
    assert "\n  model     a, b:" in line["message"]


def test_what_drafts_is_told_if_anything_does() -> None:
    assert "drafts" not in start_summary(ENGINE, ServerConfig(), READY, "")
    drafting = replace(ENGINE, speculative=SpeculativeConfig(speculation="auto"))
    assert start_summary(drafting, ServerConfig(), READY, "")["drafts"] == (
        "by suffix, up to 16 tokens of a request; a step with drafts has at most 64 rows"
    )
    speculative = SpeculativeConfig(speculative_model="/m", speculative_quantization="int4")
    info = DraftModelInfo(100, 16, 1, 2048, 2**20, "Tiny", 10**6, "bfloat16", "safetensors")
    drafting = replace(ENGINE, speculative=speculative)
    ready = structs.replace(READY, draft_model=info)
    assert start_summary(drafting, ServerConfig(), ready, "")["drafts"] == (
        "by draft_model, up to 16 tokens of a request; a step with drafts has at most 64 rows; /m: "
        "Tiny, 1.0 M parameters, bfloat16 from safetensors, linear layers in int4, with 1.0 MiB "
        "of KV for 1,600 tokens"
    )
