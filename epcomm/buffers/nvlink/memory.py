"""A block of memory in each rank that the kernels of all ranks of one host write.

CPU ranks map files of shared memory, so that kernels under an interpreter write them. CUDA ranks
map the memory of their peers over NVLink; multicast is not asked for.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from epcomm.buffers.shared_memory.memory import HostMemory
from epcomm.calls.order import Calls
from epcomm.errors import BackendUnavailable
from epcomm.kernels.nvlink.common.layout import MemoryLayout
from epcomm.platforms.cuda import on_device
from epcomm.types import ROW_MAJOR, WireFormat, WireTensor


@dataclass(frozen=True, kw_only=True, eq=False)
class SymmetricMemory:
    """The blocks of all ranks, as this process sees them.

    block: [num_bytes], uint8, of this rank; zero at first.
    addresses: [W], where the block of each rank begins, multiples of 16.
    keeps: objects that must be kept alive while some rank may write.
    """

    block: Tensor
    addresses: tuple[int, ...]
    keeps: object


def open_symmetric_memory(calls: Calls, num_bytes: int, *, phase: str) -> SymmetricMemory:
    """Allocate this rank's block and map those of all others.

    Collective: yes; num_bytes is equal on all ranks.   Host sync: yes.
    Lifetime: while the record or a view of its block is held; peers write until they have closed.
    Raises:
        BackendUnavailable: no memory, or a rank whose memory cannot be mapped.
    """
    if calls.collectives.device.type == "cuda":
        return _open_cuda(calls, num_bytes, phase=phase)
    memory = HostMemory(calls, num_bytes, phase=phase)
    return SymmetricMemory(
        block=memory.blocks[calls.collectives.rank],
        addresses=tuple(block.data_ptr() for block in memory.blocks),
        keeps=memory,
    )


def _open_cuda(calls: Calls, num_bytes: int, *, phase: str) -> SymmetricMemory:
    collectives = calls.collectives
    group = collectives.process_group
    if group is None:
        raise BackendUnavailable(
            f"{phase}: the EPGroup is not made of a torch.distributed process group "
            f"(rank {collectives.rank} of {collectives.world_size}); make it of one"
        )
    # The module is imported here, because CPU ranks do not need it.
    from torch.distributed import _symmetric_memory

    block, error = None, ""
    try:
        # The group's device, which need not be the current one.
        with on_device(collectives.device):
            block = _symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=collectives.device)
            # No other rank writes before the barrier below.
            block.zero_()
            torch.cuda.synchronize(collectives.device)
    except RuntimeError as own_error:
        # The first of the many lines of an allocator's message has the reason.
        error = str(own_error).partition("\n")[0] or type(own_error).__name__
    raise_together(
        calls,
        error,
        failure=f"{phase}: cannot allocate {num_bytes} bytes",
        remedy="lower max_tokens_per_rank or free memory of the GPU",
        phase=phase,
    )
    assert block is not None, "some rank would have raised"
    with on_device(collectives.device):
        mapped = _symmetric_memory.rendezvous(block, group)
    calls.gather_records({}, phase=phase)
    return SymmetricMemory(block=block, addresses=tuple(mapped.buffer_ptrs), keeps=(block, mapped))


def raise_together(calls: Calls, reason: str, *, failure: str, remedy: str, phase: str) -> None:
    """Raise on every rank if some rank cannot continue, for which others would wait.

    reason: why this rank cannot, or empty.   failure, remedy: the parts of the message around it.

    Collective: yes.   Host sync: yes.
    Raises:
        BackendUnavailable: some rank has a reason.
    """
    records = calls.gather_records({"reason": reason}, phase=phase)
    reasons = [
        f"rank {rank}: {each['reason']}" for rank, each in enumerate(records) if each["reason"]
    ]
    if reasons:
        raise BackendUnavailable(
            f"{failure}, {'; '.join(reasons)} (this is rank {calls.collectives.rank} of "
            f"{calls.world_size}); {remedy}"
        )


def region_rows(block: Tensor, layout: MemoryLayout, buffer_index: int, region: str) -> Tensor:
    """View the `data` or the `scales` of a receive buffer as [W * M, bytes from row to row]."""
    row_bytes = layout.data_bytes if region == "data" else layout.scale_bytes
    begin = layout.buffer_offset(buffer_index) + layout.offsets[region]
    return block[begin : begin + layout.num_rows * row_bytes].view(layout.num_rows, row_bytes)


def received_rows(
    block: Tensor, layout: MemoryLayout, buffer_index: int, wire: WireFormat, hidden_size: int
) -> WireTensor:
    """Return [W * M, H]: the rows of a receive buffer and their scales, without a copy."""
    scales = None
    data = region_rows(block, layout, buffer_index, "data").view(wire.dtype.torch_dtype)
    if wire.scale_dtype is not None:
        scales = region_rows(block, layout, buffer_index, "scales").view(wire.scale_dtype)
        scales = scales[:, : wire.num_scales(hidden_size)]
    data = data[:, :hidden_size]
    scale_layout = None if scales is None else ROW_MAJOR
    return WireTensor(data=data, format=wire, scales=scales, scale_layout=scale_layout)


def as_words(rows: Tensor) -> Tensor:
    """View rows as [rows, words], the widest integers that fit, for kernels that only move them."""
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    # The bytes at which a row begins and ends; the first row may begin anywhere in a larger tensor.
    places = (rows.storage_offset(), rows.stride(0), rows.shape[1])
    return rows.view(_word_dtype(places, rows.itemsize))


@lru_cache(maxsize=256)
def _word_dtype(places: tuple[int, ...], itemsize: int) -> torch.dtype:
    """Return the widest integers to which all offsets are aligned, counted in elements."""
    for dtype in (torch.int32, torch.int16):
        if all(place * itemsize % dtype.itemsize == 0 for place in places):
            return dtype
    return torch.uint8
