"""Imitations for runs of `epcomm bench` on CPUs: device graphs, and contenders that are wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from epcomm.bench import layer, turns


def silent(tokens: int) -> None:
    """Show no progress."""


class Recorded:
    """An imitation of a device graph, which records a call and repeats it in every replay."""

    def __init__(self, call: Callable[[], object], *, warm_up: bool = True) -> None:
        for _ in range(1 + warm_up):
            call()
        self.replay = call


def imitate_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "captured", Recorded)
    for module in (turns, layer):
        monkeypatch.setattr(module, "has_graphs", lambda device: True)


def spoil(
    monkeypatch: pytest.MonkeyPatch, kind: type, name: str, when: Callable[[Any], bool]
) -> None:
    """Change one element of the results of a method, on rank 1, of the objects that are chosen."""
    right: Callable[..., Tensor] = getattr(kind, name)

    def wrong(self: object, *arguments: object) -> Tensor:
        y = right(self, *arguments)
        if dist.get_rank() == 1 and when(self):
            y[0, 0] += 1
        return y

    monkeypatch.setattr(kind, name, wrong)
