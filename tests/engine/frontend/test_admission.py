from __future__ import annotations

import pytest

from lora_serve.config import LimitsConfig
from lora_serve.engine.frontend.admission import MAX_RETRY_SECONDS, AdmissionControl, RequestGroup
from lora_serve.errors import InvalidRequestError, OverloadedError
from lora_serve.generate_request import GenerateRequest
from lora_serve.messages import EngineRequest
from lora_serve.prompts import TokensPrompt
from lora_serve.sampling_params import SamplingParams


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def request(request_id: str, num_tokens: int = 10, tenant: str = "", n: int = 1) -> EngineRequest:
    prompt, params = TokensPrompt((1,) * num_tokens), SamplingParams(n=n, seed=0)
    return EngineRequest(
        GenerateRequest(request_id=request_id, prompt=prompt, params=params, tenant=tenant)
    )


def control(
    clock: Clock | None = None, fair_share: str = "none", **limits: int
) -> AdmissionControl:
    clock = clock or Clock()
    return AdmissionControl(LimitsConfig(**limits), 2, fair_share=fair_share, clock=clock)


def num_taken(admission: AdmissionControl, tenant: str) -> int:
    """How many more of a tenant's requests are taken before the first is refused."""
    for number in range(100):
        try:
            admission.admit(request(f"{tenant}{number}", tenant=tenant))
        except OverloadedError:
            return number
    return 100


def fill(admission: AdmissionControl, count: int) -> None:
    for number in range(count):
        admission.admit(request(f"r{number}"))


def test_only_what_waits_beyond_max_num_seqs_counts_as_queued() -> None:
    admission = control(max_num_queued_reqs=3)
    fill(admission, 5)
    assert admission.num_queued == 3
    with pytest.raises(
        OverloadedError, match=r"requests queued: 3; 1 more would exceed the limit of 3 "
    ):
        admission.admit(request("late"))
    admission.note_gone("r0")
    admission.admit(request("later"))
    assert admission.num_refused == {"max_num_queued_reqs": 1, "max_num_queued_tokens": 0}


def test_choices_that_arrive_together_are_taken_together_or_not_at_all() -> None:
    admission = control(max_num_queued_reqs=1)
    fill(admission, 2)
    with pytest.raises(OverloadedError):
        admission.admit(request("a", n=2))
    assert admission.num_queued == 0
    admission.admit(request("a-0"))


def test_more_choices_than_can_ever_be_taken_are_no_matter_of_retrying() -> None:
    admission = control(max_num_queued_reqs=1)
    with pytest.raises(InvalidRequestError, match="4 answers at once, and at most 3 may"):
        admission.admit(request("a", n=4))
    assert admission.num_refused["max_num_queued_reqs"] == 0
    admission.admit(request("a", n=3))


def test_the_prompts_of_a_body_are_taken_together_or_not_at_all() -> None:
    admission = control(max_num_queued_reqs=2, max_num_queued_tokens=25)
    large = RequestGroup(num_requests=3, num_tokens=30)
    for number in range(3):  # more tokens than may be queued, but the server is free
        admission.admit(request(f"large-{number}"), large)
    small = RequestGroup(num_requests=2, num_tokens=2)
    for number in range(2):
        with pytest.raises(OverloadedError, match="2 more would exceed the limit of 2 "):
            admission.admit(request(f"small-{number}", 1), small)
    assert admission.num_refused == {"max_num_queued_reqs": 1, "max_num_queued_tokens": 0}
    assert admission.num_queued == 1


def test_the_room_of_a_bodys_prompts_is_kept_until_they_come_or_it_ends() -> None:
    admission = control(max_num_queued_reqs=2, max_num_queued_tokens=25)
    body = RequestGroup(num_requests=4, num_tokens=4)
    admission.admit(request("a-0", 1), body)
    assert admission.num_queued == 2
    with pytest.raises(OverloadedError, match="requests queued: 2; 1 more would exceed"):
        admission.admit(request("other", 1))
    admission.admit(request("a-1", 1), body)
    assert admission.num_queued == 2, "it is counted once"
    body.close()
    body.close()
    assert admission.num_queued == 0
    fill(admission, 2)
    assert admission.num_queued == 2


def test_a_body_of_too_many_prompts_is_no_matter_of_retrying() -> None:
    admission = control(max_num_queued_reqs=1)
    body = RequestGroup(num_requests=4, num_tokens=4)
    for number in range(4):
        with pytest.raises(InvalidRequestError, match="4 answers at once, and at most 3 may"):
            admission.admit(request(f"a-{number}", 1), body)
    assert admission.num_queued == 0


