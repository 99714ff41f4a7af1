"""Compile the kernels of the launchers for sm_90, without a GPU; print code as JSON.

A separate program, because kernels of the test process are interpreted and cannot be compiled.
"""

import json
import multiprocessing
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from epcomm.buffers.nvlink.low_latency import NVLinkLowLatencyBuffer
from epcomm.buffers.nvlink.normal import NVLinkBuffer
from epcomm.kernels import launch
from epcomm.kernels.gemm import fixed_tiles
from epcomm.kernels.gemm import fp8 as gemm_fp8
from epcomm.kernels.gemm import int8 as gemm_int8
from epcomm.kernels.gemm import mxfp8 as gemm_mxfp8
from epcomm.kernels.gemm.operands import Product
from epcomm.kernels.launch import DeviceLimits
from epcomm.kernels.nvlink import (
    ll_combine_recv,
    ll_combine_send,
    ll_dispatch_header,
    ll_dispatch_recv,
    ll_dispatch_send,
)
from epcomm.kernels.nvlink.common import barrier, constexprs, dependent_launch
from epcomm.kernels.nvlink.common.exchange import (
    NO_SLABS,
    LayoutT,
    LowLatencyExchange,
    PeerBlocks,
    SlabMemory,
)
from epcomm.kernels.nvlink.common.layout import SUM_FORMATS, NormalLayout
from epcomm.kernels.quantize import fp8 as quantize_fp8
from epcomm.kernels.quantize.int8 import quantize_int8_triton
from epcomm.kernels.routing.gate import GateForm, route_tokens
from epcomm.kernels.rows.gather import gather_rows
from epcomm.kernels.rows.scatter import scatter_tokens
from epcomm.kernels.rows.sends import count_sends, order_sends
from epcomm.kernels.rows.slot_index import number_slots
from epcomm.kernels.rows.sums import dot_rows, sum_parts, sum_rows
from epcomm.kernels.rows.swiglu import swiglu, swiglu_backward
from epcomm.kernels.rows.token_layout import write_token_layout
from epcomm.quantization import FP8_FLOAT32_SCALES, INT8_PER_TOKEN
from epcomm.records import ReplicaTable
from epcomm.spec import BufferSpec
from epcomm.types import Int8Profile, WireDtype, WireFormat, WireTensor

HOPPER = GPUTarget("cuda", 90, 32)
# Blackwell of workstations, whose blocks have 99 KB of shared memory.
WORKSTATION = GPUTarget("cuda", 120, 32)
PLAIN = WireFormat.of(torch.bfloat16)
HIDDEN, INNER = 7168, 2048
# A row with scales, ids and weights after it, in 16 bits.
MESSAGE = HIDDEN + 144
BF16, I32, I64, U8, I8 = torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.int8


class Device:
    """Replaces Triton's driver of a GPU."""

    target = HOPPER

    def get_current_device(self) -> int:
        return self.target.arch if isinstance(self.target.arch, int) else 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


DEVICE = Device()


def code_of(call: Callable[[], None], target: GPUTarget = HOPPER) -> dict[str, Any]:
    """Return the code of the kernel that a call of a launcher launches last."""
    made: list[Any] = []

    def warm_up(kernel: triton.JITFunction, grid: object) -> Callable[..., None]:
        return lambda *arguments, **named: made.append(
            kernel.run(*arguments, grid=grid, warmup=True, **named)
        )

    DEVICE.target = target
    triton.JITFunction.__getitem__ = warm_up  # type: ignore[method-assign]
    call()
    kernel = made[-1]
    # The disassembler need not know newer targets.
    sass = disassembled(kernel.asm["cubin"]) if target is HOPPER else ""
    return {
        "ptx": kernel.asm["ptx"],
        "ttgir": kernel.asm["ttgir"],
        "sass": sass,
        "shared_bytes": kernel.metadata.shared,
    }


