"""Compile the products of eight-bit experts, without a GPU; print what came as JSON.

A program of its own: kernels of the test process are interpreted, and those cannot be compiled.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from epcomm.kernels.gemm import fp8 as gemm_fp8
from epcomm.kernels.gemm import int8 as gemm_int8
from epcomm.kernels.gemm.fp8 import _down_fp8_kernel, _gate_up_fp8_kernel
from epcomm.kernels.gemm.int8 import (
    _down_int8_kernel,
    _gate_up_int8_kernel,
    _quantize_hidden_int8_kernel,
    down_columns,
)
from epcomm.kernels.launch import EXACT, DeviceLimits, warps_for

HOPPER = GPUTarget("cuda", 90, 32)
# Blackwell of workstations, whose blocks have 99 KB of shared memory.
WORKSTATION = GPUTarget("cuda", 120, 32)
DEVICE_LIMITS = {
    HOPPER: DeviceLimits(),
    WORKSTATION: DeviceLimits(shared_bytes=99 * 1024, major=12),
}
EXPERTS, HIDDEN, INNER = 32, 7168, 2048
# Multiples of 16 and of nothing larger: the last blocks are not full.
ODD_HIDDEN, ODD_INNER = 7184, 2064
# As at run time: memory from torch begins at multiples of 16 bytes.
IS_ALIGNED = [["tt.divisibility", 16]]


def compiled(
    kernel: triton.JITFunction,
    signature: Mapping[str, str],
    options: Mapping[str, Any],
    *,
    target: GPUTarget = HOPPER,
    **constants: object,
) -> dict[str, str | int]:
    """PTX of one variant, compiled as the launcher would, what ptxas says, and shared memory."""
    assert kernel.arg_names[: len(signature)] == list(signature), "positions are the signature's"
    attributes = {
        (place,): IS_ALIGNED for place, kind in enumerate(signature.values()) if kind[0] == "*"
    }
    source = ASTSource(
        kernel,
        {**signature, **dict.fromkeys(constants, "constexpr")},
        {(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attributes,
    )
    made = triton.compile(source, target=target, options=dict(options))
    ptx = made.asm["ptx"]
    # The assembler that comes for sm_90 need not know newer ones.
    messages = assembled(ptx) if target == HOPPER else ""
    return {"ptx": ptx, "ptxas": messages, "shared_bytes": made.metadata.shared}


def assembled(ptx: str) -> str:
    """Return ptxas's report of registers and spills."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx, encoding="utf-8")
        target = re.search(r"\.target (\w+)", ptx)
        assert target, "PTX names its target"
        command = [knobs.nvidia.ptxas.path, "-v", f"--gpu-name={target[1]}", str(path), "-o"]
        done = subprocess.run(
            [*command, str(path.with_suffix(".cubin"))], capture_output=True, text=True, check=True
        )
    return done.stderr


def pointers(**kinds: str) -> dict[str, str]:
    return {name if name == "matrix" else f"{name}_ptr": kind for name, kind in kinds.items()}


def experts(tile_rows: int) -> dict[str, object]:
    return {"NUM_EXPERTS": EXPERTS, "EXPERTS_POW2": EXPERTS, "TILE_ROWS": tile_rows, "BLOCK": 128}


def fp8_gate_up(target: GPUTarget = HOPPER) -> dict[str, str | int]:
    return compiled(
        _gate_up_fp8_kernel,
        pointers(
            x="*fp8e4nv",
            x_scales="*fp32",
            row_of_slot="*i32",
            counts="*i32",
            first_slot="*i32",
            matrix="tensordesc<fp8e4nv[128, 128]>",
            matrix_scales="*fp32",
            out="*u8",
            out_scales="*fp32",
        ),
        gemm_fp8.gemm_options(64, 256, num_warps=8, limits=DEVICE_LIMITS[target]),
        target=target,
        HIDDEN=HIDDEN,
        INNER=INNER,
        X_STRIDE=HIDDEN,
        X_SCALES_STRIDE=HIDDEN // 128,
        HAS_INDEX=True,
        IS_INTERPRETED=False,
        **experts(64),
    )


