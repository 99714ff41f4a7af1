"""Kernels compiled for sm_90 without a GPU: wide accesses, fences, acquires, rounding, spills."""

import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.compiling import compiled_by

pytestmark = pytest.mark.slow

pytest.importorskip("triton")
ADD_TO_PEERS = "REDG.E.ADD.STRONG.SYS"
EXCHANGE = "ATOMG.E.EXCH.STRONG.SYS"
# A load that acquires is the first of these before the second.
ACQUIRED, DROP_L1 = "LDG.E.STRONG.SYS", "CCTL.IVALL"
BARRIER, FENCE = "BAR.SYNC.DEFER_BLOCKING", "MEMBAR.ALL.SYS"

# Kernels that move rows between memories of GPUs, or within one.
QUANTIZED_SUMS = ("fp8_e4m3/128", "mxfp8", "nvfp4")
SENT_SUMS = [f"send combine {sums}" for sums in QUANTIZED_SUMS]
SUMS = [f"receive combine {sums}" for sums in QUANTIZED_SUMS]
SUMS_IN_LINES = [f"receive lines {sums}" for sums in QUANTIZED_SUMS]
MOVERS = [
    # A thread has 8 bytes of the codes of nvfp4.
    *(name for name in (*SENT_SUMS, *SUMS) if "nvfp4" not in name),
    *("send dispatch bf16", "send dispatch fp8", "send dispatch int8", "send dispatch odd"),
    *("send dispatch words", "send combine", "send combine groups", "send combine slots"),
    *("receive combine", "receive combine groups", "receive combine slots"),
    "receive combine at source",
    *("gather bf16", "gather fp8", "sums bf16 weighted", "sums fp32", "sums of parts"),
    *("scatter bf16", "scatter fp8", "fp8 bf16", "fp8 fp32", "fp8 without hardware"),
    *("int8 rint127", "int8 div", "int8 triton", "mxfp8", "mxfp4"),
    *(f"restore {dtype}" for dtype in ("fp8_e4m3", "int8", "mxfp8", "mxfp4")),
]
LINES = [
    *SUMS_IN_LINES,
    *("send lines bf16", "send lines fp8", "send lines words"),
    *("receive lines", "receive lines groups", "receive lines slots"),
]
# A line is loaded as one.
LOAD_LINE, WIDE_LOAD = "ld.volatile.global.b128", "LDG.E.128.STRONG.SYS"
# Kernels that signal their writes to other ranks.
PUBLISHERS = [
    *SENT_SUMS,
    *("send dispatch bf16", "send dispatch fp8", "send dispatch int8", "send dispatch odd"),
    *("send dispatch words", "send combine", "send combine groups", "send combine slots"),
    "barrier",
]
# Kernels that wait for what other ranks wrote.
WAITERS = [
    *SUMS,
    *("receive dispatch", "receive dispatch masked", "receive combine"),
    *("receive combine groups", "receive combine slots", "receive combine at source", "barrier"),
]
# Kernels whose results are bit-equal to plain torch.
EXACT = [
    # Fused operations correct quotients of nvfp4.
    *(name for name in SENT_SUMS if "nvfp4" not in name),
    *(*SUMS, *SUMS_IN_LINES),
    *("dots bf16", "sums bf16 weighted", "sums fp32", "sums of parts", "fp8 bf16"),
    *("fp8 powers of two", "fp8 without hardware", "int8 rint127", "int8 hidden"),
    *("int8 down 64", "int8 down odd"),
]
MXFP8 = [f"mxfp8 {name} {tile}" for name in ("gate_up", "down") for tile in (32, 128)]
PRODUCTS = [
    *("fp8 gate_up", "fp8 down", "int8 gate_up 128", "int8 gate_up odd"),
    *("int8 down 64", "int8 down odd", "tiles", "tiles transposed"),
    *MXFP8,
]
Code = Mapping[str, Mapping[str, Any]]


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Code:
    program = Path(__file__).with_name("compile_kernels.py")
    return compiled_by(program, tmp_path_factory.mktemp("triton"))


def operations(code: Code, kernel: str) -> list[str]:
    """Return the instructions of memory and barriers, in the order of the code."""
    return re.findall(
        r"\b((?:STG|LDGSTS|LDG|REDG|ATOMG|MEMBAR|CCTL|BAR)\.[A-Z0-9_.]+|STL|LDL)\b",
        code[kernel]["sass"],
    )


