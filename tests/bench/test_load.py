from __future__ import annotations

import pytest

from lora_serve.bench.client import EVERY_TOKEN, Endpoint, RequestRecord
from lora_serve.bench.http_stream import Origin
from lora_serve.bench.load import LoadResult, run_load
from lora_serve.bench.workload import TimedRequest, WorkloadSpec, make_workload
from tests.fakes.timed_server import TimedServer


async def load(
    server: TimedServer, requests: tuple[TimedRequest, ...], limit: int | None = None
) -> LoadResult:
    async with server.listening() as url:
        return await run_load(Endpoint(Origin.parse(url), "base"), requests, limit)


async def test_times_are_those_that_the_server_took() -> None:
    server = TimedServer(first_seconds=0.15, gap_seconds=0.03)
    (record,) = (await load(server, (TimedRequest((1, 2), 5),))).records
    assert record.error is None
    assert (record.prompt_tokens, record.output_tokens) == (2, 5)
    assert record.text == "ab" * 5
    assert 0.15 <= record.ttft_seconds < 1.0
    assert len(record.gaps_seconds) == 4
    assert sum(record.gaps_seconds) >= 0.1  # timers may fire early by a clock tick, not more
    assert record.e2e_seconds == pytest.approx(record.ttft_seconds + sum(record.gaps_seconds))
    assert record.tpot_seconds == pytest.approx(sum(record.gaps_seconds) / 4)


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("finishes_apart", [True, False])
async def test_a_finish_without_a_token_is_no_token(chunked: bool, finishes_apart: bool) -> None:
    server = TimedServer(0.0, 0.0, chunked=chunked, finishes_apart=finishes_apart)
    (record,) = (await load(server, (TimedRequest((1,), 6),))).records
    assert record.error is None
    assert len(record.gaps_seconds) == 5


async def test_an_answer_whose_only_token_has_no_text_came_with_its_end() -> None:
    server = TimedServer(0.05, 0.0, texts={"base": ""})
    (record,) = (await load(server, (TimedRequest((1,), 1),))).records
    assert (record.error, record.output_tokens, record.text) == (None, 1, "")
    assert 0.04 <= record.ttft_seconds == record.e2e_seconds


async def test_tokens_without_text_are_timed_where_their_ids_are_asked_for() -> None:
    server = TimedServer(0.0, 0.0, texts={"base": ""})
    async with server.listening() as url:
        endpoint = Endpoint(Origin.parse(url), "base", extra_body=EVERY_TOKEN)
        (record,) = (await run_load(endpoint, [TimedRequest((1,), 6)])).records
    assert (record.error, len(record.gaps_seconds)) == (None, 5)


async def test_tokens_that_come_bundled_are_counted_from_usage() -> None:
    server = TimedServer(0.0, 0.01, tokens_per_event=2)
    (record,) = (await load(server, (TimedRequest((1,), 6),))).records
    assert record.output_tokens == 6
    assert len(record.gaps_seconds) == 2
    assert record.tpot_seconds == pytest.approx(sum(record.gaps_seconds) / 5)


async def test_a_closed_loop_keeps_as_many_running_as_allowed_and_no_more() -> None:
    server = TimedServer(0.03, 0.0)
    requests = make_workload(WorkloadSpec(num_requests=12, output_tokens=2))
    result = await load(server, requests, 4)
    assert server.most_running == 4
    assert result.wall_seconds >= 3 * 0.03
    assert {tuple(body["prompt"]) for body in server.bodies} == {
        request.prompt_token_ids for request in requests
    }


async def test_an_open_loop_sends_each_request_at_its_time_whatever_still_runs() -> None:
    server = TimedServer(0.3, 0.0)
    requests = tuple(TimedRequest((i,), 1, None, 0.05 * i) for i in range(4))
    result = await load(server, requests)
    assert server.most_running == 4
    assert all(0 <= record.late_seconds < 0.2 for record in result.records)
    assert 0.45 <= result.wall_seconds < 1.2  # one after another would take 1.2


async def test_waiting_for_a_free_place_counts_as_lateness_not_as_latency() -> None:
    result = await load(TimedServer(0.1, 0.0), tuple(TimedRequest((i,), 1) for i in range(2)), 1)
    second = result.records[1]
    assert second.late_seconds >= 0.1
    assert second.ttft_seconds < second.late_seconds + 0.1


async def test_adapters_are_asked_for_by_model_or_as_the_server_wants() -> None:
    server = TimedServer(0.0, 0.0, adapters=("x",))
    async with server.listening() as url:
        endpoint = Endpoint(
            Origin.parse(url + "/v1"), "base", "secret", {"top_k": 1}, {"y": {"lora": [7]}}
        )
        await run_load(endpoint, [TimedRequest((i,), 1, name) for i, name in enumerate("xy")], 1)
    x, y = server.bodies
    assert (x["model"], y["model"], y["lora"]) == ("x", "base", [7])
    assert "lora" not in x
    assert all(body["top_k"] == 1 and body["ignore_eos"] for body in (x, y))
    assert all(b"Authorization: Bearer secret" in head for head in server.headers)


async def test_cached_prompt_tokens_are_those_that_usage_tells() -> None:
    result = await load(TimedServer(0.0, 0.0), (TimedRequest((1, 2, 3, 4), 1),) * 2, 1)
    assert [record.cached_tokens for record in result.records] == [0, 2]


async def test_an_unknown_adapter_is_a_failed_record_with_the_servers_words() -> None:
    result = await load(TimedServer(), (TimedRequest((1,), 2, "ghost"), TimedRequest((2,), 2)))
    ghost, base = result.records
    assert ghost.error is not None
    assert "HTTP 404" in ghost.error
    assert "no model ghost" in ghost.error
    assert base.error is None


async def test_an_answer_that_breaks_off_is_a_failed_record() -> None:
    for chunked in (True, False):
        server = TimedServer(0.0, 0.0, breaks_after=2, chunked=chunked)
        (record,) = (await load(server, (TimedRequest((1,), 5),))).records
        assert record.error is not None
        assert "ended before" in record.error or "broke off" in record.error


async def test_an_answer_that_takes_too_long_is_a_failed_record() -> None:
    async with TimedServer(first_seconds=0.5).listening() as url:
        endpoint = Endpoint(Origin.parse(url), "base", timeout_seconds=0.05)
        (record,) = (await run_load(endpoint, [TimedRequest((1,), 1)])).records
        assert record.error == "not complete after 0.05 s"


async def test_a_server_that_is_not_there_is_a_failed_record() -> None:
    async with TimedServer().listening() as url:
        pass
    endpoint = Endpoint(Origin.parse(url), "base")
    (record,) = (await run_load(endpoint, [TimedRequest((1,), 1)])).records
    assert record.error is not None
    assert "Connect" in record.error


async def test_each_record_is_handed_over_as_it_completes() -> None:
    seen: list[RequestRecord] = []
    async with TimedServer(0.0, 0.0).listening() as url:
        endpoint = Endpoint(Origin.parse(url), "base")
        requests = [TimedRequest((i,), 1) for i in range(3)]
        result = await run_load(endpoint, requests, 1, seen.append)
    assert tuple(seen) == result.records
