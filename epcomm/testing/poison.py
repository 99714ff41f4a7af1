"""Fill uninitialised memory with NaN, so that tests detect when it is read."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from epcomm.buffers.row_layout import Scratch


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill the memory of torch.empty and similar functions with NaN (integers: the largest value).

    Memory that buffers keep between calls is filled too, because rows of an earlier call could be
    mistaken for rows of this call.

    Raises:
        RuntimeError: this release of torch does not fill memory, so the suites would test nothing.
    """
    mode = torch.get_deterministic_debug_mode()
    # torch creates this attribute at run time, so type checkers do not know it.
    switch: Any = torch.utils.deterministic
    fills = switch.fill_uninitialized_memory
    # use_deterministic_algorithms() would import the compiler, which takes seconds.
    torch.set_deterministic_debug_mode("warn")
    switch.fill_uninitialized_memory = True
    kept_rows = Scratch.rows

    def poisoned_rows(self: Scratch, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        rows = kept_rows(self, num_rows, width, dtype)
        # All bits set is NaN in every floating dtype.
        rows.view(torch.uint8).fill_(0xFF)
        return rows

    Scratch.rows = poisoned_rows
    try:
        if not torch.empty(4, dtype=torch.float32, device="cpu").isnan().all():
            raise RuntimeError("poisoned_memory: torch.empty is not filled; check this torch")
        yield
    finally:
        Scratch.rows = kept_rows
        switch.fill_uninitialized_memory = fills
        torch.set_deterministic_debug_mode(mode)


def poison_rows(rows: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Return a copy of rows [N, ...] with NaN where keep [N] is False."""
    return rows.masked_fill(~keep.view(-1, *[1] * (rows.dim() - 1)), float("nan"))
