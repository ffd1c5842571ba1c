"""What tells two moments of a small world apart: everything, or only what decides the rest.

Why `essence` may leave out what it leaves out: nothing compares two block ids, arrival numbers or
request ids but for their order or for being equal, so worlds that differ in names alone go on
alike. Past these, it drops
- the order of dictionaries of which only members are looked up,
- a cached block's hash once no request that is here, or may come, has that block: nobody looks for
  it, and whoever takes the block forgets it, as a bare one's,
- how often a request was preempted or what its draws were: only whether is asked, and all draws are
  equal,
- a share's place in the last step, which workers alone ask for,
- shares of requests that have ended, of a step in flight: its report passes over them,
- weights in memory of adapters that nobody wants any more,
- where served tokens are counted from.
`test_liveness.py` checks it: worlds of one essence look alike, and go on alike.
"""

from __future__ import annotations

from collections.abc import Hashable

from lora_serve.identity import AdapterRef, BlockHash
from lora_serve.scheduler.request import Request
from tests.scheduler.small_world import World


def everything(world: World) -> Hashable:
    """All that could decide what can happen next, as it is named."""
    scheduler, pool, writers = world.scheduler, world.kv.pool, world.scheduler._writers
    requests = tuple(
        (
            *(r.request_id, r.sort_key, r.status, r.num_computed_tokens, tuple(r.token_ids)),
            *(tuple(r.block_ids), r.num_committed_blocks, r.offers_blocks),
            *(r.num_preemptions, r.num_overtaken, r.step_index),
            *(r.num_planned_tokens, r.num_awaited_tokens),
        )
        for r in world.requests
    )
    shares = scheduler._queue._shares
    return (
        requests,
        tuple(world.left_to_ask),
        tuple(pool._free),
        tuple((block.ref_cnt, block.block_hash) for block in pool.blocks),
        tuple((h, who.request_id) for h, who in writers._writer.items()),
        tuple((who.request_id, h) for who, h in writers._awaited.items()),
        tuple(scheduler._seats._num_running.items()),
        frozenset(scheduler._queue._seated),
        frozenset(scheduler._queue._held),
        frozenset(world.memory.resident),
        tuple(world.memory.loading),
        (tuple(shares._served.items()), shares._time) if shares else (),
        tuple(
            tuple((chunk.request_id, chunk.start, chunk.end) for chunk in step.requests)
            for step in world.in_flight
        ),
    )


def essence(world: World) -> Hashable:
    """What decides what can happen next: equal for worlds that differ in nothing else."""
    scheduler, pool, writers = world.scheduler, world.kv.pool, world.scheduler._writers
    place = {request: index for index, request in enumerate(world.requests)}
    wanted = _wanted_hashes(world)
    blocks: dict[int, int] = {}  # that somebody holds, by who came first
    requests = tuple(_essence_of_request(world, request, blocks) for request in place)
    hash_of = {
        block.block_id: block.block_hash if block.block_hash in wanted else None
        for block in pool.blocks
    }
    shares = scheduler._queue._shares
    return (
        requests,
        tuple(sorted(world.kinds[number] for number in world.left_to_ask)),
        tuple(hash_of[block_id] for block_id in pool._free),
        tuple(hash_of[block_id] for block_id in blocks),
        frozenset((h, place.get(who)) for h, who in writers._writer.items()),
        frozenset((place.get(who), h) for who, h in writers._awaited.items()),
        frozenset(scheduler._seats._num_running.items()),
        frozenset(scheduler._queue._seated),
        frozenset(scheduler._queue._held),
        frozenset(world.memory.resident & _wanted_adapters(world)),
        frozenset(world.memory.loading),
        frozenset((s, n - shares._time) for s, n in shares._served.items()) if shares else (),
        tuple(
            tuple(
                (place[request], chunk.start, chunk.end)
                for request, chunk in scheduler._in_flight._steps[step.step_id]
                if request in place
            )
            for step in world.in_flight
        ),
    )


def _essence_of_request(world: World, request: Request, blocks: dict[int, int]) -> Hashable:
    """`blocks` gets the numbers of those that it is the first to hold."""
    return (
        world.kinds[int(request.request_id)],
        request.status.name,
        request.num_tokens,
        request.num_computed_tokens,
        request.num_planned_tokens,
        request.num_awaited_tokens,
        tuple(blocks.setdefault(block_id, len(blocks)) for block_id in request.block_ids),
        request.num_committed_blocks,
        request.offers_blocks,
        request.num_preemptions > 0,
        request.num_overtaken,
    )


def _wanted_hashes(world: World) -> frozenset[BlockHash]:
    numbers = (*world.left_to_ask, *(int(request.request_id) for request in world.requests))
    return frozenset().union(*(world.asked[number].chain for number in numbers))


def _wanted_adapters(world: World) -> set[AdapterRef]:
    numbers = (*world.left_to_ask, *(int(request.request_id) for request in world.requests))
    return {ref for number in numbers if (ref := world.asked[number].adapter) is not None}
