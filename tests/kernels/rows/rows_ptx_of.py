"""Compile the kernels on rows for sm_90, without a GPU, and print their PTX as JSON.

A program of its own: kernels of the test process are interpreted, and those cannot be compiled.
"""

from __future__ import annotations

import json

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from epcomm.kernels.launch import EXACT
from epcomm.kernels.rows.gather import _gather_rows_kernel
from epcomm.kernels.rows.scatter import _scatter_tokens_kernel
from epcomm.kernels.rows.sends import _count_sends_kernel, _order_sends_kernel
from epcomm.kernels.rows.slot_index import _number_slots_kernel
from epcomm.kernels.rows.sums import _sum_rows_kernel
from epcomm.kernels.rows.tiles import WARPS, tile_of
from epcomm.kernels.rows.token_layout import _write_token_layout_kernel

HOPPER = GPUTarget("cuda", 90, 32)
# A row of 7168 elements of 16 bits, and one with ids and weights behind it.
HIDDEN, ROW_BYTES = 7168, 2 * 7168 + 64
# As at run time: memory from torch begins at multiples of 16 bytes.
IS_ALIGNED = [["tt.divisibility", 16]]


def ptx(kernel: triton.JITFunction, signature: dict[str, str], **options: object) -> str:
    """PTX of one variant, compiled as the launcher would; `options` are constants, num_warps too.

    signature: of all arguments that are no constants, in their order; None compiled away.
    """
    num_warps = options.pop("num_warps", WARPS)
    constants = options | {name: None for name, kind in signature.items() if not kind}
    given = {name: kind for name, kind in signature.items() if kind}
    places = {name: kernel.arg_names.index(name) for name in (*given, *constants)}
    source = ASTSource(
        kernel,
        {name: given.get(name, "constexpr") for name in kernel.arg_names},
        {(places[name],): value for name, value in constants.items()},
        {(places[name],): IS_ALIGNED for name, kind in given.items() if "*" in kind},
    )
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": num_warps, **EXACT})
    return compiled.asm["ptx"]


def gather(kind: str, itemsize: int, stride: int) -> str:
    tile = tile_of(HIDDEN, itemsize)
    return ptx(
        _gather_rows_kernel,
        {"rows_ptr": kind, "row_of_slot_ptr": "*i32", "out_ptr": kind, "num_slots": "i32"},
        ROWS_STRIDE=stride,
        OUT_STRIDE=HIDDEN,
        HIDDEN=HIDDEN,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
    )


def sums(kind: str, itemsize: int, *, weights: str, sources: str = "*i32") -> str:
    tile = tile_of(HIDDEN, 2 * itemsize)
    return ptx(
        _sum_rows_kernel,
        {
            "rows_ptr": kind,
            "sources_ptr": sources,
            "weights_ptr": weights,
            "out_ptr": kind,
            "num_targets": "i32",
            "rows_per_part": "i32",
        },
        STRIDE=HIDDEN,
        OUT_STRIDE=HIDDEN,
        HIDDEN=HIDDEN,
        K=8,
        IS_UNROLLED=True,
        DTYPE=tl.float32,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
    )


def scatter(kind: str, itemsize: int, *, scales: str) -> str:
    tile = tile_of(HIDDEN, itemsize)
    return ptx(
        _scatter_tokens_kernel,
        {
            "x_ptr": kind,
            "scales_ptr": scales,
            "ids_ptr": "*i64",
            "weights_ptr": "*fp32",
            "row_of_rank_ptr": "*i32",
            "rows_ptr": kind,
            "row_scales_ptr": scales,
            "row_ids_ptr": "*i32",
            "row_weights_ptr": "*fp32",
            "num_tokens": "i32",
        },
        X_STRIDE=HIDDEN,
        ROWS_STRIDE=(itemsize * HIDDEN + 288) // itemsize,
        HIDDEN=HIDDEN,
        SCALES_STRIDE=56,
        ROW_SCALES_STRIDE=(itemsize * HIDDEN + 288) // 4,
        SCALES=56,
        SCALE_LANES=64,
        ROW_IDS_STRIDE=(itemsize * HIDDEN + 288) // 4,
        ROW_WEIGHTS_STRIDE=(itemsize * HIDDEN + 288) // 4,
        K=8,
        K_LANES=8,
        W=2,
        TOKENS=tile.rows,
        COLUMNS=tile.columns,
    )


