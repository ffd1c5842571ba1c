"""Workers do what they are asked in its order, and share the cores so that none stands idle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

import pytest

from lora_serve.simulate.cores import Cores, Worker
from lora_serve.simulate.events import EventQueue

SLICE = 1e-3


@dataclass(frozen=True)
class Trace:
    """What is asked of workers: (when, which worker, seconds), in the order of the times."""

    num_cores: float
    num_threads: tuple[float, ...]
    asked: tuple[tuple[float, int, float], ...]

    @classmethod
    def draw(cls, seed: int) -> Trace:
        random = Random(seed)
        num_threads = tuple(random.choice((0.5, 1.0, 2.0)) for _ in range(random.randint(1, 4)))
        times = sorted(random.choice((0.0, random.random(), 1.0)) for _ in range(25))
        return cls(
            random.choice((1, 2, 4)),
            num_threads,
            tuple(
                (when, random.randrange(len(num_threads)), random.choice((0.0, 0.2, 0.1)) or
                 0.1 * random.random())
                for when in times
            ),
        )  # fmt: skip


@dataclass
class Done:
    """The numbers of what each worker was asked, and when they ended."""

    order: list[list[int]]
    ends: dict[int, float] = field(default_factory=dict)
    busy_seconds: list[float] = field(default_factory=list)


def played(trace: Trace) -> Done:
    events = EventQueue()
    cores = Cores(trace.num_cores, events)
    workers = [cores.worker(number) for number in trace.num_threads]
    done = Done([[] for _ in workers])

    def end(number: int, worker: int) -> None:
        done.order[worker].append(number)
        done.ends[number] = events.now

    for number, (when, worker, seconds) in enumerate(trace.asked):
        ask = partial(workers[worker].do, seconds, partial(end, number, worker))
        events.at(when, ask)
    events.run()
    done.busy_seconds = [worker.busy_seconds for worker in workers]
    return done


def in_slices(trace: Trace) -> dict[int, float]:
    """When each ends, by another way: time goes on in small slices, all threads get equal parts."""
    waiting = [
        [(when, number, seconds) for number, (when, which, seconds) in enumerate(trace.asked)
         if which == worker]
        for worker in range(len(trace.num_threads))
    ]  # fmt: skip
    left, ends, now = {number: one[2] for number, one in enumerate(trace.asked)}, {}, 0.0
    while any(waiting):
        busy = [worker for worker, all_ in enumerate(waiting) if all_ and all_[0][0] <= now]
        threads = sum(trace.num_threads[worker] for worker in busy)
        now += SLICE
        for worker in busy:
            part = SLICE * min(1.0, trace.num_cores / threads)
            while part > 0 and waiting[worker] and waiting[worker][0][0] <= now:
                number = waiting[worker][0][1]
                done = min(part, left[number])
                left[number] -= done
                part -= done
                if left[number] > 0:
                    break
                ends[number] = now
                del waiting[worker][0]
    return ends


def assert_fair(trace: Trace) -> None:
    done = played(trace)
    assert len(done.ends) == len(trace.asked)
    for order in done.order:
        assert order == sorted(order), "first come, first served"
    for number, end in in_slices(trace).items():
        assert done.ends[number] == pytest.approx(end, abs=0.06), "not all cores are used, or more"


def assert_all_fair() -> None:
    for seed in range(20):
        assert_fair(Trace.draw(seed))


@pytest.mark.parametrize("seed", range(20))
def test_workers_keep_their_order_and_share_all_cores(seed: int) -> None:
    trace = Trace.draw(seed)
    assert_fair(trace)
    assert played(trace) == played(trace)


def lifo(worker: Worker, seconds: float, then: Callable[[], None]) -> None:
    """The fault: what comes last is done first."""
    real(worker, seconds, then)
    if len(worker.queue) > 2:
        worker.queue.insert(1, worker.queue.pop())


real = Worker.do


def test_a_worker_that_serves_the_last_first_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "do", lifo)
    with pytest.raises(AssertionError, match="first come"):
        assert_all_fair()


def test_workers_that_do_not_share_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: each works as if it had the machine for itself."""
    monkeypatch.setattr(Cores, "worker", lambda cores, threads=1.0: Worker(cores, 1e-9))
    with pytest.raises(AssertionError, match="not all cores are used"):
        assert_all_fair()


def test_a_worker_that_has_its_cores_alone_takes_what_was_asked() -> None:
    """Each begins when it was asked for and the one before has ended."""
    random, free, expected = Random(1), 0.0, []
    asked = sorted((random.random(), 0, 0.1 * random.random()) for _ in range(30))
    for when, _, seconds in asked:
        free = max(free, when) + seconds
        expected.append(free)
    done = played(Trace(2, (2.0,), tuple(asked)))
    assert list(done.ends.values()) == expected
    assert done.busy_seconds == pytest.approx([sum(seconds for _, _, seconds in asked)])


def test_two_threads_of_the_engine_and_one_of_another_process_get_two_thirds_of_a_core() -> None:
    done = played(Trace(2, (2.0, 1.0), ((0.0, 0, 1.0), (0.2, 1, 0.2))))
    # 0.2 s alone, then 0.3 s at two thirds while the other works, then the rest alone.
    assert done.ends[1] == pytest.approx(0.2 + 0.3)
    assert done.ends[0] == pytest.approx(0.5 + (1.0 - 0.2 - 0.2))


def test_what_takes_no_time_is_done_at_once_by_who_is_idle_and_in_its_turn_by_others() -> None:
    events, seen = EventQueue(), list[str]()
    worker = Cores(1, events).worker()
    worker.do(0.0, lambda: seen.append("at once"))
    assert seen == ["at once"]
    worker.do(1.0, lambda: seen.append("work"))
    worker.do(0.0, lambda: seen.append("behind it"))
    assert seen == ["at once"]
    events.run()
    assert seen == ["at once", "work", "behind it"]
    assert events.now == 1.0