def test_with_fair_shares_a_flood_leaves_room_in_the_queue_for_others() -> None:
    admission = control(fair_share="key", max_num_queued_reqs=8)
    assert num_taken(admission, "flood") == 2 + 4  # two run; half of the queue is kept free
    with pytest.raises(OverloadedError, match="queued for this key: 4; the 4 that may still"):
        admission.admit(request("late", tenant="flood"))
    assert [num_taken(admission, tenant) for tenant in ("a", "b", "c")] == [2, 1, 1]
    with pytest.raises(OverloadedError, match="requests queued: 8; 1 more would exceed"):
        admission.admit(request("too late", tenant="d"))
    for number in range(6):
        admission.note_gone(f"flood{number}")
    assert num_taken(admission, "d") == 3  # 2 of the others' 4 are in the queue; 3 are left


def test_without_shares_a_flood_has_the_whole_queue() -> None:
    admission = control(max_num_queued_reqs=8)
    assert [num_taken(admission, tenant) for tenant in ("flood", "a")] == [2 + 8, 0]


def test_with_fair_shares_a_flood_leaves_room_for_others_prompt_tokens() -> None:
    admission = control(fair_share="key", max_num_queued_tokens=100)
    assert num_taken(admission, "flood") == 5
    with pytest.raises(OverloadedError, match="tokens queued for this key: 50; the 50 that"):
        admission.admit(request("late", tenant="flood"))
    assert num_taken(admission, "a") == 3  # of 30 in 50, and 20 are free


def test_prompts_count_by_their_tokens_until_their_first_output() -> None:
    admission = control(max_num_queued_tokens=25)
    fill(admission, 2)
    with pytest.raises(OverloadedError, match=r"prompt tokens queued: 20; 10 more"):
        admission.admit(request("late"))
    admission.note_output("r0")
    admission.note_output("r0")  # its second output changes nothing
    admission.admit(request("later"))
    with pytest.raises(OverloadedError, match=r"prompt tokens queued: 20; 10 more"):
        admission.admit(request("too late"))


def test_a_prompt_above_the_limit_is_taken_by_a_server_that_is_free() -> None:
    admission = control(max_num_queued_tokens=25)
    admission.admit(request("long", 1000))
    with pytest.raises(OverloadedError):
        admission.admit(request("late", 1))


def test_when_to_retry_follows_from_the_rate_at_which_requests_begin() -> None:
    clock = Clock()
    admission = control(clock, max_num_queued_reqs=8)
    fill(admission, 10)
    for number in range(4):  # one in two seconds
        clock.now += 2
        admission.note_output(f"r{number}")
    clock.now += 2
    with pytest.raises(OverloadedError) as refusal:
        admission.admit(request("late"))
    assert refusal.value.retry_after_seconds == 12  # six wait, at four in eight seconds
    clock.now += 10**6
    with pytest.raises(OverloadedError) as refusal:
        admission.admit(request("later"))
    assert refusal.value.retry_after_seconds == MAX_RETRY_SECONDS


def test_nothing_is_left_of_requests_that_are_gone() -> None:
    admission = control(max_num_queued_reqs=100, max_num_queued_tokens=500)
    fill(admission, 50)
    for number in range(50):
        if number % 2:
            admission.note_output(f"r{number}")
        admission.note_gone(f"r{number}")
        admission.note_gone(f"r{number}")
    assert admission.num_queued == 0
    fill(admission, 50)  # as much as waited before has room again


def test_a_queue_is_bounded_unless_it_is_said_that_it_need_not_be() -> None:
    admission, unbounded = control(), control(max_num_queued_reqs=-1, max_num_queued_tokens=-1)
    many = 2 + LimitsConfig().max_num_queued_reqs
    for number in range(many):
        admission.admit(request(f"r{number}", num_tokens=1))
        unbounded.admit(request(f"r{number}", num_tokens=1))
    with pytest.raises(OverloadedError, match="--max-num-queued-reqs"):
        admission.admit(request("one more"))
    unbounded.admit(request("one more"))


def test_prompts_that_wait_are_bounded_by_their_tokens() -> None:
    admission = control()
    half = LimitsConfig().max_num_queued_tokens // 2
    for number in range(2):
        admission.admit(request(f"r{number}", num_tokens=half))
    with pytest.raises(OverloadedError, match="--max-num-queued-tokens"):
        admission.admit(request("one more"))
