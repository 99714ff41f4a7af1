"""Low latency of V1: what a call asks for, what it hands out, and which way rows take."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from epcomm.errors import EPError, HandleError
from epcomm.integrations.deep_ep.ranks import Ranks

# Receives what was sent, once.
Receive = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Wire:
    """The form of received rows: use_fp8, round_scale and use_ue8m0 of a call."""

    fp8: bool
    power_of_two: bool
    packed: bool


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a call: M, E and W."""

    max_tokens: int
    num_experts: int
    num_ranks: int

    @property
    def num_local(self) -> int:
        """The number of experts of a rank, L."""
        return self.num_experts // self.num_ranks

    @property
    def capacity(self) -> int:
        """The number of rows of a slab."""
        return self.num_ranks * self.max_tokens


class LowLatencyHandle(tuple[Tensor, Tensor, int, int, int]):
    """The tuple that V1 returns: src_info, layout_range, M, H, E.

    src_info [L, W * M], int32: the token at its source that each row is.
    layout_range [L, W], int64: first row of each source and, in the low half, how many.
    """

    num_tokens: int
    # L, W * M, H.
    slab_shape: tuple[int, int, int]

    def keep(self, num_tokens: int, sizes: Sizes) -> None:
        """Keep the sizes that a combine must have: T, and those of the slabs."""
        self.num_tokens = num_tokens
        self.slab_shape = (sizes.num_local, sizes.capacity, self[3])

    @abstractmethod
    def begin_combine(
        self,
        ranks: Ranks,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        out: Tensor | None,
    ) -> tuple[Tensor, Receive]:
        """Begin to return the rows of x [L, W * M, H]; what is returned beside y writes it."""

    @abstractmethod
    def refuse_combine(self, error: EPError) -> NoReturn:
        """Take part in the combine of the other ranks without rows, so that they hear of it.

        Raises:
            error: always.
        """
        raise error


@dataclass(frozen=True, kw_only=True, eq=False)
class Slabs:
    """The tensors that a dispatch hands out, written when it is received.

    x: [L, W * M, H].   scales: its scales, [L, W * M, S], column-major.   counts: [L], int32.
    """

    x: Tensor
    scales: Tensor | None
    counts: Tensor
    handle: LowLatencyHandle


def handle_of(handle: object, ranks: Ranks) -> LowLatencyHandle:
    """Return a handle as low_latency_dispatch() made it.

    Raises:
        HandleError: it did not.
    """
    if not isinstance(handle, LowLatencyHandle):
        raise HandleError(
            f"low_latency_combine: handle is {type(handle).__name__}, expected what "
            f"low_latency_dispatch() returned, as it was returned ({ranks.where}); keep the handle "
            "and pass it on"
        )
    return handle
