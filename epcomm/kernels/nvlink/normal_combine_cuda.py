"""Combine of normal mode over NVLink in CUDA C++, from normal_combine.cu.

Between two H200 that send each other what eight ranks with 4096 tokens each would, on 32 of their
SMs, it takes 0.89 ms and the Triton version 1.02 ms: there a program loads in step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import c_int, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from epcomm.kernels.cuda_jit import (
    CudaKernel,
    CudaModule,
    compile_to_cubin,
    nvrtc_is_installed,
)
from epcomm.kernels.nvlink.normal_exchange import Arrivals, NormalExchange, Sends

SOURCE = Path(__file__).with_name("normal_combine.cu")
# Warps of a block, and vectors that each of their threads loads at once from a row.
SENDERS, REDUCERS, UNROLL = 16, 4, 4
# What one thread copies at a time.
_COPY_BYTES = 16
# Each lane of a warp holds one entry of a row, or one rank.
_LANES = 32


class _Arguments(ctypes.Structure):
    _fields_ = [
        ("rows", c_void_p),
        ("weights", c_void_p),
        ("slots_of_row", c_void_p),
        ("scalars", c_void_p),
        ("rows_from", c_void_p),
        ("row_base", c_void_p),
        ("has_failed", c_void_p),
        ("places", c_void_p),
        ("owners", c_void_p),
        ("out", c_void_p),
        ("out_scalars", c_void_p),
        ("table", c_void_p),
        ("excluded", c_void_p),
        ("state", c_void_p),
        ("counters", c_void_p),
        ("faults", c_void_p),
        ("report", c_void_p),
        ("own", c_uint64),
        ("rows_stride", c_int64),
        ("rank", c_int),
        ("status", c_int),
        ("num_tokens", c_int),
        ("max_polls", c_int),
    ]


def serves(exchange: NormalExchange, rows: Tensor, out: Tensor) -> bool:
    """Whether these rows are combined here: bfloat16 on a GPU, in vectors, where NVRTC is."""
    if not rows.is_cuda or rows.dtype != torch.bfloat16 or not fits(exchange):
        return False
    steps = (
        rows.data_ptr(),
        out.data_ptr(),
        rows.stride(0) * rows.itemsize,
        rows.shape[1] * rows.itemsize,
    )
    return all(step % _COPY_BYTES == 0 for step in steps) and nvrtc_is_installed()


def fits(exchange: NormalExchange) -> bool:
    """Whether a warp has lanes for all entries of a token, and for all ranks."""
    return max(exchange.dims.top_k, exchange.dims.world_size) <= _LANES


def num_blocks(num_programs: int, num_sms: int) -> int:
    """As many as run at once: their warps wait for what the others send, here and on peers."""
    return min(num_programs, num_sms)


def definitions(exchange: NormalExchange, hidden_size: int) -> Mapping[str, int]:
    """What normal_combine.cu takes as constants."""
    dims, regions = exchange.dims, exchange.regions
    return {
        "HIDDEN": hidden_size,
        "TOP_K": dims.top_k,
        "K_LANES": exchange.metadata_words,
        "WORLD": dims.world_size,
        "MAX_TOKENS": dims.max_tokens,
        "ITEM_ROWS": exchange.tuning.item_rows,
        "ITEMS": exchange.num_items,
        "RETURN_BYTES": exchange.return_bytes,
        "SENDERS": SENDERS,
        "REDUCERS": REDUCERS,
        "UNROLL": UNROLL,
        "COMBINE_BEGIN_AT": regions["combine_begin"],
        "COMBINE_STATUS_AT": regions["combine_status"],
        "SUMS_READY_AT": regions["sums_ready"],
        "RETURN_AT": regions["returned"],
        "SCALARS_AT": regions["returned_scalars"],
    }


def source_for(constants: Mapping[str, int]) -> str:
    """The program, with its constants."""
    lines = [
        f"#define {name} {value}LL" if value >= 2**31 else f"#define {name} {value}"
        for name, value in constants.items()
    ]
    return "\n".join([*lines, SOURCE.read_text(encoding="utf-8")])


def combine_rows_cpp(
    exchange: NormalExchange,
    rows: Tensor,
    sends: Sends,
    arrivals: Arrivals,
    slots_of_row: Tensor | None,
    out: Tensor,
    *,
    slot_weights: Tensor | None,
    row_scalars: Tensor | None,
    out_scalars: Tensor | None,
    status: int,
) -> None:
    """As nvlink_reduce.combine_rows(), of rows that serves() accepts.

    Raises:
        CudaError: the compiler or the driver refuses.
    """
    constants = definitions(exchange, rows.shape[1])
    kernel = _kernel(tuple(constants.items()), rows.device)
    num_sms = torch.cuda.get_device_properties(rows.device).multi_processor_count
    with torch.cuda.device(rows.device):
        kernel.launch(
            num_blocks(exchange.num_programs, num_sms),
            _Arguments(
                rows=rows.data_ptr(),
                weights=_address(slot_weights),
                slots_of_row=_address(slots_of_row),
                scalars=_address(row_scalars),
                rows_from=arrivals.rows_from.data_ptr(),
                row_base=arrivals.row_base.data_ptr(),
                has_failed=arrivals.has_failed.data_ptr(),
                places=sends.places.data_ptr(),
                owners=sends.owners.data_ptr(),
                out=out.data_ptr(),
                out_scalars=_address(out_scalars),
                table=exchange.table.data_ptr(),
                excluded=exchange.excluded.data_ptr(),
                state=exchange.state.data_ptr(),
                counters=exchange.counters.data_ptr(),
                faults=exchange.faults.data_ptr(),
                report=exchange.report.data_ptr(),
                own=exchange.own_address,
                rows_stride=rows.stride(0) * rows.itemsize,
                rank=exchange.rank,
                status=status,
                num_tokens=out.shape[0],
                max_polls=exchange.max_polls,
            ),
        )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@cache
def _kernel(constants: tuple[tuple[str, int], ...], device: torch.device) -> CudaKernel:
    major, minor = torch.cuda.get_device_capability(device)
    cubin = compile_to_cubin(
        source_for(dict(constants)), arch=f"sm_{major}{minor}", name=SOURCE.name
    )
    with torch.cuda.device(device):
        threads = 32 * (SENDERS + REDUCERS)
        return CudaModule(cubin).kernel("combine_rows", threads=threads, shared_bytes=0)
