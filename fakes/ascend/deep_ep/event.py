"""Imitate events, which do nothing, because all work on Ascend is ordered by one stream."""

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
        """Do nothing, because results are complete when a call returns."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None


def no_hook() -> None:
    """The hook of low latency, which does nothing, because all rows are received."""
