"""The interface of everything that can dispatch, group and combine.

The boundaries are the same for all: dispatch starts from (x, topk_ids, topk_weights) and ends when
the rows have arrived; after group() the rows of an expert are neighbours, as a grouped GEMM reads
them. combine starts from unweighted results, a row for each (token, expert), and ends with y.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from epcomm.buffers.traffic import BufferTraffic
from epcomm.testing.data import RankBatch

DispatchedT = TypeVar("DispatchedT")

# Counts and ids are int64.
INT_BYTES = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class Grouped:
    """The rows that a grouped GEMM reads.

    rows: [C, H]; rows of one expert are neighbours, and rows past the counts are undefined.
    num_rows_per_expert: [L], number of rows of each expert.
    first_row: [L], the first row of each expert.
    """

    rows: Tensor
    num_rows_per_expert: Tensor
    first_row: Tensor

    def runs(self) -> list[range]:
        """Return the rows of each local expert, as positions in `rows`. Host sync: yes."""
        starts, counts = self.first_row.tolist(), self.num_rows_per_expert.tolist()
        return [range(start, start + n) for start, n in zip(starts, counts, strict=True)]


class Contender(ABC, Generic[DispatchedT]):
    """A method to send tokens to their experts and return results. Every call is collective.

    name: of the contender in results.   mode: of epcomm; empty for plain torch.
    backend: of epcomm, or the name of the plain torch contender.
    num_roundings: how often a sum is cast to the dtype of the hidden states before it is y.
    row_error: the largest error of a received element, as a share of the largest of its row.
    is_capturable: calls may be captured in a device graph.
    """

    name: str
    backend: str
    num_roundings: int
    mode: str = ""
    row_error: float = 0.0
    is_capturable: bool = False

    @abstractmethod
    def dispatch(self, batch: RankBatch) -> DispatchedT:
        """Send the rows of `batch` to the ranks that own their experts."""

    @abstractmethod
    def group(self, dispatched: DispatchedT) -> Grouped:
        """Put the received rows in expert order, as hidden states. Local."""

    @abstractmethod
    def combine(self, results: Tensor, dispatched: DispatchedT) -> Tensor:
        """Weight and sum the results of all experts: y [T, H]; results are [C, H]."""

    def check(self) -> None:
        """Raise the faults that are still on the device. Host sync: yes."""

    @abstractmethod
    def sent_bytes(self, batch: RankBatch) -> BufferTraffic:
        """Return the bytes that this rank sends to others in one call. Makes the call."""
