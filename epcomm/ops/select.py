"""Choose, by type of device, whether kernels of ours or plain torch move and sum rows.

This is the one place that decides it. Results are the same: moved rows bit by bit, and sums in the
same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from epcomm.errors import BackendUnavailable
from epcomm.records import SlotIndex

# Elements, scales, ids and weights of tokens or of rows; what is None does not travel.
TokenParts = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


class RowOps(Protocol):
    """The operations on rows that have kernels."""

    def gather_rows(self, rows: Tensor, row_of_slot: Tensor) -> Tensor:
        """Return the row of each slot, [C, H], zeros for -1."""
        ...

    def sum_members(self, rows: Tensor, table: Tensor, weights: Tensor | None) -> Tensor:
        """Return the sums of the rows that each line of a table names: [targets, H]."""
        ...

    def sum_parts(self, parts: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sums over the first dimension of [W, T, H]."""
        ...

    def index_slots(
        self,
        ids: Tensor,
        weights: Tensor | None,
        counts: Tensor,
        size: Sequence[int] | int,
        *,
        first_expert: int,
        expert_alignment: int,
    ) -> tuple[SlotIndex, Tensor]:
        """Return the expert-major index over received rows, and the weight of each slot.

        Without weights, those of the slots have no elements. `size`: the counts on the host, or
        the number of slots where these are not known.
        """
        ...

    def row_topk(
        self, slots_of_row: Tensor, first_slot: Tensor, slot_weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the local expert and the weight of each entry of each row, [R, K]."""
        ...

    def write_token_layout(
        self, topk_ids: Tensor, per_rank: Tensor, per_expert: Tensor, is_in_rank: Tensor
    ) -> None:
        """Write the tokens of each rank and expert, and which token goes to which rank."""
        ...

    def count_sends(
        self,
        topk_ids: Tensor,
        header: Tensor,
        rest: Tensor,
        words: tuple[int, ...],
        *,
        wrong_ids: int,
        num_local: int,
    ) -> None:
        """Write the headers of a dispatch with the rows and slots for each rank."""
        ...

    def order_sends(
        self, topk_ids: Tensor, header: Tensor, *, rows_at: int, num_local: int
    ) -> tuple[Tensor, Tensor]:
        """Return the rows that carry each token to each rank, [T, W], and each entry, [T, K]."""
        ...

    def scatter_tokens(self, tokens: TokenParts, row_of_rank: Tensor, rows: TokenParts) -> None:
        """Copy each token to its rows."""
        ...

    def start_read(self, tensor: Tensor) -> Callable[[], list]:
        """Begin to read a tensor on the host; what is launched later runs meanwhile."""
        ...


@cache
def _load_triton() -> RowOps:
    try:
        from epcomm.ops.with_triton import TritonRowOps
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise BackendUnavailable(
            "row_ops_of: triton is not installed, expected it for tensors on cuda; install triton, "
            "which comes with torch for CUDA and ROCm"
        ) from error
    return TritonRowOps()


# A device type that is not listed has no kernels here and takes plain torch.
_LOADERS: dict[str, Callable[[], RowOps]] = {"cuda": _load_triton}


def row_ops_of(device: torch.device) -> RowOps | None:
    """Return the kernels for tensors on `device`, or None where plain torch serves.

    Raises:
        BackendUnavailable: Triton is missing, which the kernels for CUDA need.
    """
    loader = _LOADERS.get(device.type)
    return None if loader is None else loader()


def row_ops_for(tensor: Tensor) -> RowOps | None:
    """Return the kernels for one tensor.

    Plain torch serves a tensor without data (FakeTensor), and one whose history autograd keeps.
    """
    if tensor.device.type not in _LOADERS or type(tensor) not in _WITH_DATA:
        return None
    if tensor.requires_grad and torch.is_grad_enabled():
        return None
    return row_ops_of(tensor.device)


def can_read(tensor: Tensor) -> bool:
    """Return whether the host reads a tensor without a host sync: it has data, and on a CPU."""
    return tensor.device.type == "cpu" and type(tensor) in _WITH_DATA


_WITH_DATA = (Tensor, torch.nn.Parameter)
