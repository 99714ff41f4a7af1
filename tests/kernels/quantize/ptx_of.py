"""Compile the quantisation kernels for sm_90, without a GPU, and print their PTX as JSON.

A program of its own: kernels of the test process are interpreted, and those cannot be compiled.
"""

from __future__ import annotations

import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from epcomm.kernels.launch import EXACT, next_power_of_two, warps_for
from epcomm.kernels.quantize.fp8 import _quantize_fp8_kernel, tile_of
from epcomm.kernels.quantize.int8 import _quantize_int8_kernel

HOPPER = GPUTarget("cuda", 90, 32)
HIDDEN = 7168
# What the launcher is given for a row of 7168 codes, 56 scales, and a few ids and weights.
ROW_BYTES = 7168 + 4 * 56 + 64
# As at run time: memory from torch begins at multiples of 16 bytes.
IS_ALIGNED = [["tt.divisibility", 16]]


def ptx(
    kernel: triton.JITFunction, num_elements: int, signature: dict[str, str], **constants: object
) -> str:
    """PTX of one variant, compiled as the launcher would; num_elements: of a program."""
    names = list(signature)
    attributes = {
        (position,): IS_ALIGNED for position, kind in enumerate(signature.values()) if "*" in kind
    }
    source = ASTSource(
        kernel,
        signature | dict.fromkeys(constants, "constexpr"),
        {(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attributes,
    )
    assert kernel.arg_names[: len(names)] == names, "positions are those of the signature"
    options = {"num_warps": warps_for(num_elements), **EXACT}
    return triton.compile(source, target=HOPPER, options=options).asm["ptx"]


def fp8(x_type: str, scale_type: str, *, has_e4m3: bool = True) -> str:
    is_power_of_two = scale_type == "*u8"
    tile_blocks, tile_columns = tile_of(128)
    return ptx(
        _quantize_fp8_kernel,
        tile_blocks * tile_columns,
        {"x_ptr": x_type, "codes_ptr": "*u8", "scales_ptr": scale_type, "num_blocks": "i32"},
        HIDDEN=HIDDEN,
        BLOCK=128,
        X_STRIDE=HIDDEN,
        CODES_STRIDE=ROW_BYTES,
        SCALES_STRIDE=ROW_BYTES // (1 if is_power_of_two else 4),
        IS_POWER_OF_TWO=is_power_of_two,
        HAS_E4M3=has_e4m3,
        TILE_BLOCKS=tile_blocks,
        TILE_COLUMNS=tile_columns,
    )


def int8(x_type: str, profile: str) -> str:
    tile_columns = next_power_of_two(HIDDEN)
    return ptx(
        _quantize_int8_kernel,
        tile_columns,
        {"x_ptr": x_type, "codes_ptr": "*i8", "scales_ptr": "*fp32"},
        HIDDEN=HIDDEN,
        X_STRIDE=HIDDEN,
        CODES_STRIDE=ROW_BYTES,
        SCALES_STRIDE=ROW_BYTES // 4,
        PROFILE=profile,
        TILE_COLUMNS=tile_columns,
    )


def main() -> None:
    variants = {
        "fp8 bf16": fp8("*bf16", "*fp32"),
        "fp8 fp16": fp8("*fp16", "*fp32"),
        "fp8 fp32": fp8("*fp32", "*fp32"),
        "fp8 bf16 powers of two": fp8("*bf16", "*u8"),
        "fp8 bf16 without hardware": fp8("*bf16", "*fp32", has_e4m3=False),
        "int8 bf16 rint127": int8("*bf16", "rint127"),
        "int8 fp32 div": int8("*fp32", "div"),
        "int8 bf16 divtrunc16": int8("*bf16", "divtrunc16"),
        "int8 bf16 triton": int8("*bf16", "triton"),
    }
    print(json.dumps(variants))


if __name__ == "__main__":
    main()
