from __future__ import annotations

from lora_serve.fuzz.oracle.engine import OracleEngine
from lora_serve.fuzz.oracle.executor import oracle_model
from lora_serve.fuzz.oracle.tier_store import OracleTierStore
from lora_serve.identity import AdapterRef, BlockHasher, CacheNamespace
from lora_serve.kv.connector import KVConnector, TransferPlan
from lora_serve.kv.tiered_connector import tier_namespaces
from lora_serve.kv_tiers.base import TierStats
from lora_serve.sampling_params import SamplingParams

TELLS_ALL = SamplingParams(max_tokens=1, seed=1, prompt_logprobs=0)


def test_without_tiers_nothing_is_asked_stored_or_waited_for() -> None:
    engine = OracleEngine()
    connector: KVConnector[object] = KVConnector()  # type: ignore[type-var]
    assert (connector.plan(), connector.stats()) == (TransferPlan(), TierStats())
    assert (connector.num_waiting, connector.next_give_up_time) == (0, None)
    connector.drop_stale("a", b"", 0)
    connector.close()
    engine.add("a", list(range(10, 110)))
    engine.run()
    assert engine.last("a").num_cached_by_tier == {}
    assert not any(step.kv_saves or step.kv_loads for step in engine.executor.steps)


def test_an_engine_that_closes_stores_what_it_computed_last() -> None:
    store = OracleTierStore()
    engine = OracleEngine(store=store)
    engine.add("a", list(range(10, 110)), max_tokens=1)
    while engine.core.has_requests:
        engine.core.step()
    engine.core.close()
    assert store.is_closed
    assert store.num_blocks == 6


def test_what_no_fetch_asked_for_is_told_once_for_each_admission() -> None:
    store = OracleTierStore()
    engine = OracleEngine(store=store)
    prompt = list(range(10, 110))
    engine.add("first", prompt)
    engine.run()
    assert store.num_not_asked == 6  # full blocks before the last token
    engine.add("found on the device", prompt)
    engine.add("bypasses the cache", prompt, params=TELLS_ALL)
    engine.run()
    assert store.num_not_asked == 6
    engine = OracleEngine(store=store)
    engine.add("found in a tier", prompt)
    engine.run()
    assert engine.num_cached("found in a tier") == 96
    assert store.num_not_asked == 6


def test_a_namespace_tells_the_tiers_whose_kv_it_is_but_no_salt() -> None:
    model, hasher = oracle_model(4), BlockHasher()
    of = tier_namespaces(hasher, model)
    base = CacheNamespace(model.fingerprint)
    adapter = CacheNamespace(model.fingerprint, AdapterRef("a", b"d" * 32, 3), "secret")
    assert of(base).root == hasher.root(base)
    assert (of(base).lora_name, of(base).digest, of(base).salt_digest) == ("", b"", b"")
    named = of(adapter)
    assert (named.lora_name, named.digest, named.generation) == ("a", b"d" * 32, 3)
    assert len(named.salt_digest) == 32
    assert b"secret" not in named.salt_digest
    assert (named.layout, named.block_bytes) == (model.kv_layout, model.kv_block_bytes)
