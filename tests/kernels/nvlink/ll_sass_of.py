"""Compile the NVLink kernels for sm_90, without a GPU; print PTX and machine code as JSON.

A program of its own: kernels of the test process are interpreted, and those cannot be compiled.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from epcomm.buffers.nvlink.low_latency import NVLinkLowLatencyBuffer
from epcomm.kernels.nvlink import (
    ll_combine,
    ll_combine_slots,
    ll_dispatch_recv,
    ll_dispatch_send,
)
from epcomm.kernels.nvlink.common import barrier
from epcomm.kernels.nvlink.common.exchange import LayoutT, LowLatencyExchange, PeerBlocks
from epcomm.kernels.nvlink.lines import combine_recv, dispatch_send
from epcomm.quantization import FP8_FLOAT32_SCALES, INT8_PER_TOKEN
from epcomm.spec import BufferSpec
from epcomm.types import WireFormat

HOPPER = GPUTarget("cuda", 90, 32)
# As at run time: memory from torch begins at multiples of 16 bytes.
IS_ALIGNED = [["tt.divisibility", 16]]
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}
PLAIN = WireFormat.of(torch.bfloat16)


class _Recorder:
    """Stands in for a kernel: keeps what its launcher passes."""

    def __init__(self, kernel: triton.JITFunction) -> None:
        self.kernel = kernel
        self.arguments: tuple[object, ...] = ()
        self.named: dict[str, object] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> _Recorder:
        return self

    def __call__(self, *arguments: object, **named: object) -> None:
        self.arguments, self.named = arguments, named

    def compiled(self) -> dict[str, str]:
        """As the launcher would have it compiled; its integers are 64 bits wide."""
        names = list(self.kernel.arg_names)
        options = {n: v for n, v in self.named.items() if n not in names}
        constants = {n: v for n, v in self.named.items() if n in names}
        signature: dict[str, str] = {}
        attributes = {}
        for place, (name, value) in enumerate(zip(names, self.arguments, strict=False)):
            if isinstance(value, torch.Tensor):
                signature[name] = TYPES[value.dtype]
                attributes[(place,)] = IS_ALIGNED
            elif value is None:
                constants[name] = None
            else:
                assert isinstance(value, int), name
                signature[name] = "i64" if abs(value) >= 2**31 else "i32"
        source = ASTSource(
            self.kernel,
            signature | dict.fromkeys(constants, "constexpr"),
            {(names.index(name),): value for name, value in constants.items()},
            attributes,
        )
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            made = triton.compile(source, target=HOPPER, options=options)
        return {
            "ptx": made.asm["ptx"],
            "ttgir": made.asm["ttgir"],
            "ptxas": log.getvalue(),
            "sass": _disassembled(made.asm["cubin"]),
        }


def _disassembled(cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.nvdisasm.path, "-c", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def blocks_of(layout: LayoutT, num_programs: int, num_counters: int) -> PeerBlocks[LayoutT]:
    """Return blocks as a rank of an H200 has them; their addresses are never used."""
    size = layout.world_size
    return PeerBlocks(
        rank=0,
        num_programs=num_programs,
        max_polls=2**20,
        own_address=2**40,
        table=torch.zeros(size, dtype=torch.int64),
        layout=layout,
        excluded=torch.zeros(size, dtype=torch.int32),
        counters=torch.zeros(num_counters, dtype=torch.int64),
        faults=torch.zeros(size, 2, dtype=torch.int64),
        report=torch.zeros(4 + size, dtype=torch.int32),
    )


def exchange_of(
    wire: WireFormat, hidden_size: int, world_size: int, *, returns_slots: bool = False
) -> LowLatencyExchange:
    """Return a receive buffer as a rank of an H200 has it."""
    spec = BufferSpec(
        hidden_size=hidden_size,
        top_k=8,
        num_local_experts=256 // world_size,
        dispatch_format=wire,
        hidden_format=PLAIN,
        max_tokens_per_rank=128,
        returns_slots=returns_slots,
    )
    layout = NVLinkLowLatencyBuffer.layout_for(spec, world_size)
    return LowLatencyExchange.of(blocks_of(layout, num_programs=128, num_counters=4), 0)


def recorded(module: object, name: str) -> _Recorder:
    """Put a recorder in the place of a kernel, for the rest of this process."""
    found = getattr(module, name)
    if isinstance(found, _Recorder):
        return found
    recorder = _Recorder(found)
    setattr(module, name, recorder)
    return recorder


def sent_dispatch(
    wire: WireFormat, hidden_size: int = 7168, world_size: int = 8, *, in_lines: bool = False
) -> dict[str, str]:
    if in_lines:
        module, name = dispatch_send, "send_dispatch_lines"
    else:
        module, name = ll_dispatch_send, "send_dispatch"
    recorder = recorded(module, f"_{name}_kernel")
    kinds: Mapping[WireFormat, int] = {
        PLAIN: ll_dispatch_send.PLAIN,
        FP8_FLOAT32_SCALES: ll_dispatch_send.FP8,
        INT8_PER_TOKEN: ll_dispatch_send.INT8,
    }
    # Instead of the device that is not here.
    setattr(module, "has_e4m3", lambda device: True)  # noqa: B010 - either module
    getattr(module, name)(
        exchange_of(wire, hidden_size, world_size),
        torch.zeros(2, hidden_size, dtype=torch.bfloat16),
        torch.zeros(2, 8, dtype=torch.int64),
        torch.zeros(2, 8),
        torch.zeros(128, world_size, dtype=torch.uint8),
        status=0,
        batch=0,
        is_captured=False,
        kind=kinds[wire],
        scale_block=wire.scale_block or hidden_size,
        profile="rint127",
    )
    return recorder.compiled()


def sent_words(*, in_lines: bool = False) -> dict[str, str]:
    """Rows that are quantised already, of weights that come with combine."""
    module = dispatch_send if in_lines else ll_dispatch_send
    name = "send_dispatch_lines" if in_lines else "send_dispatch"
    recorder = recorded(module, f"_{name}_kernel")
    getattr(module, name)(
        exchange_of(FP8_FLOAT32_SCALES, 7168, 8, returns_slots=True),
        torch.zeros(2, 7168 // 4, dtype=torch.int32),
        torch.zeros(2, 8, dtype=torch.int64),
        None,
        torch.zeros(128, 8, dtype=torch.uint8),
        status=0,
        batch=0,
        is_captured=False,
        kind=ll_dispatch_send.PLAIN,
        scale_block=128,
        profile="rint127",
        scales=torch.zeros(2, 56, dtype=torch.int32),
    )
    return recorder.compiled()


def received_dispatch(*, is_masked: bool = False) -> dict[str, str]:
    recorder = recorded(ll_dispatch_recv, "_receive_dispatch_kernel")
    integers = torch.zeros(8, dtype=torch.int32)
    slabs = ll_dispatch_recv.Slabs(
        data=integers,
        scales=integers,
        scale_strides=(56 * 1024, 1, 1024),
        token_of_slot=integers,
        source_ranges=torch.zeros(8, dtype=torch.int64),
    )
    ll_dispatch_recv.receive_dispatch(
        exchange_of(FP8_FLOAT32_SCALES if is_masked else PLAIN, 7168, 8, returns_slots=is_masked),
        None if is_masked else torch.zeros(8192, dtype=torch.int32),
        integers,
        None if is_masked else torch.zeros(8),
        integers,
        integers,
        expert_alignment=1,
        is_captured=False,
        slabs=slabs if is_masked else None,
    )
    return recorder.compiled()


def met() -> dict[str, str]:
    recorder = recorded(barrier, "_barrier_kernel")
    words = torch.zeros(8, dtype=torch.int32)
    barrier.device_barrier(
        torch.zeros(8, dtype=torch.int64),
        words,
        words,
        flags_address=2**40,
        rank=0,
        number=1,
        max_polls=2**20,
    )
    return recorder.compiled()


def released() -> dict[str, str]:
    recorder = recorded(ll_dispatch_recv, "_release_buffer_kernel")
    ll_dispatch_recv.release_buffer(exchange_of(PLAIN, 7168, 8))
    return recorder.compiled()


def sent_combine(hidden_size: int = 7168, world_size: int = 8) -> dict[str, str]:
    recorder = recorded(ll_combine, "_send_combine_kernel")
    ll_combine.send_combine(
        exchange_of(PLAIN, hidden_size, world_size),
        torch.zeros(2, hidden_size, dtype=torch.bfloat16),
        torch.zeros(2),
        torch.zeros(2, 8, dtype=torch.int32),
        per_row=False,
        batch=0,
        status=0,
    )
    return recorder.compiled()


def received_combine(hidden_size: int = 7168, world_size: int = 8) -> dict[str, str]:
    recorder = recorded(ll_combine, "_receive_combine_kernel")
    ll_combine.receive_combine(
        exchange_of(PLAIN, hidden_size, world_size),
        torch.zeros(2, hidden_size, dtype=torch.bfloat16),
        torch.zeros(128, world_size, dtype=torch.uint8),
        batch=0,
    )
    return recorder.compiled()


def received_combine_lines(hidden_size: int = 7168, world_size: int = 8) -> dict[str, str]:
    recorder = recorded(combine_recv, "_receive_combine_lines_kernel")
    combine_recv.receive_combine_lines(
        exchange_of(PLAIN, hidden_size, world_size),
        torch.zeros(2, hidden_size, dtype=torch.bfloat16),
        torch.zeros(128, world_size, dtype=torch.uint8),
        2,
        batch=0,
    )
    return recorder.compiled()


def sent_slots() -> dict[str, str]:
    recorder = recorded(ll_combine_slots, "_send_slots_kernel")
    ll_combine_slots.send_slots(
        exchange_of(PLAIN, 7168, 8, returns_slots=True),
        torch.zeros(2, 7168, dtype=torch.bfloat16),
        torch.zeros(2, 8, dtype=torch.int32),
        batch=0,
        status=0,
    )
    return recorder.compiled()


def received_slots(*, in_lines: bool = False) -> dict[str, str]:
    exchange = exchange_of(PLAIN, 7168, 8, returns_slots=True)
    y, weights = torch.zeros(2, 7168, dtype=torch.bfloat16), torch.zeros(2, 8)
    is_sent = torch.zeros(128, 8, dtype=torch.uint8)
    if in_lines:
        recorder = recorded(combine_recv, "_receive_combine_lines_kernel")
        combine_recv.receive_combine_lines(exchange, y, is_sent, 2, weights, batch=0)
    else:
        recorder = recorded(ll_combine, "_receive_combine_kernel")
        ll_combine.receive_combine(exchange, y, is_sent, weights, batch=0)
    return recorder.compiled()


def print_compiled(variants: Mapping[str, Callable[[], dict[str, str]]]) -> None:
    # The compiler prints what ptxas says of registers and spills, which a cache would not. Not when
    # this is imported: the knobs are variables of the environment, which other programs inherit.
    knobs.nvidia.dump_ptxas_log = True
    knobs.compilation.always_compile = True
    # A compiler takes one core.
    with multiprocessing.get_context("fork").Pool(2) as pool:
        waiting = {name: pool.apply_async(compiled) for name, compiled in variants.items()}
        print(json.dumps({name: each.get() for name, each in waiting.items()}))


def main() -> None:
    variants = {
        "send dispatch bf16": partial(sent_dispatch, PLAIN),
        "send dispatch fp8": partial(sent_dispatch, FP8_FLOAT32_SCALES),
        "send dispatch int8": partial(sent_dispatch, INT8_PER_TOKEN),
        # Three ranks, and rows of 16 bytes more than a power of two.
        "send dispatch odd": partial(sent_dispatch, PLAIN, 2056, 3),
        "send lines bf16": partial(sent_dispatch, PLAIN, in_lines=True),
        "send lines fp8": partial(sent_dispatch, FP8_FLOAT32_SCALES, in_lines=True),
        "send lines int8": partial(sent_dispatch, INT8_PER_TOKEN, in_lines=True),
        "receive dispatch": received_dispatch,
        "receive dispatch masked": partial(received_dispatch, is_masked=True),
        "release buffer": released,
        "barrier": met,
        "send combine": sent_combine,
        "receive combine": received_combine,
        "receive combine lines": received_combine_lines,
        "send dispatch words": sent_words,
        "send lines words": partial(sent_words, in_lines=True),
        "send combine slots": sent_slots,
        "receive combine slots": received_slots,
        "receive combine lines slots": partial(received_slots, in_lines=True),
    }
    print_compiled(variants)


if __name__ == "__main__":
    main()
