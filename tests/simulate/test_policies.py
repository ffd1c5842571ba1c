from __future__ import annotations

from random import Random

from lora_serve.bench.workload import TimedRequest
from lora_serve.simulate.policies import LeastLoaded, RoundRobin

REQUEST = TimedRequest((1,), 1)


def test_round_robin_goes_through_all_replicas_in_turn() -> None:
    policy = RoundRobin(3)
    assert [policy.choose(REQUEST) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_least_loaded_takes_the_fewest_and_of_several_the_longest_unused() -> None:
    policy, random = LeastLoaded(5), Random(0)
    loads, used = [0] * 5, [0] * 5
    for now in range(1, 500):
        busy = [replica for replica in range(5) if loads[replica]]
        if busy and random.random() < 0.45:
            replica = random.choice(busy)
            policy.ended(replica, REQUEST)
            loads[replica] -= 1
        else:
            replica = policy.choose(REQUEST)
            assert replica == min(range(5), key=lambda r: (loads[r], used[r]))
            loads[replica] += 1
        used[replica] = now
