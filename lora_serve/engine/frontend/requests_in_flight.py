"""What is told of a request that is being answered: never its prompt, never its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lora_serve.generate_request import GenerateRequest
from lora_serve.messages import EngineRequest, RequestStanding


@dataclass(frozen=True, slots=True)
class RequestInFlight:
    """A request and how far its choices have come, together.

    arrival_time: on the monotonic clock. is_running: one of its choices has a part in the steps.
    num_computed_tokens, num_cached_tokens: as in RequestStanding.
    """

    request: GenerateRequest
    arrival_time: float
    is_running: bool
    num_computed_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


def request_in_flight(
    message: EngineRequest, standings: Mapping[str, RequestStanding]
) -> RequestInFlight:
    """Add up what the engine says of a request's choices; one that it does not have yet waits."""
    known = [standings[choice_id] for choice_id in message.choice_ids if choice_id in standings]
    return RequestInFlight(
        message.request,
        message.arrival_time,
        is_running=any(choice.is_running for choice in known),
        num_computed_tokens=sum(choice.num_computed_tokens for choice in known),
        num_cached_tokens=sum(choice.num_cached_tokens for choice in known),
        num_output_tokens=sum(choice.num_output_tokens for choice in known),
    )
