"""One NVIDIA GPU as a `Device`: pinned copies, a side stream for loads, CUDA graphs.

Steps run on torch's current stream, loads on a stream of their own. What a load leaves behind is
complete when its block ends, so a step may use it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch._meta_registrations  # (of `lean_torch`: what is launched on a GPU may ask them)
from torch import Tensor

from lora_serve.host_copies import HostArray, to_device

WARM_UP_RUNS = (
    2  # the first compiles kernels and makes cuBLAS's workspace, which cannot be recorded
)


# Waits until what it is given is true; raises if that may never be.
WaitUntil = Callable[[Callable[[], bool]], None]


class CudaDevice:
    """A CUDA device, which becomes the current one of the calling thread.

    index: None for the one that is. wait_until: waits for work that may never end, because ranks
    meet in it; None where there are none. load_until: the same while they load.
    """

    counts_memory = True
    is_asynchronous = True

    def __init__(
        self,
        index: int | None = None,
        wait_until: WaitUntil | None = None,
        load_until: WaitUntil | None = None,
    ) -> None:
        if index is not None:
            torch.cuda.set_device(index)
        self._wait_until = wait_until
        self._load_until = load_until
        self._event_until = wait_until  # what events wait by: load_until in steps while loading
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self.name = torch.cuda.get_device_name()
        self._loads = torch.cuda.Stream()
        self._graph_memory = torch.cuda.graph_pool_handle()

    def upload(self, host: Tensor) -> Tensor:
        return to_device(host, self.torch_device)

    def fill(self, target: Tensor, host: HostArray) -> None:
        target.copy_(torch.from_numpy(host).pin_memory(), non_blocking=True)

    @contextmanager
    def loading(self) -> Iterator[None]:
        with torch.cuda.stream(self._loads):
            yield
        self._loads.synchronize()

    def record_event(self) -> CudaEvent:
        return CudaEvent(self._event_until)

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()

    def peak_bytes(self, run: Callable[[], object]) -> int:
        self._finish()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self._event_until = self._load_until
        try:
            run()
        finally:
            self._event_until = self._wait_until
        self._finish()
        peak = torch.cuda.max_memory_allocated() - before
        torch.cuda.empty_cache()  # what this run took in odd sizes is the KV cache's to have
        return peak

    def record(self, run: Callable[[], Tensor]) -> CudaGraph:
        for _ in range(WARM_UP_RUNS):
            run()
        self._finish()
        graph = torch.cuda.CUDAGraph()
        # Loads of adapters go on meanwhile in their own thread, so only this one's calls count.
        with torch.cuda.graph(graph, pool=self._graph_memory, capture_error_mode="thread_local"):
            output = run()
        return CudaGraph(graph, output)

    def _finish(self) -> None:
        """Wait for all work while a model is loaded, of which that of steps may never end."""
        CudaEvent(self._load_until).wait()
        torch.cuda.synchronize()


class CudaEvent:
    def __init__(self, wait_until: WaitUntil | None = None) -> None:
        self._wait_until = wait_until
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> None:
        if self._wait_until is None:
            self._event.synchronize()
        else:
            self._wait_until(self._event.query)

    def is_done(self) -> bool:
        return self._event.query()


class CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        self._graph = graph
        self.output = output

    def replay(self) -> None:
        self._graph.replay()
