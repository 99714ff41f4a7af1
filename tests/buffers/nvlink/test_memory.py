"""Ranks without memory, in one process that plays what the others tell."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import cast

import pytest
import torch

pytest.importorskip("triton")
from epcomm.buffers.nvlink import base as nvlink_host
from epcomm.buffers.nvlink.memory import SymmetricMemory, agree_on_memory
from epcomm.buffers.nvlink.normal import NVLinkBuffer
from epcomm.collectives.base import Collectives, Scalar
from epcomm.errors import BackendUnavailable
from epcomm.kernels import launch
from epcomm.spec import BufferSpec
from epcomm.types import WireFormat

BF16 = WireFormat.of(torch.bfloat16)
SPEC = BufferSpec(
    hidden_size=8,
    top_k=1,
    num_local_experts=1,
    dispatch_format=BF16,
    combine_format=BF16,
    backward_format=BF16,
)


def collectives_beside(other_error: str) -> Collectives:
    """Rank 0 of 2; rank 1 tells this."""

    def gather_records(record: Mapping[str, Scalar], *, phase: str) -> list[Mapping[str, Scalar]]:
        return [record, {"error": other_error}]

    return cast(Collectives, SimpleNamespace(rank=0, world_size=2, gather_records=gather_records))


def test_all_ranks_hear_of_one_without_memory() -> None:
    agree_on_memory(collectives_beside(""), "", 64, phase="open")
    with pytest.raises(BackendUnavailable, match=r"open: .*rank 1: out of memory .*rank 0 of 2"):
        agree_on_memory(collectives_beside("out of memory"), "", 64, phase="open")
    with pytest.raises(BackendUnavailable, match="rank 0: none left"):
        agree_on_memory(collectives_beside(""), "none left", 64, phase="open")


def test_memory_that_cannot_grow_keeps_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> SymmetricMemory:
        raise BackendUnavailable("none left")

    monkeypatch.setattr(nvlink_host, "open_symmetric_memory", refuse)
    monkeypatch.setattr(launch, "IS_INTERPRETED", True)
    buffer = object.__new__(NVLinkBuffer)
    buffer._spec, buffer._world_size = SPEC, 2
    buffer._device, buffer._collectives = torch.device("cpu"), collectives_beside("")
    buffer._layout = old = NVLinkBuffer.layout_for(SPEC, 2)
    with pytest.raises(BackendUnavailable):
        buffer._open(512)
    assert buffer._layout is old
