"""Memory that ranks share, in one process that imitates the reports of the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch.distributed import _symmetric_memory

pytest.importorskip("triton")
from epcomm.buffers.nvlink import base as nvlink_host
from epcomm.buffers.nvlink import memory
from epcomm.buffers.nvlink.memory import SymmetricMemory, as_words, raise_together
from epcomm.buffers.nvlink.normal import NVLinkBuffer
from epcomm.calls.order import Calls
from epcomm.collectives.base import Collectives, Scalar
from epcomm.errors import BackendUnavailable
from epcomm.kernels import launch
from tests.cases.specs import buffer_spec

SPEC = buffer_spec(8, 1, 1)


def calls_beside(other_error: str) -> Calls:
    """Return the calls of rank 0 of 2; rank 1 reports `other_error`."""

    def gather_records(record: Mapping[str, Scalar], *, phase: str) -> list[Mapping[str, Scalar]]:
        return [record, {"reason": other_error}]

    return cast(
        Calls,
        SimpleNamespace(
            collectives=SimpleNamespace(rank=0), world_size=2, gather_records=gather_records
        ),
    )


def test_all_ranks_hear_of_one_without_memory() -> None:
    text = {"failure": "open: cannot allocate", "remedy": "free memory", "phase": "open"}
    raise_together(calls_beside(""), "", **text)
    with pytest.raises(BackendUnavailable, match=r"open: .*rank 1: out of memory .*rank 0 of 2"):
        raise_together(calls_beside("out of memory"), "", **text)
    with pytest.raises(BackendUnavailable, match="rank 0: none left"):
        raise_together(calls_beside(""), "none left", **text)


def test_memory_that_cannot_grow_keeps_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> SymmetricMemory:
        raise BackendUnavailable("none left")

    monkeypatch.setattr(nvlink_host, "open_symmetric_memory", refuse)
    monkeypatch.setattr(launch, "IS_INTERPRETED", True)
    monkeypatch.setattr(NVLinkBuffer, "_load_kernels", lambda self, layout: None)
    buffer = object.__new__(NVLinkBuffer)
    buffer._spec, buffer._world_size = SPEC, 2
    buffer._device, buffer._calls = torch.device("cpu"), calls_beside("")
    buffer._layout = old = NVLinkBuffer.layout_for(SPEC, 2)
    with pytest.raises(BackendUnavailable, match="none left"):
        buffer._open(512)
    assert buffer._layout is old


def test_memory_is_not_freed_on_a_device_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    memory = SymmetricMemory(block=torch.empty(0, dtype=torch.uint8), addresses=(), keeps=None)
    buffer = object.__new__(NVLinkBuffer)
    buffer._device, buffer._memory = torch.device("cuda", 0), memory
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    buffer.abandon()
    assert buffer._memory is memory, "torch would end the process"


def test_memory_is_that_of_the_device_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    current, asked = ["cuda:0"], []

    @contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        before, current[0] = current[0], str(device)
        yield
        current[0] = before

    def empty(size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        asked.append((str(device), current[0]))
        return torch.empty(size, dtype=dtype)

    def rendezvous(block: torch.Tensor, group: object) -> object:
        asked.append(("rendezvous", current[0]))
        return SimpleNamespace(buffer_ptrs=[block.data_ptr()])

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(_symmetric_memory, "empty", empty)
    monkeypatch.setattr(_symmetric_memory, "rendezvous", rendezvous)
    monkeypatch.setattr(memory, "on_device", on_device)
    group = cast(
        Calls,
        SimpleNamespace(
            collectives=SimpleNamespace(
                rank=0, world_size=1, device=torch.device("cuda", 1), process_group=object()
            ),
            world_size=1,
            gather_records=lambda record, *, phase: [record],
        ),
    )
    memory.open_symmetric_memory(group, 64, phase="open")
    assert asked == [("cuda:1", "cuda:1"), ("rendezvous", "cuda:1")]
    assert current == ["cuda:0"]


class InProcess(Collectives):
    """The collectives of ranks that never communicate."""

    def __init__(self, world_size: int) -> None:
        self.rank, self.world_size, self.device = 0, world_size, torch.device("cpu")

    _all_to_all = _all_gather = gather_records = None  # pyright: ignore[reportAssignmentType]


class FakeStream:
    """A stream that records the streams for which it waits."""

    def __init__(self, number: int) -> None:
        self.number, self.waited_for = number, []

    def wait_stream(self, other: FakeStream) -> None:
        self.waited_for.append(other.number)


def test_calls_of_all_buffers_of_a_group_have_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = {number: FakeStream(number) for number in (1, 2)}
    current = [1]
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: current[0], raising=False
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[current[0]])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    # Groups whose calls share a device, including a part of the ranks.
    whole, part = InProcess(2), InProcess(1)
    part.streams = whole.streams
    buffers = []
    for collectives in (whole, whole, part):
        buffer = NVLinkBuffer(Calls(collectives), SPEC)
        buffer._is_cuda, buffer._device = True, torch.device("cuda", 0)
        buffers.append(buffer)
    for buffer, number in zip((*buffers, buffers[0]), (1, 2, 1, 1), strict=True):
        current[0] = number
        buffer._follow()
    assert (streams[1].waited_for, streams[2].waited_for) == ([2], [1])


@pytest.mark.parametrize(
    ("offset", "columns", "expected"),
    [
        pytest.param(0, 4, torch.int32, id="aligned"),
        pytest.param(2, 4, torch.int32, id="two elements on"),
        pytest.param(1, 4, torch.int16, id="between words"),
        pytest.param(0, 3, torch.int16, id="odd rows"),
    ],
)
def test_rows_are_as_wide_words_as_they_begin_at(
    offset: int, columns: int, expected: torch.dtype
) -> None:
    elements = torch.arange(offset + 2 * columns, dtype=torch.bfloat16)
    rows = elements[offset:].view(2, columns)
    words = as_words(rows)
    assert words.dtype == expected
    assert words.data_ptr() == rows.data_ptr()
    assert torch.equal(words.view(torch.bfloat16), rows)
