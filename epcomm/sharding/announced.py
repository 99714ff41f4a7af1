"""Announce operations on expert parameters that communicate, as calls of their group.

`if rank == 0: log(parameter.norm())` is a call of one rank. Its header meets that of the next call
of the other ranks, so that all ranks raise HandleError with the names of both calls, before rows or
sums are sent, and the group is usable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from epcomm.sharding.shards import Owner

# Namespaces of the operators by which torch moves tensors between ranks.
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")


def announce(owner: Owner | None, func: OpOverload | str) -> None:
    """Announce an operation before it communicates, if the group is still alive."""
    group = None if owner is None else owner()
    if group is not None:
        name = func if isinstance(func, str) else func._schema.name.rpartition("::")[2]
        group.announce_operation(name.removeprefix("linalg_").strip("_"))


class Announcing(TorchDispatchMode):
    """A mode that announces an operation before its first exchange, and no local operation."""

    def __init__(self, owner: Owner | None, func: OpOverload) -> None:
        super().__init__()
        self._announce: Callable[[], None] | None = lambda: announce(owner, func)

    def __torch_dispatch__(  # type: ignore[override]
        self,
        func: OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        if func.namespace in _COLLECTIVES and self._announce is not None:
            first, self._announce = self._announce, None
            first()
        if any(each is not torch.Tensor and hasattr(each, "to_local") for each in types):
            # torch calls this mode again for the operators that compute a DTensor.
            return NotImplemented
        return func(*args, **(kwargs or {}))
