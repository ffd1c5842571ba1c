"""What a trace must come to: the answer of each request, and what is counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lora_serve.identity import BASE_MODEL, AdapterRef, NoAdapter
from lora_serve.messages import EngineOutput
from lora_serve.step import TokenLogprobs


@dataclass
class Expected:
    """The answer that a request must get."""

    answer: list[int]
    digest: bytes  # of the adapter; b"" for the base model's answer
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    pooled: bytes = b""
    may_fail: bool = False  # its grammar and its rules may leave no token in common
    is_aborted: bool = False

    def is_met_by(self, outputs: Sequence[EngineOutput]) -> bool:
        """Whether this is the answer, or the beginning of it where the request was aborted."""
        answer = [token_id for output in outputs for token_id in output.new_token_ids]
        scored = [one for output in outputs for one in output.prompt_logprobs]
        pooled = b"".join(output.pooled for output in outputs)
        digests = {_digest_of(output.adapter) for output in outputs if output.error is None}
        begins_right = (
            answer == self.answer[: len(answer)]
            and scored == self.prompt_logprobs[: len(scored)]
            and digests <= {self.digest}
        )
        if self.is_aborted:
            return begins_right and pooled in (b"", self.pooled)
        ends_unread = self.may_fail and not answer  # without its prompt computed
        has_all_scores = ends_unread or len(scored) == len(self.prompt_logprobs)
        return begins_right and answer == self.answer and pooled == self.pooled and has_all_scores


@dataclass
class TraceResult:
    """The outcome of a trace. `wrong` names the requests that got another answer."""

    num_requests: int = 0
    num_hit_tokens: int = 0
    num_preemptions: int = 0
    num_evictions: int = 0
    num_lost: int = 0
    num_timeouts: int = 0
    num_late_reads: int = 0
    num_pauses: int = 0
    num_given_way: int = 0
    wrong: list[str] = field(default_factory=list)


def _digest_of(adapter: AdapterRef | NoAdapter) -> bytes:
    return b"" if adapter is BASE_MODEL else adapter.digest
