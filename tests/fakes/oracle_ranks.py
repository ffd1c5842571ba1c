"""The oracle divided among ranks: threads of this process, with real links, steps and gathers.

Each rank keeps its share of the KV's bytes, as if these were heads, and computes its share of all
contents. So a rank that does anything else than the others shows in the tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from lora_serve.distributed.group import ROOT, Group, broadcast
from lora_serve.distributed.shares import HeadChannels, Heads, given, place_of
from lora_serve.errors import RankLostError
from lora_serve.fuzz.oracle.content import CONTENT_BYTES, UNWRITTEN
from lora_serve.fuzz.oracle.executor import ONE_GROUP, OracleExecutor, oracle_model
from lora_serve.fuzz.oracle.expected import TraceResult
from lora_serve.kv_groups import KVGroup
from lora_serve.model_info import ModelInfo
from lora_serve.step import ScheduledRequest
from lora_serve.worker.rank_executor import RankExecutor
from lora_serve.worker.rank_server import RankLinks, serve_rank
from lora_serve.worker.rank_shares import KVShares
from tests.fakes.ranks import start_threads

HEADS = Heads(8, 4)


class OracleRank(OracleExecutor):
    """One rank of the oracle, in the place of a Worker."""

    linears = ()
    is_screened = False
    vocabulary = None

    def __init__(
        self, group: Group, block_size: int, row_bytes: int, groups: Sequence[KVGroup]
    ) -> None:
        super().__init__(block_size, row_bytes, groups)
        self._group = group
        self._place = place_of(group)
        self._share = HeadChannels(HEADS, CONTENT_BYTES // HEADS.num_kv_heads, are_kv=True)
        self.kv_shares = KVShares(HEADS.num_kv_heads, self._share.head_size)
        self._unwritten = self._own(UNWRITTEN)

    def load(self) -> ModelInfo:
        return oracle_model(0)

    def discard_adapter(self, digest: bytes) -> None:
        self._prepared.remove(digest)

    def has_ended(self) -> bool:
        """What it is asked for is done at once."""
        return True

    def close(self) -> None:
        self._group.close()

    def _own(self, contents: bytes) -> bytes:
        rows = np.frombuffer(contents, np.uint8).reshape(-1, CONTENT_BYTES)
        share = self._share.share(self._place)
        return rows[:, share.start : share.stop].tobytes()

    def _whole(self, parts: list[bytes]) -> list[bytes]:
        """Gather even nothing, so that ranks that go other ways still meet."""
        gives = [len(given(self._share, place)) for place in self._place.all()]
        num_own, num_given = len(self._share.share(self._place)), gives[self._group.rank]
        data = np.frombuffer(b"".join(parts), np.uint8).reshape(-1, num_own)
        whole = torch.empty(len(data), CONTENT_BYTES, dtype=torch.uint8)
        own = data[:, num_own - num_given :]
        self._group.gather(torch.from_numpy(own.copy()), gives, whole)
        num_rows, joined = len(data) // max(1, len(parts)), whole.numpy().tobytes()
        size = num_rows * CONTENT_BYTES
        return [joined[i * size : (i + 1) * size] for i in range(len(parts))]

    def _token_ids(self, request: ScheduledRequest) -> Sequence[int]:
        token_ids = super()._token_ids(request)
        if request.token_from is None:
            return token_ids
        return [int(id) for id in broadcast(self._group, torch.tensor(list(token_ids)))]


class DividedOracle(OracleExecutor):
    """All ranks as one executor. close: ends the threads."""

    def __init__(
        self, ranks: RankExecutor, root: OracleRank, block_size: int, row_bytes: int, groups: Any
    ) -> None:
        super().__init__(block_size, row_bytes, groups)
        self._ranks = ranks
        self.steps = root.steps
        self.prepare_adapter = ranks.prepare_adapter  # type: ignore[method-assign]
        self.submit = ranks.submit  # type: ignore[method-assign]
        self.collect = ranks.collect  # type: ignore[method-assign]
        self.close = ranks.close  # type: ignore[method-assign]
        ranks.load()


class RankedOracles:
    """Makes executors in the place of OracleExecutor: the first of as many ranks as the seed says.

    Later ones, for engines that are started again, are of a number that is drawn.
    """

    def __init__(
        self, seed: int, sizes: Sequence[int] = (1, 2, 3, 4, 6), kind: type[OracleRank] = OracleRank
    ) -> None:
        self._rng = random.Random(f"ranks {seed}")
        self._sizes = sizes
        self._first_size = sizes[seed % len(sizes)]
        self._kind = kind
        self._made: list[OracleExecutor] = []
        self._faults: list[Exception] = []  # by which ranks behind the first have ended
        self.world_sizes: list[int] = []  # of those that were made

    def __call__(
        self, block_size: int, row_bytes: int = 8, groups: Sequence[KVGroup] = ONE_GROUP
    ) -> OracleExecutor:
        size = self._rng.choice(self._sizes) if self._made else self._first_size
        ranks = dict[int, OracleRank]()
        self.world_sizes.append(size)

        def make(group: Group) -> Any:
            ranks[group.rank] = self._kind(group, block_size, row_bytes, groups)
            return ranks[group.rank]

        executor = start_threads(size, make, self._serve)
        self._made.append(DividedOracle(executor, ranks[ROOT], block_size, row_bytes, groups))
        return self._made[-1]

    def close(self) -> None:
        for executor in self._made:
            executor.close()

    def is_wrong(self, run: Callable[[], TraceResult]) -> bool:
        """Whether a run over these executors gives a wrong answer, or breaks an invariant.

        Raises:
            Exception: what else has ended the run, or a rank of it. It says nothing of answers.
        """
        try:
            return bool(run().wrong)
        except AssertionError:
            return True
        except RankLostError as lost:
            self.close()
            fault = next(iter(self._faults), lost)
            if isinstance(fault, AssertionError):
                return True
            raise fault from lost

    def _serve(self, worker: Any, links: RankLinks) -> None:
        """Be a rank whose end, of whatever fault, the first one is told by its group."""
        try:
            serve_rank(worker, links)
        except RankLostError:
            raise  # of another rank's end
        except Exception as error:
            self._faults.append(error)
