"""Launch dispatch.cu, which dispatches, indexes and waits for the rows in one kernel.

All ranks of a buffer take it, or none does: metadata are ready on their own here, ahead of rows.

Between two H200 with 4096 tokens each, hidden size 7168 and top-8, on 32 of their SMs, it takes
0.12 ms with FP8 rows and 0.20 with BF16, where the kernels of Triton take 0.17 and 0.24: these
index when all rows are there, and a few SMs have too little under way. One token takes as long as
there, less a launch.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from ctypes import c_int, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from epcomm import protocol
from epcomm.kernels.cuda_jit import CudaKernel, CudaModule, compile_to_cubin, nvrtc_is_installed
from epcomm.kernels.nvlink.common.cuda_source import source_of
from epcomm.kernels.nvlink.common.epochs import (
    BUFFER_MARKS,
    DISPATCH_COUNTED,
    DISPATCH_EPOCH,
    DISPATCH_LEFT,
    DISPATCH_LOST,
)
from epcomm.kernels.nvlink.common.layout import MemoryLayout, NormalLayout
from epcomm.kernels.nvlink.common.plan_parts import PLAN_PARTS, Received, Sends
from epcomm.kernels.nvlink.normal_exchange import NormalExchange, PreparedCuda, scratch_words
from epcomm.platforms.cuda import compute_capability, num_sms_of, on_device, shared_bytes_of
from epcomm.spec import BufferSpec

_FOLDER = Path(__file__).parent
# What comes later uses what comes earlier.
_FILES = ("arguments.cu", "plan.cu", "rows.cu", "metadata.cu", "index.cu", "dispatch.cu")
# Warps of a block.
COPIERS, HELPERS = 6, 8
# Bytes that are brought in at once, at most, and pieces of a copier under way, at most. While it
# brings in one half of them, it does not wait for the stores of the other.
MAX_PIECE, MAX_STAGES = 8192, 8
# Dynamic shared memory for the pieces of a block.
RING_BYTES = 176 * 1024
# Static shared memory of a block, at most: by experts and ranks.
_STATIC_BYTES = 48 * 1024
_MAX_EXPERTS = 1024
# Each lane of a warp holds one rank, or one entry of a token.
_LANES = 32
# What the copy engine moves.
_COPY_BYTES = 16
# No unit of scales.
_EIGHT_BYTES = 8
# The first with an engine that copies into shared memory.
_COPY_ENGINE = (9, 0)
_REGIONS = ("dispatch_begin", "counts_ready", "rows_ready", "header", "metadata", "data", "scales")
_NUMBERS = {
    "DISPATCH_EPOCH": DISPATCH_EPOCH,
    "DISPATCH_LEFT": DISPATCH_LEFT,
    "DISPATCH_COUNTED": DISPATCH_COUNTED,
    "DISPATCH_LOST": DISPATCH_LOST,
    "BUFFER_MARKS": BUFFER_MARKS,
    "HEADER_WORDS": protocol.HEADER_WORDS,
    "FAULT_MASK": protocol.FAULT_MASK,
    "FAULT_IDS": int(protocol.FaultCode.IDS),
    "FAULT_OVERFLOW": int(protocol.FaultCode.OVERFLOW),
    "FAULT_GRAD_MODE": int(protocol.FaultCode.GRAD_MODE),
    "FAULT_FROZEN": int(protocol.FaultCode.FROZEN),
    "FLAGS_SHIFT": protocol.FLAGS_SHIFT,
    "COMPARED_FLAGS": protocol.COMPARED_FLAGS,
    "WAIT_DISPATCH_BEGIN": int(protocol.Wait.DISPATCH_BEGIN),
    "WAIT_HEADERS": int(protocol.Wait.HEADERS),
    "WAIT_ROWS": int(protocol.Wait.ROWS),
}

# In the order of struct Arguments.
_POINTERS = (
    *("rows", "scales", "ids", "weights", *PLAN_PARTS, "totals"),
    *("row_ids", "row_weights"),
    *("scratch", "counted", "table", "excluded", "state", "counters", "faults", "report"),
)


class _Arguments(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in _POINTERS),
        ("own", c_uint64),
        ("rows_stride", c_int64),
        ("scales_stride", c_int64),
        *((name, c_int) for name in ("rank", "num_senders", "max_polls", "num_tokens")),
        *((name, c_int) for name in ("buffer_index", "wanted_tokens", "status", "num_slots")),
        *((name, c_int) for name in ("has_budget", "has_row_budget", "is_compact")),
    ]


# Writes the pointers of a plan, which lie side by side.
_write_plan = struct.Struct(f"={len(PLAN_PARTS)}Q").pack_into
_PLAN_AT = getattr(_Arguments, PLAN_PARTS[0]).offset


class RowForm(NamedTuple):
    """Says which rows a compiled kernel is for, beside a layout: a key that every call makes.

    row_bytes: of elements.   scale_bytes: of the scales of a row, 0 for none.
    scale_unit: divides the addresses of scales.   alignment: of the slots of an expert.
    is_planned: not a cached dispatch.
    """

    row_bytes: int
    scale_bytes: int
    scale_unit: int
    alignment: int
    is_planned: bool


def can_serve(layout: MemoryLayout, spec: BufferSpec, device: torch.device) -> bool:
    """Return whether this rank can dispatch rows of a buffer here: in vectors, on its GPU."""
    formats = (spec.dispatch_format, spec.hidden_format)
    return (
        device.type == "cuda"
        and fits(layout)
        and all(each.data_bytes(spec.hidden_size) % _COPY_BYTES == 0 for each in formats)
        and (compute_capability(device) or (0, 0)) >= _COPY_ENGINE
        and (shared_bytes_of(device) or 0) >= RING_BYTES + _STATIC_BYTES
        and nvrtc_is_installed()
    )


def prepare(layout: NormalLayout, spec: BufferSpec, device: torch.device) -> None:
    """Compile and load the kernels for the rows of a buffer, before any rank waits for another.

    Raises:
        CudaError: the compiler or the driver refuses.
    """
    wire, size = spec.dispatch_format, spec.hidden_size
    scale_bytes = wire.scale_bytes(size)
    for rows in (
        RowForm(
            row_bytes=wire.data_bytes(size),
            scale_bytes=scale_bytes,
            scale_unit=_unit(scale_bytes),
            alignment=spec.expert_alignment,
            is_planned=True,
        ),
        RowForm(
            row_bytes=spec.hidden_format.data_bytes(size),
            scale_bytes=0,
            scale_unit=_COPY_BYTES,
            alignment=1,
            is_planned=False,
        ),
    ):
        _kernel(layout, rows, device)


def fits(layout: MemoryLayout) -> bool:
    """Return whether a warp has lanes for all ranks and entries, and a block memory for experts."""
    num_experts = layout.world_size * layout.num_local_experts
    return max(layout.top_k, layout.world_size) <= _LANES and num_experts <= _MAX_EXPERTS


def num_stages(row_bytes: int) -> int:
    """Return the pieces that a copier may have under way."""
    pieces = -(-row_bytes // MAX_PIECE)
    piece = -(-row_bytes // _COPY_BYTES // pieces) * _COPY_BYTES
    return min(MAX_STAGES, (RING_BYTES // COPIERS - 8 * MAX_STAGES) // piece)


def definitions(layout: NormalLayout, rows: RowForm) -> Mapping[str, int]:
    """Return what the files take as constants."""
    return {
        "ROW_BYTES": rows.row_bytes,
        "MAX_PIECE": MAX_PIECE,
        "STAGES": num_stages(rows.row_bytes),
        "STORED": num_stages(rows.row_bytes) // 2,
        "COPIERS": COPIERS,
        "HELPERS": HELPERS,
        "SCALE_ROW_BYTES": rows.scale_bytes,
        "SCALE_UNIT": rows.scale_unit,
        "ALIGNMENT": rows.alignment,
        "IS_PLANNED": int(rows.is_planned),
        "WORLD": layout.world_size,
        "LOCAL": layout.num_local_experts,
        "TOP_K": layout.top_k,
        "K_LANES": layout.metadata_words,
        "MAX_TOKENS": layout.max_tokens,
        "SCRATCH_WORDS": scratch_words(layout),
        "BUFFERS_AT": layout.buffers_at,
        "BUFFER_BYTES": layout.buffer_bytes,
        "HEADER_BYTES": layout.header_bytes,
        "METADATA_BYTES": layout.metadata_bytes,
        "DATA_BYTES": layout.data_bytes,
        "SCALE_BYTES": layout.scale_bytes,
        **{f"{name.upper()}_AT": layout.offsets[name] for name in _REGIONS},
        **_NUMBERS,
    }


def source_for(constants: Mapping[str, int]) -> str:
    """Return the source of the program, with its constants."""
    return source_of(constants, [_FOLDER / name for name in _FILES])


def num_blocks(num_programs: int, num_sms: int) -> int:
    """Return as many as run at once: they wait for one another, here and on peers."""
    return min(num_programs, num_sms)


def dispatch_rows(
    exchange: NormalExchange,
    data: Tensor,
    scales: Tensor | None,
    sends: Sends | None,
    *,
    buffer_index: int,
    topk: tuple[Tensor, Tensor] | None,
    received: Received | None = None,
    status: int = 0,
    wanted_tokens: int = 0,
    totals: Tensor | None = None,
    num_sms: int | None = None,
) -> None:
    """Send tokens to the ranks of their experts, index what comes, and wait for it.

    Arguments are those of push_rows() of normal_dispatch_send.py, of rows of any dtype. What is in
    `received` is written along with them, sends too; a cached dispatch has sends alone. num_sms: as
    many blocks at most, None for those of the exchange; other ranks may have others.

    Collective: yes.   Host sync: none.   Graph capture: after one call, unless there are totals.
    Allocates: a copy of rows that do not begin at multiples of 16 bytes.
    Raises:
        CudaError: the compiler or the driver refuses.
    """
    data = in_vectors(data)
    num_tokens, row_bytes = data.shape[0], data.shape[1] * data.itemsize
    scale_bytes, scales_stride, unit = 0, 0, _COPY_BYTES
    if scales is not None:
        scale_bytes = scales.shape[1] * scales.itemsize
        scales_stride = scales.stride(0) * scales.itemsize
        unit = _unit(scales.data_ptr() | scale_bytes | scales_stride)
    rows = RowForm(
        row_bytes=row_bytes,
        scale_bytes=scale_bytes,
        scale_unit=unit,
        alignment=1 if received is None else received.expert_alignment,
        is_planned=topk is not None,
    )
    launch = exchange.cpp_launches.get(rows)
    if launch is None:
        launch = exchange.cpp_launches[rows] = _prepared(exchange, rows, data.device)
    arguments = _Arguments.from_buffer_copy(launch.arguments)
    arguments.rows = data.data_ptr()
    arguments.rows_stride = data.stride(0) * data.itemsize if num_tokens > 1 else row_bytes
    if scales is not None:
        arguments.scales = scales.data_ptr()
        arguments.scales_stride = scales_stride
    arguments.num_tokens = num_tokens
    arguments.buffer_index = buffer_index
    if sends is not None:
        arguments.places = sends.places.data_ptr()
    if topk is not None and received is not None:
        arguments.ids, arguments.weights = topk[0].data_ptr(), topk[1].data_ptr()
        _write_plan(arguments, _PLAN_AT, *received.addresses)
        arguments.num_slots = received.num_slots
        arguments.has_budget = received.has_budget
        arguments.has_row_budget = received.has_row_budget
        arguments.is_compact = received.is_compact
        if received.row_topk is not None:
            arguments.row_ids, arguments.row_weights = (
                each.data_ptr() for each in received.row_topk
            )
        arguments.wanted_tokens = wanted_tokens
        arguments.status = status
        if totals is not None:
            arguments.totals = totals.data_ptr()
    with on_device(data.device):
        launch.kernel.launch(min(num_sms or launch.num_blocks, launch.num_blocks), arguments)


def _prepared(exchange: NormalExchange, rows: RowForm, device: torch.device) -> PreparedCuda:
    peers, plan = exchange.peers, exchange.plan
    kernel, num_sms = _kernel(peers.layout, rows, device)
    arguments = _Arguments(
        scratch=plan.scratch.data_ptr(),
        counted=plan.counted.data_ptr(),
        table=peers.table.data_ptr(),
        excluded=peers.excluded.data_ptr(),
        state=exchange.state.data_ptr(),
        counters=peers.counters.data_ptr(),
        faults=peers.faults.data_ptr(),
        report=peers.report.data_ptr(),
        own=peers.own_address,
        rank=peers.rank,
        num_senders=peers.num_programs,
        max_polls=peers.max_polls,
    )
    return PreparedCuda(
        kernel=kernel, num_blocks=num_blocks(peers.num_programs, num_sms), arguments=arguments
    )


def in_vectors(data: Tensor) -> Tensor:
    """Return rows that the copy engine can read: these, or a copy."""
    stride_bytes = data.stride(0) * data.itemsize if data.shape[0] > 1 else 0
    if (data.data_ptr() | stride_bytes) % _COPY_BYTES or data.stride(1) != 1:
        return data.clone(memory_format=torch.contiguous_format)
    return data


def _unit(bits: int) -> int:
    """Return the widest unit by which scales may be read, where `bits` are all addresses or-ed."""
    lowest = bits & -bits or _COPY_BYTES
    return min(lowest, _COPY_BYTES) if lowest != _EIGHT_BYTES else _EIGHT_BYTES // 2


@cache
def _kernel(layout: NormalLayout, rows: RowForm, device: torch.device) -> tuple[CudaKernel, int]:
    """Return the kernel for one layout and kind of rows, and the SMs of the GPU."""
    capability = compute_capability(device)
    assert capability is not None, "can_serve() has asked for a GPU"
    source = source_for(definitions(layout, rows))
    cubin = compile_to_cubin(source, arch="sm_{}{}".format(*capability), name="dispatch.cu")
    with torch.cuda.device(device):
        kernel = CudaModule(cubin).kernel(
            "dispatch_rows",
            threads=32 * (COPIERS + HELPERS),
            shared_bytes=RING_BYTES,
            is_cooperative=True,
        )
    return kernel, num_sms_of(device)