def fp8_down(target: GPUTarget = HOPPER) -> dict[str, str | int]:
    return compiled(
        _down_fp8_kernel,
        pointers(
            x="*fp8e4nv",
            x_scales="*fp32",
            counts="*i32",
            first_slot="*i32",
            matrix="tensordesc<fp8e4nv[128, 128]>",
            matrix_scales="*fp32",
            slot_weights="*fp32",
            out="*bf16",
        ),
        gemm_fp8.gemm_options(64, 128, num_warps=4, limits=DEVICE_LIMITS[target]),
        target=target,
        HIDDEN=HIDDEN,
        INNER=INNER,
        HAS_WEIGHTS=True,
        **experts(64),
    )


def int8_gate_up(
    tile_rows: int, hidden: int = HIDDEN, inner: int = INNER, *, target: GPUTarget = HOPPER
) -> dict[str, str | int]:
    return compiled(
        _gate_up_int8_kernel,
        pointers(
            x="*i8",
            x_scales="*fp32",
            row_of_slot="*i32",
            counts="*i32",
            first_slot="*i32",
            matrix="tensordesc<i8[128, 128]>",
            matrix_scales="*fp32",
            out="*fp32",
        ),
        gemm_int8.gemm_options(tile_rows, 256, DEVICE_LIMITS[target]),
        target=target,
        HIDDEN=hidden,
        INNER=inner,
        X_STRIDE=hidden,
        X_SCALES_STRIDE=1,
        HAS_INDEX=True,
        **experts(tile_rows),
    )


def int8_down(
    tile_rows: int, hidden: int = HIDDEN, inner: int = INNER, *, target: GPUTarget = HOPPER
) -> dict[str, str | int]:
    columns = down_columns(tile_rows)
    return compiled(
        _down_int8_kernel,
        pointers(
            x="*i8",
            x_scales="*fp32",
            counts="*i32",
            first_slot="*i32",
            matrix=f"tensordesc<i8[{columns}, 128]>",
            matrix_scales="*fp32",
            slot_weights="*fp32",
            out="*bf16",
        ),
        gemm_int8.gemm_options(tile_rows, columns, DEVICE_LIMITS[target]),
        target=target,
        HIDDEN=hidden,
        INNER=inner,
        HAS_WEIGHTS=True,
        TILE_COLUMNS=columns,
        **experts(tile_rows),
    )


def int8_hidden() -> dict[str, str | int]:
    rows, columns = 4, INNER
    return compiled(
        _quantize_hidden_int8_kernel,
        pointers(hidden="*fp32", counts="*i32", first_slot="*i32", codes="*i8", scales="*fp32"),
        {"num_warps": warps_for(rows * columns), **EXACT},
        INNER=INNER,
        NUM_EXPERTS=EXPERTS,
        EXPERTS_POW2=EXPERTS,
        TILE_ROWS=rows,
        TILE_COLUMNS=columns,
        PROFILE="rint127",
    )


def main() -> None:
    variants = {
        "fp8 gate_up": fp8_gate_up(),
        "fp8 down": fp8_down(),
        "int8 hidden": int8_hidden(),
    }
    for tile_rows in (32, 64, 128):
        variants[f"int8 gate_up {tile_rows}"] = int8_gate_up(tile_rows)
        variants[f"int8 down {tile_rows}"] = int8_down(tile_rows)
    variants["int8 gate_up odd"] = int8_gate_up(128, ODD_HIDDEN, ODD_INNER)
    variants["int8 down odd"] = int8_down(128, ODD_HIDDEN, ODD_INNER)
    for tile_rows in (32, 64, 128):
        for name, make in (("gate_up", int8_gate_up), ("down", int8_down)):
            variants[f"sm_120 int8 {name} {tile_rows}"] = make(tile_rows, target=WORKSTATION)
    variants["sm_120 fp8 gate_up"] = fp8_gate_up(WORKSTATION)
    variants["sm_120 fp8 down"] = fp8_down(WORKSTATION)
    print(json.dumps(variants))


if __name__ == "__main__":
    main()