def test_nothing_is_spilled(code: Code) -> None:
    spilled = [
        name
        for name, each in code.items()
        if {"STL", "LDL"} & set(operations(code, name)) or ".local" in each["ptx"]
    ]
    # 16 warps leave layout so few registers that it keeps some words in memory.
    assert spilled == ["layout"]


@pytest.mark.parametrize("kernel", MOVERS)
def test_rows_move_16_bytes_at_a_time(kernel: str, code: Code) -> None:
    ptx = code[kernel]["ptx"]
    accesses = re.findall(r"\b(?:ld|st)\.(?:\w+\.)*global\S*", ptx)
    assert any(re.match(r"st\..*v4\.b32|st\..*v2\.b64", each) for each in accesses)
    assert any(re.match(r"ld\..*v4\.b32|ld\..*v2\.b64", each) for each in accesses)
    # Stores and loads of an unaligned address.
    assert not [each for each in accesses if each.endswith((".b16", ".u16"))]
    assert "STG.E.U16" not in operations(code, kernel)


@pytest.mark.parametrize("kernel", PUBLISHERS)
def test_words_for_other_ranks_follow_a_barrier_and_a_fence(kernel: str, code: Code) -> None:
    found = operations(code, kernel)
    words = [place for place, each in enumerate(found) if each in (ADD_TO_PEERS, EXCHANGE)]
    assert words
    for word in words:
        before = found[:word]
        since_barrier = before[len(before) - before[::-1].index(BARRIER) :]
        # Addresses of peers may be loaded before the fence; nothing is stored after the barrier.
        assert since_barrier[-1] == FENCE
        assert all(each.startswith("LDG.") for each in since_barrier[:-1])


@pytest.mark.parametrize("kernel", WAITERS)
def test_waits_acquire_before_anything_is_read(kernel: str, code: Code) -> None:
    found = operations(code, kernel)
    acquires = [at for at, pair in enumerate(pairwise(found)) if pair == (ACQUIRED, DROP_L1)]
    assert acquires
    for acquire in acquires:
        after = found[acquire + 2 :]
        reads = [
            at for at, each in enumerate(after) if each.startswith("LDG") and "STRONG" not in each
        ]
        assert after.index(BARRIER) < min(reads, default=len(after))


@pytest.mark.parametrize("kernel", LINES)
def test_lines_travel_without_a_fence(kernel: str, code: Code) -> None:
    found = operations(code, kernel)
    # A rank that times out reports it to all ranks with a release; nothing is acquired.
    assert found.count(FENCE) == found.count(EXCHANGE) == 1
    assert DROP_L1 not in found
    wide = WIDE_LOAD if kernel.startswith("receive") else "STG.E.128.STRONG.SYS"
    assert wide in found


def test_release_of_a_buffer_needs_no_fence(code: Code) -> None:
    assert not [each for each in operations(code, "release buffer") if each.startswith("MEMBAR")]


@pytest.mark.parametrize(
    ("kernel", "first", "num_lines"),
    [
        # Metadata of all tokens that are unpacked at once, and a piece of the row of each.
        ("receive dispatch", "header", 1 + 4),
        ("receive dispatch masked", "header", 2),
        # Of each rank, group or slot.
        ("receive lines", "combined", 8),
        ("receive lines groups", "combined", 32),
        ("receive lines slots", "combined", 8),
        # And as many of scales, of blocks and of rows.
        *((name, "combined", 24 if "nvfp4" in name else 16) for name in SUMS_IN_LINES),
    ],
)
def test_a_look_loads_each_line_once(kernel: str, first: str, num_lines: int, code: Code) -> None:
    """A line that is loaded twice, for its flag and its words, may change between the loads."""
    ttgir = code[kernel]["ttgir"]
    begin = re.search(rf"%{first}_?\d* = tt\.load .*isVolatile", ttgir)
    assert begin
    look = ttgir[begin.start() : ttgir.index("scf.if", begin.start())]
    assert look.count(LOAD_LINE) == num_lines
    # The assembler makes no smaller loads of the words that are used.
    assert operations(code, kernel).count(WIDE_LOAD) >= code[kernel]["ptx"].count(LOAD_LINE)


