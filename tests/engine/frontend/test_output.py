from __future__ import annotations

import math
from array import array

from msgspec.structs import replace

from lora_serve.engine.frontend.output import OutputProcessor
from lora_serve.errors import LoraServeError, RequestAbortedError, RequestFailedError
from lora_serve.generate_request import GenerateRequest
from lora_serve.messages import EngineOutput, EngineRequest
from lora_serve.outputs import OutputDelta
from lora_serve.pooling import PoolingParams
from lora_serve.prompts import TokensPrompt
from lora_serve.sampling_params import PROMPT_ONLY, SamplingParams
from lora_serve.step import TokenLogprobs
from tests.fakes.tokenizer import ByteTokenizer

REQUEST = EngineRequest(
    GenerateRequest(
        request_id="r",
        prompt=TokensPrompt(tuple(b"abcdef")),
        params=SamplingParams(prompt_logprobs=0, seed=0),
    )
)
SECOND_TO_LAST = tuple(TokenLogprobs(token_id, -1.0, 1) for token_id in b"bcdef")


def told(*outputs: EngineOutput) -> list[OutputDelta]:
    processor = OutputProcessor(ByteTokenizer())
    processor.add(REQUEST)
    deltas = [processor.process(output)[0] for output in outputs]
    return [delta for delta in deltas if isinstance(delta, OutputDelta)]


def test_logprobs_of_a_prompt_that_was_computed_in_chunks_come_with_the_first_token() -> None:
    first, second = told(
        EngineOutput("r", prompt_logprobs=SECOND_TO_LAST[:1]),
        EngineOutput("r", prompt_logprobs=SECOND_TO_LAST[1:4]),
        EngineOutput("r", tuple(b"g"), prompt_logprobs=SECOND_TO_LAST[4:]),
        EngineOutput("r", tuple(b"h"), finish_reason="length"),
    )
    assert first.text == "g"
    assert first.prompt_logprobs == SECOND_TO_LAST
    assert second.prompt_logprobs == ()


def test_the_last_delta_says_when_the_answer_came_and_went() -> None:
    first, second = told(
        EngineOutput("r", tuple(b"g"), scheduled_time=5.0),
        EngineOutput("r", tuple(b"h"), finish_reason="length", scheduled_time=5.0),
    )
    assert first.times is None
    assert second.times is not None
    assert (second.times.arrival, second.times.scheduled) == (REQUEST.arrival_time, 5.0)
    assert 0 < second.times.first_token <= second.times.last_token


def test_they_come_with_the_end_of_a_request_for_no_tokens() -> None:
    (only,) = told(
        EngineOutput("r", prompt_logprobs=SECOND_TO_LAST[:3]),
        EngineOutput("r", prompt_logprobs=SECOND_TO_LAST[3:], finish_reason="length"),
    )
    assert only.prompt_logprobs == SECOND_TO_LAST
    assert only.finish_reason == "length"


def embedded(*outputs: EngineOutput) -> list[OutputDelta | LoraServeError | None]:
    """What is told of a request for an embedding."""
    params = replace(PROMPT_ONLY, seed=0)
    asked = replace(REQUEST.request, params=params, pooling=PoolingParams())
    processor = OutputProcessor(ByteTokenizer())
    processor.add(replace(REQUEST, request=asked))
    told = [processor.process(output)[0] for output in outputs]
    assert processor.num_unfinished == 0
    return told


def test_an_embedding_is_told_with_the_end_of_its_prompt() -> None:
    pooled = array("f", (3.0, 4.0)).tobytes()
    (delta,) = embedded(EngineOutput("r", pooled=pooled, finish_reason="stop"))
    assert isinstance(delta, OutputDelta)
    assert array("f", delta.embedding) == array("f", (0.6, 0.8))
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("", (), "stop")


def test_a_request_without_an_embedding_fails_and_says_why() -> None:
    (aborted,) = embedded(EngineOutput("r", finish_reason="abort"))
    assert isinstance(aborted, RequestAbortedError)
    pooled = array("f", (math.nan, 1.0)).tobytes()
    (broken,) = embedded(EngineOutput("r", pooled=pooled, finish_reason="stop"))
    assert isinstance(broken, RequestFailedError)


def test_tokens_that_a_step_drew_behind_a_stop_string_are_not_told() -> None:
    processor = OutputProcessor(ByteTokenizer())
    params = SamplingParams(stop=("no",), seed=0, logprobs=0)
    processor.add(replace(REQUEST, request=replace(REQUEST.request, params=params)))
    logprobs = tuple(TokenLogprobs(token_id, -1.0, 1) for token_id in b"n, nothing")
    processor.process(EngineOutput("r", tuple(b"n,"), logprobs=logprobs[:2]))
    behind = EngineOutput(
        "r",
        tuple(b" nothing"),
        logprobs=logprobs[2:],
        num_accepted_drafts=7,
        num_rejected_drafts=2,
    )
    delta, must_abort = processor.process(behind)
    assert isinstance(delta, OutputDelta)
    assert must_abort
    assert (delta.text, bytes(delta.token_ids)) == (" ", b" no")
    assert [one.token_id for one in delta.logprobs] == list(b" no")
    assert delta.finish_reason == "stop"
    # " no" are the drafts that the answer has; "thin" were accepted, and are not in it.
    assert (delta.num_accepted_drafts, delta.num_rejected_drafts) == (3, 6)
