"""Give everything that can dispatch, group and combine one interface.

The boundaries are the same for all: dispatch starts from (x, topk_ids, topk_weights) and, with
group(), ends with contiguous runs of rows, one run an expert, ready for a grouped GEMM. combine
starts from unweighted expert results, one row a (token, expert) pair, and ends with y [T, H].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from benchmarks.alternatives import (
    AllGatherBatch,
    ExpertRowsBatch,
    Experts,
    combine_all_gather,
    combine_expert_rows,
    dispatch_all_gather,
    dispatch_expert_rows,
    group_all_gather,
    group_expert_rows,
)
from benchmarks.measuring.sent_bytes import SentBytes, all_gather_bytes, expert_rows_bytes
from epcomm import EPConfig, EPGroup, MoESpec, RowsDispatchOutput, TopKOutput, plan
from epcomm.config import Mode
from epcomm.dispatchers import (
    DeepEPLowLatencyDispatcher,
    DeepEPNormalDispatcher,
    StandardDispatcher,
)
from epcomm.dispatchers.dispatcher import RowsDispatcher
from epcomm.ops.pack import pack
from epcomm.testing.data import RankBatch
from epcomm.types import RowsPer, WeightsAppliedBy

DispatchedT = TypeVar("DispatchedT")

_DISPATCHERS: dict[Mode, type[RowsDispatcher]] = {
    Mode.NORMAL: DeepEPNormalDispatcher,
    Mode.LOW_LATENCY: DeepEPLowLatencyDispatcher,
    Mode.STANDARD: StandardDispatcher,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Grouped:
    """The rows that a grouped GEMM reads.

    rows: [C, H]; rows of one expert are neighbours, and rows past the counts are undefined.
    num_rows_per_expert: [L], number of rows of each expert.
    """

    rows: Tensor
    num_rows_per_expert: Tensor


class Contender(ABC, Generic[DispatchedT]):
    """One way to move tokens to their experts and results back. Every call is collective."""

    name: ClassVar[str]

    @property
    @abstractmethod
    def num_roundings(self) -> int:
        """Return how often a sum is cast to the dtype of the hidden states before it is y."""

    @abstractmethod
    def dispatch(self, batch: RankBatch) -> DispatchedT:
        """Send the rows of `batch` to the ranks that own their experts."""

    @abstractmethod
    def group(self, dispatched: DispatchedT) -> Grouped:
        """Put the received rows in expert order. Local."""

    @abstractmethod
    def combine(self, results: Tensor, dispatched: DispatchedT) -> Tensor:
        """Weight and sum the results of all experts: y [T, H]; results are [C, H]."""

    @abstractmethod
    def sent_bytes(self, batch: RankBatch) -> SentBytes:
        """Bytes that this rank sends to others in one call. Makes the call."""


class Epcomm(Contender[RowsDispatchOutput]):
    """A dispatcher of epcomm.

    combine applies the router weights, as it does for the alternatives. For training epcomm leaves
    them to the runner, which scales I columns instead of H, and its combine has less to do.
    """

    name: ClassVar[str] = "epcomm"

    def __init__(self, group: EPGroup, spec: MoESpec, config: EPConfig) -> None:
        """Plan and open the buffer. Collective: yes."""
        mode = Mode(config.mode)
        chosen = plan(config, spec, group).prefill
        chosen = replace(chosen, weights_applied_by=WeightsAppliedBy.COMBINE)
        self.plan = chosen
        self._world_size = group.world_size
        self._dispatcher = _DISPATCHERS[mode](group, spec, config, chosen=chosen)

    @property
    def num_roundings(self) -> int:
        # The sum of a (token, rank) before it travels, and y.
        return 2

    def dispatch(self, batch: RankBatch) -> RowsDispatchOutput:
        topk = TopKOutput(topk_ids=batch.topk_ids, topk_weights=batch.topk_weights)
        return self._dispatcher.dispatch(batch.x, topk)

    def group(self, dispatched: RowsDispatchOutput) -> Grouped:
        rows = pack(dispatched.hidden_states.data, dispatched.index)
        return Grouped(rows=rows, num_rows_per_expert=dispatched.num_tokens_per_expert)

    def combine(self, results: Tensor, dispatched: RowsDispatchOutput) -> Tensor:
        return self._dispatcher.combine(dispatched.combine_input(results, rows_per=RowsPer.SLOT))

    def sent_bytes(self, batch: RankBatch) -> SentBytes:
        before = self._dispatcher.traffic()
        dispatched = self.dispatch(batch)
        self.combine(self.group(dispatched).rows.contiguous(), dispatched)
        after = self._dispatcher.traffic()
        return SentBytes(
            dispatch=after.dispatch_bytes - before.dispatch_bytes,
            combine=after.combine_bytes - before.combine_bytes,
            control=after.control_bytes - before.control_bytes,
        )


class ExpertRows(Contender[ExpertRowsBatch]):
    """The usual alternative: a row for each (token, expert) over all_to_all_single."""

    name: ClassVar[str] = "expert_rows"

    def __init__(self, experts: Experts) -> None:
        """Keep who owns the experts."""
        self._experts = experts

    @property
    def num_roundings(self) -> int:
        return 1

    def dispatch(self, batch: RankBatch) -> ExpertRowsBatch:
        return dispatch_expert_rows(batch.x, batch.topk_ids, batch.topk_weights, self._experts)

    def group(self, dispatched: ExpertRowsBatch) -> Grouped:
        return Grouped(
            rows=group_expert_rows(dispatched),
            num_rows_per_expert=dispatched.num_rows_per_expert,
        )

    def combine(self, results: Tensor, dispatched: ExpertRowsBatch) -> Tensor:
        return combine_expert_rows(results, dispatched)

    def sent_bytes(self, batch: RankBatch) -> SentBytes:
        dispatched = self.dispatch(batch)
        return expert_rows_bytes(
            self._experts.rank,
            send_splits=dispatched.send_splits,
            recv_splits=dispatched.recv_splits,
            num_local=self._experts.num_local,
            row_bytes=batch.x.shape[1] * batch.x.element_size(),
        )


class AllGather(Contender[AllGatherBatch]):
    """All tokens to all ranks, and a reduce-scatter home."""

    name: ClassVar[str] = "all_gather"

    def __init__(self, experts: Experts) -> None:
        """Keep who owns the experts."""
        self._experts = experts

    @property
    def num_roundings(self) -> int:
        # One a rank, and one for each addition of the reduce-scatter.
        return self._experts.world_size

    def dispatch(self, batch: RankBatch) -> AllGatherBatch:
        return dispatch_all_gather(batch.x, batch.topk_ids, batch.topk_weights, self._experts)

    def group(self, dispatched: AllGatherBatch) -> Grouped:
        return Grouped(
            rows=group_all_gather(dispatched),
            num_rows_per_expert=dispatched.num_rows_per_expert,
        )

    def combine(self, results: Tensor, dispatched: AllGatherBatch) -> Tensor:
        return combine_all_gather(results, dispatched, self._experts)

    def sent_bytes(self, batch: RankBatch) -> SentBytes:
        world_size = self._experts.world_size
        return all_gather_bytes(
            world_size,
            max_tokens=self.dispatch(batch).rows.shape[0] // world_size,
            top_k=batch.topk_ids.shape[1],
            row_bytes=batch.x.shape[1] * batch.x.element_size(),
        )


ALTERNATIVES: dict[str, Callable[[Experts], Contender]] = {
    ExpertRows.name: ExpertRows,
    AllGather.name: AllGather,
}


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name: bf16, fp16 or fp32."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]