def index() -> str:
    tables = ("row_of_slot", "slots_of_row", "slot_weights", "num_tokens", "first_slot")
    kinds = {f"{name}_ptr": "*fp32" if name == "slot_weights" else "*i32" for name in tables}
    return ptx(
        _number_slots_kernel,
        {
            "ids_ptr": "*i32",
            "weights_ptr": "*fp32",
            "counts_ptr": "*i64",
            **kinds,
            "num_pairs": "i32",
            "num_slots": "i32",
            "first_expert": "i32",
        },
        IDS_STRIDE=ROW_BYTES // 4,
        WEIGHTS_STRIDE=ROW_BYTES // 4,
        ALIGNMENT=1,
        K=8,
        L=128,
        L_LANES=128,
        GROUPS=32,
        PAIRS=2048,
        SEGMENT=8192,
        num_warps=8,
    )


def sends() -> tuple[str, str]:
    shared = {"WORDS": 138, "W": 2, "W_LANES": 2, "L": 128, "K": 8, "K_LANES": 8}
    words = ("kind", "check", "buffer", "dispatcher", "batch", "number", "size", "fault", "flags")
    counts = ptx(
        _count_sends_kernel,
        {
            "ids_ptr": "*i64",
            "header_ptr": "*i64",
            "rest_ptr": "*i64",
            "num_tokens": "i32",
            **dict.fromkeys(words, "i32"),
        },
        WRONG_IDS=2,
        FAULT_AT=7,
        FLAGS_AT=8,
        ROWS_AT=9,
        SLOTS_AT=10,
        NUM_HERE=128,
        TOKENS=32,
        **shared,
    )
    order = ptx(
        _order_sends_kernel,
        {
            "ids_ptr": "*i64",
            "header_ptr": "*i64",
            "row_of_rank_ptr": "*i32",
            "row_of_topk_ptr": "*i32",
            "num_tokens": "i32",
        },
        ROWS_AT=9,
        TOKENS=512,
        SEGMENT=2048,
        num_warps=8,
        **shared,
    )
    return counts, order


def layout() -> str:
    return ptx(
        _write_token_layout_kernel,
        {
            "ids_ptr": "*i64",
            "per_rank_ptr": "*i32",
            "per_expert_ptr": "*i32",
            "is_in_rank_ptr": "*i1",
            "num_tokens": "i32",
        },
        W=8,
        E=256,
        LOCAL=32,
        K=8,
        K_LANES=8,
        TOKENS=1024,
        EXPERTS=4,
        PAIRS=8192,
        num_warps=16,
    )


def main() -> None:
    counts, order = sends()
    variants = {
        "gather bf16": gather("*bf16", 2, HIDDEN),
        "gather bf16 from messages": gather("*bf16", 2, ROW_BYTES // 2),
        "gather fp8": gather("*u8", 1, HIDDEN + 288),
        "sums bf16": sums("*bf16", 2, weights=""),
        "sums bf16 weighted": sums("*bf16", 2, weights="*fp32"),
        "sums fp32 weighted": sums("*fp32", 4, weights="*fp32"),
        "sums bf16 of parts": sums("*bf16", 2, weights="", sources=""),
        "scatter bf16": scatter("*bf16", 2, scales=""),
        "scatter fp8": scatter("*u8", 1, scales="*fp32"),
        "index": index(),
        "counts": counts,
        "order": order,
        "layout": layout(),
    }
    print(json.dumps(variants))


if __name__ == "__main__":
    main()
