"""The messages that tell the API process what a step gave."""

from __future__ import annotations

from lora_serve.engine_stats import RequestTimes
from lora_serve.messages import CallReply, EngineOutput, EngineReply, StepOutputs
from lora_serve.scheduler.progress import RequestProgress
from lora_serve.scheduler.request import Request


class OutputBuffer:
    """Collects replies between two `take`s; all outputs leave as one message."""

    def __init__(self) -> None:
        self._replies: list[EngineReply] = []
        self._outputs: list[EngineOutput] = []
        self._finished: list[RequestTimes] = []
        self._step_num_tokens: list[int] = []

    def reply(self, reply: CallReply) -> None:
        self._replies.append(reply)

    def output(self, output: EngineOutput) -> None:
        self._outputs.append(output)

    def finished(self, times: RequestTimes) -> None:
        self._finished.append(times)

    def count_step(self, num_tokens: int) -> None:
        self._step_num_tokens.append(num_tokens)

    def take(self) -> list[EngineReply]:
        replies = self._replies
        if self._outputs or self._finished or self._step_num_tokens:
            replies.append(
                StepOutputs(
                    tuple(self._outputs),
                    tuple(self._finished),
                    step_num_tokens=sum(self._step_num_tokens),
                )
            )
        self._replies, self._outputs, self._finished = [], [], []
        self._step_num_tokens = []
        return replies


def progress_output(progress: RequestProgress) -> EngineOutput:
    request = progress.request
    return EngineOutput(
        request_id=request.request_id,
        new_token_ids=progress.new_token_ids,
        logprobs=progress.logprobs,
        prompt_logprobs=progress.prompt_logprobs,
        pooled=progress.pooled,
        finish_reason=progress.finish_reason,
        stop_token_id=progress.stop_token_id,
        num_cached_tokens=request.num_cached_tokens,
        num_cached_by_tier=request.num_cached_by_tier,
        adapter=request.namespace.adapter,
        scheduled_time=request.scheduled_time,
        num_accepted_drafts=progress.num_accepted_drafts,
        num_rejected_drafts=progress.num_rejected_drafts,
    )


def request_times(request: Request, finish_reason: str, now: float) -> RequestTimes:
    return RequestTimes(
        request_id=request.request_id,
        lora_name=request.lora_name,
        finish_reason=finish_reason,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        num_queried_tokens=request.num_queried_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        max_tokens=request.max_tokens,
        arrival=request.arrival_time,
        scheduled=request.scheduled_time,
        first_token=request.first_token_time,
        finished=now,
    )
