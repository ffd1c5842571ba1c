"""Records of a run that never happened, with figures that are easy to check by hand."""

from __future__ import annotations

from lora_serve.bench.client import RequestRecord
from lora_serve.bench.load import LoadResult
from lora_serve.bench.machine import Machine
from lora_serve.bench.report import Run
from lora_serve.bench.workload import WorkloadSpec

MACHINE = Machine("Some CPU", 2, 8.0, ("avx2",), "Linux 6", "3.11.7", {"torch": "2"}, "abc", 0.5)


def record(
    adapter: str | None = None, ttft: float = 0.1, gap: float = 0.02, error: str | None = None
) -> RequestRecord:
    """Ten prompt tokens, five of them cached; five tokens out; or an error."""
    if error:
        return RequestRecord(
            adapter=adapter, prompt_tokens=10, late_seconds=0.0, e2e_seconds=0.0, error=error
        )
    return RequestRecord(
        adapter=adapter,
        prompt_tokens=10,
        late_seconds=0.0,
        e2e_seconds=ttft + 4 * gap,
        ttft_seconds=ttft,
        gaps_seconds=(gap,) * 4,
        output_tokens=5,
        cached_tokens=5,
    )


def run_of(*records: RequestRecord) -> Run:
    return Run(
        title="bench serve",
        url="http://h:8000",
        model="base",
        workload=WorkloadSpec(request_rate=2.0),
        max_concurrency=4,
        machine=MACHINE,
        result=LoadResult(records, wall_seconds=2.0, client_cpu_seconds=0.1),
    )