@pytest.mark.parametrize("kernel", EXACT)
def test_arithmetic_rounds_as_plain_torch_does(kernel: str, code: Code) -> None:
    ptx = code[kernel]["ptx"]
    assert set(re.findall(r"\b(?:div|rcp)\.\S*f32", ptx)) <= {"div.rn.f32"}
    assert not re.search(r"\bfma\.rn\.f(?:32|64)", ptx)
    # Only floor() of numbers that are not subnormal may flush small numbers to zero.
    assert set(re.findall(r"\S*\.ftz\S*", ptx)) <= {"cvt.rmi.ftz.f32.f32"}


def test_hardware_converts_to_fp8_where_it_can(code: Code) -> None:
    instruction = "cvt.rn.satfinite.e4m3x2.f32"
    assert instruction in code["fp8 bf16"]["ptx"]
    assert instruction not in code["fp8 without hardware"]["ptx"]


def test_only_counts_are_atomic(code: Code) -> None:
    rows = ("gather bf16", "sums bf16 weighted", "scatter bf16", "slots", "order", "layout")
    assert not [name for name in rows if re.search(r"\b(?:atom|red)\.", code[name]["ptx"])]


@pytest.mark.parametrize("kernel", PRODUCTS)
def test_products_use_tensor_cores_and_tma(kernel: str, code: Code) -> None:
    ptx = code[kernel]["ptx"]
    assert re.search(r"wgmma\.mma_async\..*(?:e4m3\.e4m3|s32\.s8\.s8|bf16\.bf16)", ptx)
    assert f"cp.async.bulk.tensor.{3 if kernel in MXFP8 else 2}d.shared" in ptx
    # Rows are copied, and results stored, in units of 16 bytes; scales of mxfp8 are few.
    scales = {"0x4", "st.global.b8", "st.global.b16"} if kernel in MXFP8 else set()
    copies = set(re.findall(r"\bcp\.async\.c[ag]\S* \[[^\]]*\], \[[^\]]*\], (\w+)", ptx))
    assert copies - scales == {"0x10"}
    stores = set(re.findall(r"\bst\.global\S*", ptx))
    assert stores - scales <= {"st.global.v4.b32", "st.global.b32"}


@pytest.mark.parametrize("kernel", MXFP8)
def test_operands_are_loaded_at_once_and_written_after_products(kernel: str, code: Code) -> None:
    """A thread loads 16 codes; no register is written while a product may read its operand."""
    ptx = code[kernel]["ptx"]
    assert "ld.shared.v4.b32" in ptx
    assert "ld.shared.b16" not in ptx
    read: set[int] = set()
    product_of = re.compile(r"HGMMA\S* R\d+, R(\d+),")
    assert product_of.search(code[kernel]["sass"])
    for line in code[kernel]["sass"].splitlines():
        if product := product_of.search(line):
            read |= {int(product[1]) + number for number in range(4)}
        elif "WARPGROUP.DEPBAR.LE gsb0, 0x0" in line:
            read = set()
        elif read:
            assert "BRA" not in line
            written = re.search(r"\*/ +(?:@\S+ +)?\S+ (?:PT, )?R(\d+)", line)
            assert not written or int(written[1]) not in read


def test_few_rows_use_the_smaller_tensor_core_instruction(code: Code) -> None:
    assert re.search(r"mma\.sync\..*m16n8k32.*s32\.s8\.s8\.s32", code["int8 down 32"]["ptx"])


@pytest.mark.parametrize(
    ("kernel", "most"),
    [
        *((name, 227) for name in PRODUCTS),
        ("sm_120 fp8 gate_up", 99),
        ("sm_120 int8 gate_up 128", 99),
    ],
)
def test_tiles_fit_into_shared_memory(kernel: str, most: int, code: Code) -> None:
    assert 0 < code[kernel]["shared_bytes"] <= most * 1024


def test_gates_reduce_by_one_instruction_and_count_without_an_answer(code: Code) -> None:
    sass = code["gate deepseek v3"]["sass"]
    assert "REDUX." in sass
    assert re.search(r"\bREDG?\.E\.ADD\.64", sass)
    assert not re.search(r"\bATOMG?\.", sass)
