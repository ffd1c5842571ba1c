"""Which replica answers each route of the table."""

from __future__ import annotations

from collections.abc import Iterable

from lora_serve.fleet.spread import ASKED_OF_ALL, CHANGES_ADAPTERS, Spread, spread_of
from lora_serve.server.operation import Access, Operation
from lora_serve.server.routes import OPERATIONS

# Routes that any replica answers for all, and why. What generates is answered by one by its nature,
# and what every client may ask (health, the page, the documents) tells of no state but its own.
ONE_ANSWERS_FOR_ALL = {
    "/v1/completions/render": "the request says it all",
    "/v1/chat/completions/render": "the request says it all",
    "/tokenize": "the request says it all",
    "/detokenize": "the request says it all",
    "/v1/messages/count_tokens": "the request says it all",
    "/tokenizer_info": "all replicas have one model",
    "/server_info": "all replicas have one configuration",
    "/get_world_size": "all replicas have one configuration",
    "/v1/caller": "all replicas have the same keys",
    "/v1/models": "all replicas have the catalog's names",
    "/v1/models/{model}": "all replicas have the catalog's names",
    "/v1/loras": "all replicas have the catalog's names; where the weights are, each knows",
    "/v1/replicas": "the catalog knows all replicas",
    "/is_paused": "a pause is asked of all",
}


def unplaced(operations: Iterable[Operation]) -> list[str]:
    """The routes of which nobody has said whether one replica may answer them for all."""
    return [
        each.path
        for each in operations
        if not (each.generates or each.access is Access.OPEN)
        and spread_of(each.method.upper(), each.path, has_catalog=False) is Spread.ONE
        and each.path not in ONE_ANSWERS_FOR_ALL
    ]


def test_each_route_is_asked_of_all_replicas_or_one_may_answer_it_for_all() -> None:
    assert unplaced(OPERATIONS) == []
    assert not ONE_ANSWERS_FOR_ALL.keys() & ASKED_OF_ALL.keys()
    known = ONE_ANSWERS_FOR_ALL.keys() | ASKED_OF_ALL.keys()
    assert known <= {each.path for each in OPERATIONS}


def test_a_new_route_without_a_place_is_noticed() -> None:
    for method, access in (("get", Access.KEY), ("get", Access.ADMIN), ("post", Access.KEY)):
        new = Operation(method=method, path="/new", summary="New", access=access, answer=None)
        assert unplaced([*OPERATIONS, new]) == ["/new"]


def test_what_changes_the_server_is_asked_of_all_or_brought_by_the_catalog() -> None:
    by_catalog = ("lora", "adapter", "/v1/replicas/")
    assert all(any(word in path for word in by_catalog) for path in CHANGES_ADAPTERS)
