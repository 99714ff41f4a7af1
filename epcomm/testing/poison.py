"""Fill memory that nobody has written with NaN, so that reading it cannot go unnoticed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """While open, torch.empty and its kin return NaN (integers: the largest value).

    Raises:
        RuntimeError: this torch does not fill, so the suites would prove nothing.
    """
    mode = torch.get_deterministic_debug_mode()
    # The switch is an attribute that torch makes at run time, which type checkers cannot see.
    switch: Any = torch.utils.deterministic
    fills = switch.fill_uninitialized_memory
    # Not use_deterministic_algorithms: that imports the compiler, seconds in each process.
    torch.set_deterministic_debug_mode("warn")
    switch.fill_uninitialized_memory = True
    try:
        if not torch.zeros(1).new_empty(4).isnan().all():
            raise RuntimeError("poisoned_memory: torch.empty is not filled; check this torch")
        yield
    finally:
        switch.fill_uninitialized_memory = fills
        torch.set_deterministic_debug_mode(mode)


def poison_rows(rows: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """A copy of rows [N, ...] with NaN where keep [N] is False."""
    return rows.masked_fill(~keep.view(-1, *[1] * (rows.dim() - 1)), float("nan"))
