"""Imitate events, which do nothing: on Ascend all work is in the order of one stream."""

from __future__ import annotations

from typing import Self

from torch import Tensor


class EventOverlap:
    """The event that the real package returns for callers written for GPUs."""

    def __init__(
        self, event: object | None = None, extra_tensors: tuple[Tensor, ...] | None = None
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Nothing: results are there when a call returns."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None


def no_hook() -> None:
    """Do what the hook of low latency does: nothing is left to receive."""
