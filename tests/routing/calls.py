"""Counts all calls of the gating operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class GatingCalls(TorchDispatchMode):
    """While open, num_calls grows with each call that reaches the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        self.num_calls += func is torch.ops.npu.npu_moe_gating_top_k.default
        return func(*args, **(kwargs or {}))


@contextmanager
def expect_gating_calls(num_calls: int) -> Iterator[None]:
    """Check that the block calls the operator num_calls times."""
    with GatingCalls() as calls:
        yield
    assert calls.num_calls == num_calls
