"""The FP8 products in CUDA C++: compiled everywhere, run on a Hopper GPU."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from epcomm import ShapeError  # noqa: E402
from epcomm.kernels.cuda_jit import (  # noqa: E402
    CudaError,
    compile_to_cubin,
    nvrtc_is_installed,
)
from epcomm.kernels.gemm import fp8_hopper  # noqa: E402
from epcomm.ops.slots import build_slot_index, count_experts  # noqa: E402
from epcomm.quantization import FP8_FLOAT32_SCALES, quantize  # noqa: E402
from epcomm.runners.fp8_wgmma import Fp8WgmmaRunner  # noqa: E402
from epcomm.runners.gpu_slots import first_product, second_product  # noqa: E402
from epcomm.runners.quantized_reference import QuantizedReferenceRunner  # noqa: E402
from epcomm.types import Int8Profile, Layout, WeightsAppliedBy  # noqa: E402
from epcomm.weights.quantized import Fp8BlockWeights  # noqa: E402
from epcomm.weights.unquantized import ExpertWeights  # noqa: E402
from tests.kernels.gemm.fp8_products import check_unused_slots_are_left  # noqa: E402
from tests.kernels.gemm.slot_records import (  # noqa: E402
    CASES,
    NUM_EXPERTS,
    Case,
    check_no_slots,
    check_poison_stays_in_its_rows,
    record,
)
from tests.kernels.gemm.test_fp8 import TOLERANCE, make_weights  # noqa: E402
from tests.runners.records import largest_error, results_of_experts, rows_record  # noqa: E402

CUOBJDUMP = Path(triton.__file__).with_name("backends") / "nvidia" / "bin" / "cuobjdump"
PRODUCTS = ("gate_up_fp8", "down_fp8_bfloat16", "down_fp8_float16")
# Those whose products start while results of the tile before are stored.
AHEAD = tuple(f"{name}_ahead" for name in PRODUCTS)
# Slots of an expert from which rows are copied into the order of slots.
PACKED_FROM = {"through the index": 1 << 20, "packed": 1, "large experts packed": 200}
is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.fixture(autouse=True)
def _copy_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_hopper, "PACKED_BYTES", 0)


def needs_hopper(test: Callable[..., None]) -> Callable[..., None] | None:
    return test if is_hopper else None


@pytest.fixture
def machine_code(tmp_path: Path) -> dict[str, str]:
    """Return the instructions of each kernel."""
    assert nvrtc_is_installed(), "the dev extra brings it"
    source = fp8_hopper.SOURCE.read_text(encoding="utf-8")
    path = tmp_path / "products.cubin"
    path.write_bytes(compile_to_cubin(source, arch=fp8_hopper.ARCH, name="fp8_hopper.cu"))
    command = [str(CUOBJDUMP), "-sass", str(path)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    _, *parts = re.split(r"\s*Function : (\w+)", listing)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.slow
def test_tensor_cores_multiply_and_nothing_waits_between(machine_code: dict[str, str]) -> None:
    assert set(machine_code) == {*PRODUCTS, *AHEAD, "pack_rows"}
    for name in (*PRODUCTS, *AHEAD):
        code = machine_code[name]
        # Four stages of two products over 128 columns of K, in steps of 32; and one ahead.
        num_products = 8 + (name in AHEAD)
        assert len(re.findall(r"QGMMA\.64x128x32\.F32\.E4M3\.E4M3", code)) == 4 * num_products
        # A wait after each step instead of each product is how the compiler serialises them.
        assert len(re.findall(r"QGMMA.*gsb0", code)) == num_products
        # Down waits for the last product of a tile outside of the loop, and for one without a tile.
        num_waits = num_products + (name in AHEAD and "down" in name)
        assert len(re.findall(r"WARPGROUP\.DEPBAR", code)) == num_waits
        assert not re.search(r"\b(STL|LDL)\b", code)
    for code in map(machine_code.__getitem__, PRODUCTS):
        # The loop over K loads nothing from global memory, and computes descriptors in uniform
        # registers, from constants.
        first, last = code.index("QGMMA"), code.rindex("QGMMA")
        assert not re.search(r"\b(LDG|R2UR)\b", code[first:last])
    # Down stores results while products run: after one has begun, before it is waited for.
    ahead = machine_code["down_fp8_bfloat16_ahead"]
    assert "UTMASTG" in ahead[ahead.index("gsb0") : ahead.index("WARPGROUP.DEPBAR")]
    last = ahead.rindex("gsb0", 0, ahead.rindex("UTMASTG"))
    assert "UTMASTG" in ahead[last : ahead.index("WARPGROUP.DEPBAR", ahead.rindex("QGMMA"))]
    gate_up, down = machine_code["gate_up_fp8"], machine_code["down_fp8_bfloat16"]
    for code in map(machine_code.__getitem__, (*PRODUCTS, *AHEAD)):
        assert code.count("UTMALDG.2D") == 5
        # The first matrices are requested before the kernel that makes the rows has ended.
        assert code.count("UTMALDG.2D", 0, code.index("ACQBULK")) == 2
    # Through the index, rows come 16 bytes at a time.
    assert len(re.findall(r"LDGSTS\.E\.BYPASS\.128", gate_up)) == 8
    assert "LDGSTS.E.BYPASS.128" not in down
    # Two boxes of each of two blocks of H.
    assert down.count("UTMASTG.2D") == 4
    assert down.count("STSM.16.M88.4") == 16
    assert "FENCE.VIEW.ASYNC" in down[down.index("STSM") : down.index("UTMASTG")]
    assert "LDG.E.128" in machine_code["pack_rows"]
    assert all("PREEXIT" in machine_code[name] for name in PRODUCTS)
    # Tensor cores read through another proxy than the one that LDGSTS writes by. Consumers fence;
    # for threads that copy it would mean to wait for all their copies.
    assert "FENCE.VIEW.ASYNC" in gate_up[gate_up.index("QGMMA") : gate_up.rindex("QGMMA")]
    assert "FENCE.VIEW.ASYNC" not in gate_up[gate_up.index("LDGSTS.E.BYPASS.128") :]
    for code in machine_code.values():
        assert "STG.E.128" in code


@dataclass(frozen=True, kw_only=True)
class Launches:
    """A replacement of the kernels, which records the blocks of each launch."""

    blocks: list[int] = field(default_factory=list)

    @property
    def pack(self) -> Launches:
        return self

    def launch(self, blocks: int, *_: object) -> None:
        self.blocks.append(blocks)


def test_rows_are_copied_only_where_many_lie_in_another_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_slots = fp8_hopper.PACKED_SLOTS_PER_EXPERT * NUM_EXPERTS
    codes = torch.empty(num_slots, 16, dtype=torch.uint8)
    row_of_slot = torch.zeros(num_slots, dtype=torch.int32)
    rows = fp8_hopper._Rows(num_experts=NUM_EXPERTS)
    launches = Launches()

    def packed(codes: Tensor, row_of_slot: Tensor | None, num_slots: int) -> Tensor | None:
        return fp8_hopper._packed_codes(codes, row_of_slot, num_slots, rows, launches)  # type: ignore[arg-type]

    assert packed(codes, None, num_slots) is codes
    assert rows.packed_from == 0
    # The copy engine does not accept such rows.
    assert packed(codes[:1].expand(num_slots, 16), None, num_slots) is None
    assert packed(codes, row_of_slot[1:], num_slots - 1) is None
    # More slots than any expert has.
    assert rows.packed_from == num_slots
    monkeypatch.setattr(fp8_hopper, "PACKED_BYTES", num_slots * 16 + 1)
    assert packed(codes[:9], row_of_slot, num_slots) is None
    assert not launches.blocks
    monkeypatch.setattr(fp8_hopper, "PACKED_BYTES", num_slots * 16)
    copied = packed(codes[:9], row_of_slot, num_slots)
    assert (copied.shape, copied.dtype) == (codes.shape, codes.dtype)
    assert rows.packed_from == fp8_hopper.PACKED_SLOTS_PER_EXPERT
    # A block of 256 threads copies eight slots.
    assert launches.blocks == [num_slots // 8]


def test_the_compilers_messages_are_passed_on() -> None:
    with pytest.raises(CudaError, match=r"refused broken\.cu for sm_90a:\n.*nonsense"):
        compile_to_cubin("__global__ void f() { nonsense; }", arch="sm_90a", name="broken.cu")


def test_experts_that_the_kernels_cannot_read_are_refused_with_reasons() -> None:
    weights = ExpertWeights(gate_up_proj=torch.zeros(2, 64, 200), down_proj=torch.zeros(2, 200, 32))
    verdict = Fp8WgmmaRunner.supports(Fp8BlockWeights.from_unquantized(weights))
    assert verdict.reasons == (
        "hidden_size is 200, expected a multiple of 128",
        "intermediate_size is 32, expected a multiple of 128",
        "the experts are on cpu, expected cuda",
        "hidden states are torch.float32, expected bfloat16 or float16",
    )


WRITTEN_CASES = [
    replace(case, dtype=dtype)
    for dtype in fp8_hopper.HIDDEN_DTYPES
    for case in CASES
    if case.dtype is torch.bfloat16
]


# 5 and 9 blocks of K use the four stages more than once.
@needs_hopper
@pytest.mark.parametrize("inner", [128, 384, 640])
@pytest.mark.parametrize("hidden", [256, 384, 1152])
@pytest.mark.parametrize("case", WRITTEN_CASES, ids=lambda case: case.id)
def test_runner_equals_the_plain_one(
    case: Case, hidden: int, inner: int, device: torch.device
) -> None:
    weights = make_weights(case.dtype, device, hidden, inner)
    dispatched = record(case, hidden, FP8_FLOAT32_SCALES, device)
    assert Fp8WgmmaRunner.supports(weights).ok
    actual = Fp8WgmmaRunner().run(dispatched, weights).hidden_states
    expected = QuantizedReferenceRunner().run(dispatched, weights).hidden_states
    assert (actual.shape, actual.dtype) == (expected.shape, case.dtype)
    assert largest_error(dispatched, actual, expected) <= TOLERANCE[case.dtype]


ROWS_CASE = Case(dtype=torch.bfloat16)


# A warp finds the tiles of 32 experts at a time.
@needs_hopper
@pytest.mark.parametrize("repeats", [1, 6], ids=["12 experts", "72 experts"])
@pytest.mark.parametrize("packed_from", PACKED_FROM.values(), ids=PACKED_FROM.keys())
@pytest.mark.parametrize("ahead_from", [0, 1 << 20], ids=["ahead", "not ahead"])
@pytest.mark.parametrize("dtype", fp8_hopper.HIDDEN_DTYPES, ids=str)
def test_blocks_that_take_several_tiles_equal_the_plain_runner(
    dtype: torch.dtype,
    ahead_from: int,
    packed_from: int,
    repeats: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Use experts of 0, 1, 128, 129 and 300 rows, some 200 tiles for 132 SMs."""
    monkeypatch.setattr(fp8_hopper, "PACKED_SLOTS_PER_EXPERT", packed_from)
    monkeypatch.setattr(fp8_hopper, "AHEAD_SLOTS_PER_EXPERT", ahead_from)
    monkeypatch.setattr(fp8_hopper, "DOWN_AHEAD_SLOTS_PER_EXPERT", ahead_from)
    hidden, inner = 1152, 640
    counts = repeats * [300, 0, 129, 300, 1, 128, 300, 300, 300, 300, 300, 300]
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    num_row_tiles = sum(-(-count // fp8_hopper.TILE_ROWS) for count in counts)
    # A tile has the width of one block of I, or of two blocks of H.
    assert num_row_tiles * min(inner // 128, -(-hidden // 256)) > num_sms
    weights = make_weights(dtype, device, hidden, inner, num_experts=len(counts))
    generator = torch.Generator().manual_seed(8)
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    ids = ids[torch.randperm(len(ids), generator=generator)].unsqueeze(1).to(device)
    x = torch.randn(len(ids), hidden, generator=generator).to(device, dtype)
    dispatched = rows_record(
        quantize(x, FP8_FLOAT32_SCALES),
        build_slot_index(ids, count_experts(ids, len(counts)), len(ids)),
        torch.rand(len(ids), generator=generator).to(device),
        WeightsAppliedBy.RUNNER,
    )
    actual = Fp8WgmmaRunner().run(dispatched, weights).hidden_states
    expected = QuantizedReferenceRunner().run(dispatched, weights).hidden_states
    assert largest_error(dispatched, actual, expected) <= TOLERANCE[dtype]


@needs_hopper
@pytest.mark.parametrize("hidden", [256, 640])
@pytest.mark.parametrize(
    "case", [case for case in WRITTEN_CASES if case.layout is Layout.ROWS], ids=lambda case: case.id
)
def test_packed_rows_give_the_bits_of_rows_through_the_index(
    case: Case, hidden: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use padding between experts, rows with gaps, and rows that no slot uses."""
    weights = make_weights(case.dtype, device, hidden)
    dispatched = record(replace(case, expert_alignment=8), hidden, FP8_FLOAT32_SCALES, device)
    found = []
    for least, ahead_from in ((1, 1 << 20), (1 << 20, 1 << 20), (1, 0), (1 << 20, 0)):
        monkeypatch.setattr(fp8_hopper, "PACKED_SLOTS_PER_EXPERT", least)
        monkeypatch.setattr(fp8_hopper, "AHEAD_SLOTS_PER_EXPERT", ahead_from)
        monkeypatch.setattr(fp8_hopper, "DOWN_AHEAD_SLOTS_PER_EXPERT", ahead_from)
        results = Fp8WgmmaRunner().run(dispatched, weights).hidden_states
        found.append(results_of_experts(dispatched, results))
    for results in zip(*found, strict=True):
        assert all(torch.equal(results[0], other) for other in results[1:])


# 1100 rows are nine row tiles. 132 blocks compute 864 tiles of gate and up: some of them have one
# more than the others, which begin with down.
@needs_hopper
@pytest.mark.parametrize("packed_bytes", [0, 1 << 40], ids=["packed", "through the index"])
def test_a_second_product_that_begins_early_has_the_same_bits(
    packed_bytes: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_hopper, "PACKED_BYTES", packed_bytes)
    hidden, inner, counts = 2048, 768, torch.full((16,), 1100)
    weights = make_weights(torch.bfloat16, device, hidden, inner, num_experts=len(counts))
    generator = torch.Generator().manual_seed(9)
    ids = torch.arange(len(counts)).repeat_interleave(counts)
    ids = ids[torch.randperm(len(ids), generator=generator)].unsqueeze(1).to(device)
    x = torch.randn(len(ids), hidden, generator=generator).to(device, weights.dtype)
    dispatched = rows_record(
        quantize(x, FP8_FLOAT32_SCALES),
        build_slot_index(ids, count_experts(ids, len(counts)), len(ids)),
        torch.ones(len(ids), device=device),
        WeightsAppliedBy.COMBINE,
    )
    first = first_product(dispatched, weights, Int8Profile.RINT127)
    found = []
    for is_early in (False, True, True, True):
        codes = torch.zeros(len(ids), inner, device=device).to(torch.float8_e4m3fn)
        scales = torch.zeros(len(ids), inner // 128, device=device)
        out = torch.zeros_like(x)
        begun = fp8_hopper.gate_up_fp8(first, out_codes=codes, out_scales=scales)
        assert begun.ahead is not None
        second = second_product(first, codes, scales, weights)
        after = begun if is_early else None
        fp8_hopper.down_fp8(second, slot_weights=None, out=out, after=after)
        found.append(out)
    assert all(torch.equal(found[0], other) for other in found[1:])


@needs_hopper
@pytest.mark.parametrize("packed_from", [1 << 20, 1], ids=["through the index", "packed"])
def test_slots_of_nobody_are_left_alone(
    packed_from: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_hopper, "PACKED_SLOTS_PER_EXPERT", packed_from)
    products = Fp8WgmmaRunner()._products
    check_unused_slots_are_left(products, make_weights(torch.bfloat16, device), device)


@needs_hopper
def test_no_slots_are_no_results(device: torch.device) -> None:
    check_no_slots(Fp8WgmmaRunner(), make_weights(torch.bfloat16, device), device)


@needs_hopper
def test_poison_stays_in_its_rows(device: torch.device) -> None:
    check_poison_stays_in_its_rows(Fp8WgmmaRunner(), make_weights(torch.bfloat16, device), device)


@needs_hopper
def test_a_captured_graph_follows_new_rows_and_counts(device: torch.device) -> None:
    weights, runner = make_weights(torch.bfloat16, device), Fp8WgmmaRunner()
    dispatched = record(ROWS_CASE, 256, FP8_FLOAT32_SCALES, device)
    runner.run(dispatched, weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = runner.run(dispatched, weights).hidden_states
    # The rows have other signs; rows that no slot uses stay NaN.
    dispatched.hidden_states.data.view(torch.uint8).bitwise_xor_(0x80)
    dispatched.num_tokens_per_expert[0] -= 7
    graph.replay()
    expected = QuantizedReferenceRunner().run(dispatched, weights).hidden_states
    assert largest_error(dispatched, result, expected) <= TOLERANCE[torch.bfloat16]


@needs_hopper
def test_rows_at_odd_addresses_are_refused(device: torch.device) -> None:
    dispatched = record(ROWS_CASE, 256, FP8_FLOAT32_SCALES, device)
    rows = dispatched.hidden_states
    capacity = torch.empty(rows.data.numel() + 8, dtype=torch.uint8, device=device)
    moved = capacity[8:].view(rows.data.dtype).view(rows.data.shape)
    broken = replace(dispatched, hidden_states=replace(rows, data=moved))
    with pytest.raises(ShapeError, match="expected multiples of 16"):
        Fp8WgmmaRunner().run(broken, make_weights(torch.bfloat16, device))
