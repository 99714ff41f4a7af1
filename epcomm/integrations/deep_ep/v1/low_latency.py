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

    ranks: Ranks
    num_tokens: int
    # L, W * M, H.
    slab_shape: tuple[int, int, int]

    def keep(self, ranks: Ranks, num_tokens: int, sizes: Sizes) -> None:
        """Keep what a combine must have: the ranks, T, and the sizes of the slabs."""
        self.ranks, self.num_tokens = ranks, num_tokens
        self.slab_shape = (sizes.num_local, sizes.capacity, self[3])

    @abstractmethod
    def begin_combine(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor | None
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


def handle_of(handle: object, ranks: Ranks) -> LowLatencyHandle | None:
    """Return a handle as low_latency_dispatch() of these ranks made it, or None if it did not."""
    if isinstance(handle, LowLatencyHandle) and handle.ranks is ranks:
        return handle
    return None


def handle_error(handle: object, function: str, ranks: Ranks) -> HandleError:
    """Return the error for a handle that low_latency_dispatch() of these ranks did not make."""
    return HandleError(
        f"{function}: handle is {type(handle).__name__}, expected what low_latency_dispatch() of "
        f"this Buffer returned ({ranks.where}); pass the handle as it was returned"
    )