def disassembled(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def rows(num: int, columns: int, dtype: torch.dtype, stride: int = 0) -> Tensor:
    """Return memory that is not read, with rows `stride` elements apart."""
    return torch.empty(num, stride or columns, dtype=dtype)[:, :columns]


def i32(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=I32)


def f32(*shape: int) -> Tensor:
    return torch.empty(shape)


def blocks_of(layout: LayoutT, num_programs: int, num_counters: int) -> PeerBlocks[LayoutT]:
    """Return blocks as a rank of an H200 has them; their addresses are never used."""
    size = layout.world_size
    return PeerBlocks(
        rank=0,
        num_programs=num_programs,
        max_polls=2**20,
        own_address=2**40,
        table=torch.zeros(size, dtype=I64),
        layout=layout,
        excluded=i32(size),
        counters=torch.zeros(num_counters, dtype=I64),
        faults=torch.zeros(size, 2, dtype=I64),
        report=i32(4 + size),
    )


def spec_of(wire: WireFormat, hidden_size: int, world_size: int) -> BufferSpec:
    return BufferSpec(
        hidden_size=hidden_size,
        top_k=8,
        num_local_experts=256 // world_size,
        dispatch_format=wire,
        hidden_format=PLAIN,
    )


def low_latency_exchange(
    wire: WireFormat = PLAIN,
    hidden: int = HIDDEN,
    world: int = 8,
    *,
    returns_slots: bool = False,
    sum_groups: int | None = None,
    sums: WireFormat | None = None,
) -> LowLatencyExchange:
    spec = replace(
        spec_of(wire, hidden, world),
        max_tokens_per_rank=128,
        returns_slots=returns_slots,
        sum_groups=sum_groups,
        combine_format=sums,
    )
    layout = NVLinkLowLatencyBuffer.layout_for(spec, world)
    return LowLatencyExchange.of(blocks_of(layout, num_programs=128, num_counters=4), 0)


def normal_layout(wire: WireFormat = PLAIN, hidden: int = HIDDEN, world: int = 8) -> NormalLayout:
    return NVLinkBuffer.layout_for(spec_of(wire, hidden, world), world, 4096)


KINDS: Mapping[WireFormat, int] = {
    PLAIN: ll_dispatch_header.PLAIN,
    FP8_FLOAT32_SCALES: ll_dispatch_header.FP8,
    INT8_PER_TOKEN: ll_dispatch_header.INT8,
}


def send_dispatch(
    wire: WireFormat = PLAIN, hidden: int = HIDDEN, world: int = 8, *, in_lines: bool = False
) -> None:
    ll_dispatch_send.send_dispatch(
        low_latency_exchange(wire, hidden, world),
        rows(2, hidden, BF16),
        rows(2, 8, I64),
        f32(2, 8),
        rows(128, world, U8),
        status=0,
        batch=0,
        is_captured=False,
        kind=KINDS[wire],
        scale_block=wire.scale_block or hidden,
        profile="rint127",
        in_lines=in_lines,
    )


def send_words(*, in_lines: bool = False) -> None:
    ll_dispatch_send.send_dispatch(
        low_latency_exchange(FP8_FLOAT32_SCALES, returns_slots=True),
        i32(2, HIDDEN // 4),
        rows(2, 8, I64),
        None,
        rows(128, 8, U8),
        status=0,
        batch=0,
        is_captured=False,
        kind=ll_dispatch_header.PLAIN,
        scale_block=128,
        profile="rint127",
        scales=i32(2, 56),
        in_lines=in_lines,
    )


def receive_dispatch(*, is_masked: bool) -> None:
    slabs = SlabMemory(
        data=i32(8), scales=i32(8), token_of_slot=i32(8), source_ranges=torch.empty(8, dtype=I64)
    )
    ll_dispatch_recv.receive_dispatch(
        low_latency_exchange(FP8_FLOAT32_SCALES if is_masked else PLAIN, returns_slots=is_masked),
        None if is_masked else i32(8192),
        i32(8),
        None if is_masked else f32(8),
        i32(8),
        i32(8),
        expert_alignment=1,
        num_tokens=32,
        is_captured=False,
        scale_strides=(56 * 1024, 1, 1024) if is_masked else (0, 0, 0),
        slabs=slabs if is_masked else NO_SLABS,
    )


def meet() -> None:
    barrier.LivingRanks([2**40] * 8, 0, torch.device("cpu")).device_barrier(2**20)


Y = rows(2, HIDDEN, BF16)


def send_combine(
    *, returns_slots: bool = False, sum_groups: int | None = None, sums: WireFormat | None = None
) -> None:
    ll_combine_send.send_combine(
        low_latency_exchange(returns_slots=returns_slots, sum_groups=sum_groups, sums=sums),
        Y,
        None if returns_slots else f32(2),
        i32(2, 8),
        i32(33),
        num_tokens=32,
        per_row=False,
        batch=0,
        status=0,
    )


def receive_combine(
    *,
    in_lines: bool,
    returns_slots: bool = False,
    sum_groups: int | None = None,
    at_source: bool = False,
    sums: WireFormat | None = None,
) -> None:
    ll_combine_recv.receive_combine(
        low_latency_exchange(returns_slots=returns_slots, sum_groups=sum_groups, sums=sums),
        Y,
        rows(128, sum_groups or 8, U8),
        f32(2, 8) if returns_slots else None,
        i32(2, 8) if at_source else None,
        wanted_tokens=2,
        in_lines=in_lines,
        batch=0,
    )


LOW_LATENCY: Mapping[str, Callable[[], None]] = {
    "send dispatch bf16": send_dispatch,
    "send dispatch fp8": partial(send_dispatch, FP8_FLOAT32_SCALES, HIDDEN, 2),
    "send dispatch int8": partial(send_dispatch, INT8_PER_TOKEN, HIDDEN, 2),
    # Three ranks, and rows of 16 bytes more than a power of two.
    "send dispatch odd": partial(send_dispatch, PLAIN, 2056, 3),
    "send dispatch words": send_words,
    "send lines bf16": partial(send_dispatch, in_lines=True),
    "send lines fp8": partial(send_dispatch, FP8_FLOAT32_SCALES, HIDDEN, 2, in_lines=True),
    "send lines words": partial(send_words, in_lines=True),
    "receive dispatch": partial(receive_dispatch, is_masked=False),
    "receive dispatch masked": partial(receive_dispatch, is_masked=True),
    "release buffer": lambda: ll_dispatch_recv.release_buffer(low_latency_exchange()),
    "barrier": meet,
    "send combine": partial(send_combine),
    "send combine groups": partial(send_combine, sum_groups=32),
    "send combine slots": partial(send_combine, returns_slots=True),
    "receive combine": partial(receive_combine, in_lines=False),
    "receive combine groups": partial(receive_combine, in_lines=False, sum_groups=32),
    "receive combine slots": partial(receive_combine, in_lines=False, returns_slots=True),
    "receive combine at source": partial(
        receive_combine, in_lines=False, returns_slots=True, at_source=True
    ),
    "receive lines": partial(receive_combine, in_lines=True),
    "receive lines groups": partial(receive_combine, in_lines=True, sum_groups=32),
    "receive lines slots": partial(receive_combine, in_lines=True, returns_slots=True),
    **{f"send combine {sums}": partial(send_combine, sums=sums) for sums in SUM_FORMATS},
    **{
        f"receive {'lines' if in_lines else 'combine'} {sums}": partial(
            receive_combine, in_lines=in_lines, sums=sums
        )
        for in_lines in (False, True)
        for sums in SUM_FORMATS
    },
}


def scatter(dtype: torch.dtype, *, num_scales: int) -> None:
    tokens = (
        rows(4, HIDDEN, dtype),
        f32(4, num_scales) if num_scales else None,
        rows(4, 8, I64),
        f32(4, 8),
    )
    received = (
        rows(4, HIDDEN, dtype, MESSAGE),
        rows(4, num_scales, torch.float32, MESSAGE // 2) if num_scales else None,
        rows(4, 8, I32, MESSAGE // 2),
        rows(4, 8, torch.float32, MESSAGE // 2),
    )
    scatter_tokens(tokens, i32(4, 2), received)


def write_layout() -> None:
    write_token_layout(rows(4, 8, I64), i32(8), i32(256), torch.empty(4, 8, dtype=torch.bool))


HEADER = torch.empty(2, 139, dtype=I64)
ROWS: Mapping[str, Callable[[], object]] = {
    "gather bf16": lambda: gather_rows(
        rows(4, HIDDEN, BF16, MESSAGE), i32(8), rows(8, HIDDEN, BF16)
    ),
    "gather fp8": lambda: gather_rows(
        rows(4, HIDDEN, U8, 2 * MESSAGE), i32(8), rows(8, HIDDEN, U8)
    ),
    "dots bf16": lambda: dot_rows(Y, Y, f32(2)),
    "swiglu bf16": lambda: swiglu(rows(2, 2 * HIDDEN, BF16), f32(2)),
    "swiglu backward bf16": lambda: swiglu_backward(Y, rows(2, 2 * HIDDEN, BF16), f32(2)),
    "sums bf16 weighted": lambda: sum_rows(rows(8, HIDDEN, BF16), i32(2, 8), Y, f32(8)),
    "sums fp32": lambda: sum_rows(f32(8, HIDDEN), i32(2, 8), f32(2, HIDDEN)),
    "sums of parts": lambda: sum_parts(torch.empty(8, 2, HIDDEN, dtype=BF16), Y),
    "scatter bf16": partial(scatter, BF16, num_scales=0),
    "scatter fp8": partial(scatter, U8, num_scales=56),
    "slots": lambda: number_slots(
        rows(4, 8, I32, MESSAGE // 2),
        rows(4, 8, torch.float32, MESSAGE // 2),
        torch.empty(128, dtype=I64),
        (i32(32), i32(4, 8), f32(32), i32(128), i32(129)),
        first_expert=0,
        expert_alignment=1,
    ),
    "counts": lambda: count_sends(
        rows(4, 8, I64), HEADER, HEADER[:, :0], (1,) * 9, wrong_ids=2, slots_at=11, num_local=128
    ),
    "order": lambda: order_sends(rows(4, 8, I64), HEADER, i32(4, 2), rows_at=9, num_local=128),
    "layout": write_layout,
}


def quantize_to_fp8(dtype: torch.dtype, scales: torch.dtype, *, has_e4m3: bool = True) -> None:
    quantize_fp8.has_e4m3 = lambda device: has_e4m3
    # Another call of this process may have prepared the launch for the other hardware.
    quantize_fp8._prepared.cache_clear()
    wire = WireTensor(
        data=rows(4, HIDDEN, torch.float8_e4m3fn, 2 * MESSAGE),
        format=WireFormat(dtype=WireDtype.FP8_E4M3, scale_block=128, scale_dtype=scales),
        scales=rows(4, 56, scales, MESSAGE),
    )
    quantize_fp8.quantize_floats_triton(rows(4, HIDDEN, dtype), wire)


def convert_micro(dtype: WireDtype, *, restores: bool = False) -> None:
    """Quantise to a format that needs no other name than that of its dtype, or restore it."""
    wire = WireFormat(dtype=dtype)
    items, scales = wire.num_items(HIDDEN), wire.num_scales(HIDDEN)
    data = rows(4, items, torch.uint8, 2 * MESSAGE).view(wire.dtype.torch_dtype)
    out = WireTensor(data=data, format=wire, scales=rows(4, scales, wire.scale_dtype, MESSAGE))
    if restores:
        quantize_fp8.restore_triton(out, BF16)
    else:
        quantize_fp8.quantize_floats_triton(rows(4, HIDDEN, BF16), out)


def quantize_to_int8(dtype: torch.dtype, profile: Int8Profile) -> None:
    codes, scales = rows(4, HIDDEN, I8, 2 * MESSAGE), rows(4, 1, torch.float32, MESSAGE)
    wire = WireTensor(data=codes, format=INT8_PER_TOKEN, scales=scales)
    quantize_int8_triton(rows(4, HIDDEN, dtype), wire, profile)


RESTORED = [dtype for dtype in WireDtype if dtype.is_quantized]
MICROSCALED = (WireDtype.MXFP8, WireDtype.MXFP4, WireDtype.NVFP4)
QUANTIZE: Mapping[str, Callable[[], None]] = {
    "fp8 bf16": partial(quantize_to_fp8, BF16, torch.float32),
    "fp8 fp32": partial(quantize_to_fp8, torch.float32, torch.float32),
    "fp8 powers of two": partial(quantize_to_fp8, BF16, torch.float8_e8m0fnu),
    "fp8 without hardware": partial(quantize_to_fp8, BF16, torch.float32, has_e4m3=False),
    **{dtype: partial(convert_micro, dtype) for dtype in MICROSCALED},
    **{f"restore {dtype}": partial(convert_micro, dtype, restores=True) for dtype in RESTORED},
    "int8 rint127": partial(quantize_to_int8, BF16, Int8Profile.RINT127),
    "int8 div": partial(quantize_to_int8, torch.float32, Int8Profile.DIV),
    "int8 triton": partial(quantize_to_int8, BF16, Int8Profile.TRITON),
}


def form_of(**options: object) -> GateForm:
    plain: dict[str, Any] = {
        **{"num_experts": 128, "top_k": 8, "score": "softmax", "bias": "none", "softcap": None},
        **{"num_groups": 1, "topk_groups": 1, "group_top_n": 1, "fills_zero": False},
        **{"renormalizes": True, "epsilon_mode": "none", "epsilon": 0.0, "scale": 1.0},
    }
    plain |= options
    return GateForm(**plain)


def route(form: GateForm, dtype: torch.dtype = torch.float32, *, has_tables: bool = True) -> None:
    num_experts = form.num_experts
    table = ReplicaTable(
        replicas=i32(num_experts, 4),
        num_replicas=i32(num_experts),
        calls=torch.empty((), dtype=I64),
    )
    route_tokens(
        rows(4, num_experts, dtype),
        None if form.bias == "none" else f32(num_experts),
        form,
        load=torch.empty(16, num_experts, dtype=I64) if has_tables else None,
        replicas=table if has_tables else None,
    )


DEEPSEEK_V3 = form_of(
    **{"num_experts": 256, "score": "sigmoid", "bias": "selection", "scale": 2.5},
    **{"num_groups": 8, "topk_groups": 4, "group_top_n": 2},
    **{"epsilon_mode": "added", "epsilon": 1e-20},
)
LARGEST = form_of(
    **{"num_experts": 1024, "top_k": 32, "score": "sqrt_softplus", "bias": "score"},
    **{"num_groups": 16, "topk_groups": 4, "group_top_n": 4, "fills_zero": True},
    **{"softcap": 30.0, "epsilon_mode": "clamp", "epsilon": 1e-12},
)
GATES: Mapping[str, Callable[[], None]] = {
    "gate deepseek v3": partial(route, DEEPSEEK_V3),
    "gate qwen3": partial(route, form_of(), BF16, has_tables=False),
    "gate largest": partial(route, LARGEST),
}


EXPERTS = 4
COUNTS, FIRST_SLOT = i32(EXPERTS), i32(EXPERTS + 1)


def product(
    slots: int, columns: int, depth: int, dtype: torch.dtype, *, has_index: bool
) -> Product:
    """Return operands with matrices [columns, depth]; with an index, of 8 rows."""
    num_rows = 8 if has_index else slots
    scales = (EXPERTS, columns) if dtype is I8 else (EXPERTS, columns // 128, depth // 128)
    return Product(
        codes=rows(num_rows, depth, dtype),
        scales=f32(num_rows, 1 if dtype is I8 else depth // 128),
        row_of_slot=i32(slots) if has_index else None,
        counts=COUNTS,
        first_slot=FIRST_SLOT,
        matrices=torch.empty(EXPERTS, columns, depth, dtype=dtype),
        matrix_scales=f32(*scales),
    )


def multiply_floats(rows_per_expert: int, *, is_mx: bool, has_gate: bool) -> None:
    slots, dtype = rows_per_expert * EXPERTS, torch.float8_e4m3fn
    columns, depth = (2 * INNER, HIDDEN) if has_gate else (HIDDEN, INNER)
    given, out_scales = product(slots, columns, depth, dtype, has_index=has_gate), f32
    gate_up, down = gemm_fp8.gate_up_fp8, gemm_fp8.down_fp8
    if is_mx:
        out_scales = partial(torch.empty, dtype=torch.float8_e8m0fnu)
        gate_up, down = gemm_mxfp8.gate_up_mxfp8, gemm_mxfp8.down_mxfp8
        scales = out_scales(len(given.codes), depth // 32)
        matrix_scales = out_scales(EXPERTS, columns, depth // 32)
        given = replace(given, scales=scales, matrix_scales=matrix_scales)
    if has_gate:
        scales = out_scales(slots, INNER // (32 if is_mx else 128))
        gate_up(given, out_codes=rows(slots, INNER, dtype), out_scales=scales)
    else:
        down(given, slot_weights=f32(slots), out=rows(slots, HIDDEN, BF16))


def multiply_int8(
    rows_per_expert: int, hidden: int = HIDDEN, inner: int = INNER, *, has_gate: bool
) -> None:
    slots = rows_per_expert * EXPERTS
    columns, depth = (2 * inner, hidden) if has_gate else (hidden, inner)
    gemm_int8.multiply_int8(
        product(slots, columns, depth, I8, has_index=has_gate),
        slot_weights=f32(slots),
        is_packed=True,
        out=f32(slots, inner) if has_gate else rows(slots, hidden, BF16),
    )


def quantize_hidden() -> None:
    codes = rows(8, INNER, I8)
    gemm_int8.quantize_hidden_int8(
        f32(8, INNER),
        COUNTS,
        FIRST_SLOT,
        profile=Int8Profile.RINT127,
        out_codes=codes,
        out_scales=f32(8, 1),
    )


def multiply_tiles(*, is_transposed: bool) -> None:
    slots, stored = 64 * EXPERTS, torch.empty(EXPERTS, INNER, HIDDEN, dtype=BF16)
    # A transposed view multiplies HIDDEN columns, as the gradient of the rows does.
    matrices = stored if is_transposed else stored.transpose(1, 2)
    _, inner, columns = matrices.shape
    fixed_tiles.multiply_tiles(
        rows(slots, inner, BF16), COUNTS, FIRST_SLOT, matrices, rows(slots, columns, BF16)
    )


# Rows of an expert that take tiles of 32, 64 and 128 rows; hidden sizes whose last block is short.
PRODUCTS: Mapping[str, Callable[[], None]] = {
    "fp8 gate_up": partial(multiply_floats, 64, is_mx=False, has_gate=True),
    "fp8 down": partial(multiply_floats, 64, is_mx=False, has_gate=False),
    **{
        f"mxfp8 {name} {tile}": partial(multiply_floats, each, is_mx=True, has_gate=has_gate)
        for name, has_gate in (("gate_up", True), ("down", False))
        for tile, each in ((32, 32), (128, 256))
    },
    "int8 gate_up 128": partial(multiply_int8, 256, has_gate=True),
    "int8 gate_up odd": partial(multiply_int8, 256, HIDDEN + 16, INNER + 16, has_gate=True),
    "int8 down 32": partial(multiply_int8, 16, has_gate=False),
    "int8 down 64": partial(multiply_int8, 64, has_gate=False),
    "int8 down odd": partial(multiply_int8, 256, HIDDEN + 16, INNER + 16, has_gate=False),
    "tiles": partial(multiply_tiles, is_transposed=False),
    "tiles transposed": partial(multiply_tiles, is_transposed=True),
}


KERNELS = {
    **LOW_LATENCY,
    **ROWS,
    **QUANTIZE,
    **GATES,
    **PRODUCTS,
    "int8 hidden": quantize_hidden,
    **{f"sm_120 {name}": PRODUCTS[name] for name in ("fp8 gate_up", "int8 gate_up 128")},
}


def compiled(name: str) -> dict[str, Any]:
    is_workstation = name.startswith("sm_120")
    limits = DeviceLimits(shared_bytes=99 * 1024, major=12) if is_workstation else DeviceLimits()
    for module in (gemm_fp8, fixed_tiles):
        vars(module)["device_limits"] = lambda device: limits
    return code_of(KERNELS[name], WORKSTATION if is_workstation else HOPPER)


def main() -> None:
    driver.set_active(cast(Any, DEVICE))
    # Launchers check for memory of a GPU, and ask what the GPU can do.
    launch.IS_INTERPRETED = True
    for module in (ll_dispatch_send, constexprs, quantize_fp8):
        vars(module)["has_e4m3"] = lambda device: True
    dependent_launch.has_dependent_launch = lambda device: True
    # A compiler takes one core.
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(json.dumps(dict(zip(KERNELS, pool.map(compiled, KERNELS, chunksize=1), strict=True))))


if __name__ == "__main__":
    main()
