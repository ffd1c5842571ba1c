from __future__ import annotations

import json

import httpx

from lora_serve.config import ServerConfig
from tests.fakes.engine import MODEL, FakeEngine, fake_config
from tests.server.clients import client_for, error_of


async def test_it_has_what_trainers_ask_for(client: httpx.AsyncClient) -> None:
    response = await client.get("/server_info?config_format=json")
    config = response.json()["vllm_config"]
    assert config["lora_config"] == {"max_lora_rank": 64, "max_loras": 8}
    assert config["parallel_config"]["data_parallel_size"] == 1
    assert config["model_config"]["dtype"] == "float32"
    assert config["model_config"]["logprobs_mode"] == "raw_logprobs"
    assert config["weight_transfer_config"] is None


async def test_it_is_a_text_unless_json_is_asked_for(client: httpx.AsyncClient) -> None:
    text = (await client.get("/server_info")).json()["vllm_config"]
    assert json.loads(text)["cache_config"]["num_gpu_blocks"] == 64
    error_of(await client.get("/server_info?config_format=xml"), 400)


async def test_it_tells_which_logprobs_answers_have() -> None:
    config = fake_config(logprobs_mode="processed_logprobs")
    async with client_for(FakeEngine(config)) as client:
        response = await client.get("/server_info?config_format=json")
        model = response.json()["vllm_config"]["model_config"]
        assert model["logprobs_mode"] == "processed_logprobs"


async def test_without_adapters_there_is_no_lora_config() -> None:
    async with client_for(FakeEngine(fake_config(enable_lora=False))) as client:
        response = await client.get("/server_info?config_format=json")
        assert response.json()["vllm_config"]["lora_config"] is None


async def test_paths_are_for_those_who_may_change_the_server(engine: FakeEngine) -> None:
    config = ServerConfig(api_key=("user",), admin_api_key=("admin",))
    async with client_for(engine, config) as client:
        for key, model in (("user", MODEL), ("admin", "/models/tiny")):
            headers = {"Authorization": f"Bearer {key}"}
            response = await client.get("/server_info?config_format=json", headers=headers)
            assert response.json()["vllm_config"]["model_config"]["model"] == model
            assert ("/models/tiny" in response.text) == (key == "admin")


async def test_one_process_computes(client: httpx.AsyncClient) -> None:
    for query in ("", "?include_dp=false"):
        assert (await client.get(f"/get_world_size{query}")).json() == {"world_size": 1}
