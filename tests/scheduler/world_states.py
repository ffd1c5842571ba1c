"""What tells two moments of a small world apart: everything, or only what decides the rest.

Why `essence` may leave out what it leaves out: nothing compares two block ids, arrival numbers or
request ids but for their order or for being equal, so worlds that differ in names alone go on
alike. Past these, it drops
- the order of dictionaries of which only members are looked up,
- a cached block's hash once no request that is here, or may come, has that block: it is not
  looked for, and is forgotten when the block is taken, as a bare one's,
- how often a request was preempted or what its draws were: only whether is asked, and all draws are
  equal,
- a share's place in the last step, which workers alone ask for,
- shares of requests that have ended, of a step in flight: its report passes over them,
- weights in memory of adapters that are not wanted any more,
- where served tokens are counted from,
- why a fetch failed, unless its requests must fail with it, and which of two ended first,
- what a result held that no request waited for any more.
Both leave out tickets, and the time but for whose is up and whose will be first: nothing compares
more of them.
`test_liveness.py` checks it: worlds of one essence look alike, and go on alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import astuple

from lora_serve.identity import BASE_MODEL, BlockHash
from lora_serve.kv.fetches import Fetch
from lora_serve.kv_tiers.base import Cause
from lora_serve.scheduler.request import Request
from tests.scheduler.small_world import World


def everything(world: World) -> Hashable:
    """All that could decide what can happen next, as it is named."""
    scheduler, pool, writers = world.scheduler, world.kv.pool, world.scheduler._shared.writers
    requests = tuple(
        (
            *(r.request_id, r.sort_key, r.status, r.num_computed_tokens, tuple(r.token_ids)),
            *(_tables(r), r.num_committed_blocks, r.offers_blocks),
            *(r.num_preemptions, r.gave_way, r.num_overtaken, r.step_index),
            *(r.num_scheduled_tokens, r.num_pending_tokens, r.num_computed_in_all),
        )
        for r in world.requests
    )
    shares = scheduler._queue._shares
    return (
        requests,
        *(world.asked, tuple(world.left_to_ask), world.resets),
        (scheduler._pause.state, world.num_pauses),
        tuple(pool._free),
        tuple((block.ref_cnt, block.block_hash, block.group) for block in pool.blocks),
        tuple((h, who.request_id) for h, who in writers._writer.items()),
        tuple((who.request_id, h) for who, h in writers._awaited.items()),
        tuple((ref, astuple(slot)) for ref, slot in scheduler._slots._slots.items()),
        frozenset(world.memory.resident),
        (tuple(world.memory.loading), tuple(world.memory.slow)),
        (tuple(shares._served.items()), shares._time) if shares else (),
        world.places.gave_way(scheduler),
        tuple(
            tuple((chunk.request_id, chunk.start, chunk.end) for chunk in step.requests)
            for step in world.in_flight
        ),
        _everything_of_fetches(world),
    )


def essence(world: World) -> Hashable:
    """What decides what can happen next: equal for worlds that differ in nothing else."""
    scheduler, pool, writers = world.scheduler, world.kv.pool, world.scheduler._shared.writers
    place = {request: index for index, request in enumerate(world.requests)}
    wanted = _wanted_hashes(world)
    blocks: dict[int, int] = {}  # that requests hold, by which came first
    requests = tuple(_essence_of_request(world, request, blocks) for request in place)
    hash_of = {
        block.block_id: (block.block_hash, block.group) if block.block_hash in wanted else None
        for block in pool.blocks
    }
    shares, gave_way = scheduler._queue._shares, world.places.gave_way(scheduler)
    return (
        requests,
        frozenset(Counter(world.asked[number] for number in world.left_to_ask).items()),
        world.resets,
        (scheduler._pause.state, world.num_pauses),
        tuple(hash_of[block_id] for block_id in pool._free),
        tuple(hash_of[block_id] for block_id in blocks),
        frozenset((h, place.get(who)) for h, who in writers._writer.items()),
        frozenset((place.get(who), h) for who, h in writers._awaited.items()),
        frozenset((ref, astuple(slot)) for ref, slot in scheduler._slots._slots.items()),
        frozenset(world.memory.resident & _wanted_adapters(world)),
        (frozenset(world.memory.loading), frozenset(world.memory.slow)),
        frozenset((s, n - shares._time) for s, n in shares._served.items()) if shares else (),
        frozenset(index for r, index in place.items() if r.request_id in gave_way),
        tuple(
            tuple(
                (place[request], chunk.start, chunk.end)
                for request, chunk in scheduler._in_flight._steps[step.step_id]
                if request in place
            )
            for step in world.in_flight
        ),
        _essence_of_fetches(world, place),
    )


def _essence_of_request(world: World, request: Request, blocks: dict[int, int]) -> Hashable:
    """`blocks` gets the numbers of those that it is the first to hold."""
    return (
        world.asked_of(request),
        request.status.name,
        request.num_tokens,
        request.num_computed_tokens,
        request.num_scheduled_tokens,
        request.num_pending_tokens,
        tuple(
            (unseen, tuple(blocks.setdefault(block_id, len(blocks)) for block_id in held))
            for unseen, held in _tables(request)
        ),
        request.num_committed_blocks,
        request.offers_blocks,
        request.num_preemptions > 0,
        request.gave_way,
        request.num_computed_in_all if world.scheduler._is_fair else 0,
        request.num_overtaken,
    )


def _tables(request: Request) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """How many blocks are not held, and which are, for each group."""
    return tuple((table.num_unseen, tuple(table.seen_block_ids)) for table in request.block_tables)


def _fetches(world: World) -> Sequence[Fetch[Request]]:
    """Fetches in flight, oldest first, and in hand."""
    fetches = world.connector._fetches
    return list(dict.fromkeys((*fetches._in_flight.values(), *fetches._by_member.values())))


def _everything_of_fetches(world: World) -> Hashable:
    if world.store is None:
        return ()
    fetches = _fetches(world)
    place = {fetch.ticket: index for index, fetch in enumerate(fetches)}
    return (
        tuple(
            (
                *(fetch.first_block, fetch.hashes, len(fetch.blocks), fetch.failure),
                tuple(who.request_id for who in fetch.members),
                *_progress_of_fetch(world, fetch),
            )
            for fetch in fetches
        ),
        tuple((who.request_id, r) for who, r in world.connector._fetches._asked.items()),
        tuple(
            (place.get(result.ticket), len(result.blocks), tuple(result.causes.values()))
            for result in world.store.results
        ),
        world.store.cancelled is not None,
    )


def _essence_of_fetches(world: World, place: Mapping[Request, int]) -> Hashable:
    if world.store is None:
        return ()
    of_ticket = {result.ticket: result for result in world.store.results}
    unwanted = of_ticket.keys() - world.connector._fetches._in_flight
    must_fail = world.connector._must_fail
    results = {
        ticket: (len(result.blocks), must_fail and Cause.ERROR in result.causes.values())
        for ticket, result in of_ticket.items()
        if ticket not in unwanted
    }
    fetches = _fetches(world)
    now = world.store.now
    deadlines = sorted({fetch.give_up_time for fetch in fetches if fetch.give_up_time > now})
    return (
        frozenset(
            (
                fetch.first_block,
                fetch.hashes if is_flying else fetch.hashes[: len(fetch.blocks)],
                frozenset(place.get(who) for who in fetch.members),
                *(is_flying, is_late),
                deadlines.index(fetch.give_up_time) if is_flying and not is_late else None,
                results.get(fetch.ticket),
            )
            for fetch in fetches
            for is_flying, is_late in [_progress_of_fetch(world, fetch)]
        ),
        frozenset((place.get(who), r) for who, r in world.connector._fetches._asked.items()),
        bool(unwanted),
        world.store.cancelled is not None,
    )


def _progress_of_fetch(world: World, fetch: Fetch[Request]) -> tuple[bool, bool]:
    """Whether it is in flight, and whether its time is up meanwhile."""
    assert world.store is not None, "a fetch without tiers"
    is_flying = fetch.ticket in world.connector._fetches._in_flight
    return is_flying, is_flying and fetch.give_up_time <= world.store.now


def _wanted_hashes(world: World) -> frozenset[BlockHash]:
    numbers = (*world.left_to_ask, *(int(request.request_id) for request in world.requests))
    return frozenset().union(*(world.asked[number].chain for number in numbers))


def _wanted_adapters(world: World) -> set[bytes]:
    """The digests of the adapters that are yet asked for."""
    numbers = (*world.left_to_ask, *(int(request.request_id) for request in world.requests))
    refs = [world.asked[number].adapter for number in numbers]
    return {ref.digest for ref in refs if ref is not BASE_MODEL}
