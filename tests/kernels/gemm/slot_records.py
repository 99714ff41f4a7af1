"""Records of both layouts for the GPU runners; unused memory is NaN."""

from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from epcomm import MaskedDispatchOutput, RowsDispatchOutput, WireTensor
from epcomm.ops.slots import build_slot_index, count_experts
from epcomm.quantization import quantize
from epcomm.records import SlotIndex
from epcomm.runners.base import ExpertRunner
from epcomm.types import Layout, WeightsAppliedBy, WireFormat
from epcomm.weights.unquantized import ExpertTensors, ExpertWeights
from tests.runners.records import as_masked, rows_record

NUM_EXPERTS, NUM_ROWS = 3, 90
# Expert 0 gets more rows than a tile has, expert 1 none, and 5 rows have no expert.
IDS = [0] * 70 + [2] * 15 + [-1] * 5
# Enough slots for starts at multiples of 8.
NUM_SLOTS = 90
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Case:
    dtype: torch.dtype
    layout: Layout = Layout.ROWS
    who: WeightsAppliedBy = WeightsAppliedBy.RUNNER
    is_quantized: bool = True
    is_strided: bool = False
    expert_alignment: int = 1

    @property
    def id(self) -> str:
        rows = "quantised" if self.is_quantized else "plain"
        return (
            f"{self.layout.value}, weights by {self.who.value}, {self.dtype}, {rows} rows"
            f"{' with gaps' if self.is_strided else ''}"
            f"{f', aligned to {self.expert_alignment}' if self.expert_alignment > 1 else ''}"
        )


CASES = [
    Case(layout=layout, who=who, dtype=dtype, is_quantized=is_quantized, is_strided=is_strided)
    for layout, who, dtype, is_quantized, is_strided in product(
        Layout, WeightsAppliedBy, DTYPES, [True, False], [False, True]
    )
    if not is_strided or (is_quantized and layout is Layout.ROWS)
    # An interpreter is slow: some of them, in which every two choices meet.
    if torch.cuda.is_available()
    or (layout is Layout.ROWS)
    + (who is WeightsAppliedBy.RUNNER)
    + (dtype is torch.bfloat16)
    + is_quantized
    in (0, 3)
]


def make_weights(
    hidden_size: int, inner_size: int, device: torch.device, num_experts: int = NUM_EXPERTS
) -> ExpertWeights:
    """Make seeded experts, whose results are of order one for rows of order one."""
    generator = torch.Generator().manual_seed(1)
    gate_up = torch.randn(num_experts, 2 * inner_size, hidden_size, generator=generator)
    down = torch.randn(num_experts, hidden_size, inner_size, generator=generator)
    return ExpertWeights(
        gate_up_proj=(gate_up / hidden_size**0.5).to(device),
        down_proj=(down / inner_size**0.5).to(device),
    )


def make_index(device: torch.device, expert_alignment: int = 1) -> SlotIndex:
    """Make an index of rows in random order."""
    order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(2))
    ids = torch.tensor(IDS)[order].unsqueeze(1).to(device)
    counts = count_experts(ids, NUM_EXPERTS)
    return build_slot_index(ids, counts, NUM_SLOTS, expert_alignment=expert_alignment)


def apart(tensor: Tensor) -> Tensor:
    """Return the same rows with gaps of 16 bytes between them, full of NaN."""
    gap = 16 // tensor.itemsize
    wide = torch.full(
        (tensor.shape[0], (tensor.shape[1] + gap) * tensor.itemsize),
        0x7F,
        dtype=torch.uint8,
        device=tensor.device,
    ).view(tensor.dtype)
    rows = wide[:, : tensor.shape[1]]
    rows.view(torch.uint8).copy_(tensor.view(torch.uint8))
    return rows


def make_rows(
    case: Case, index: SlotIndex, hidden_size: int, quantized: WireFormat, device: torch.device
) -> WireTensor:
    """Make rows; those without a slot are NaN."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(NUM_ROWS, hidden_size, generator=generator).to(device, case.dtype)
    x[index.slots_of_row.lt(0).all(dim=1)] = float("nan")
    wire = quantize(x, quantized if case.is_quantized else WireFormat.of(case.dtype))
    if not case.is_strided:
        return wire
    return replace(wire, data=apart(wire.data), scales=apart(wire.scales))


def record(
    case: Case, hidden_size: int, quantized: WireFormat, device: torch.device
) -> RowsDispatchOutput | MaskedDispatchOutput:
    """Make one batch in the layout of the case; quantized: the format of quantised rows."""
    index = make_index(device, case.expert_alignment)
    rows = make_rows(case, index, hidden_size, quantized, device)
    weights = torch.rand(NUM_SLOTS, generator=torch.Generator().manual_seed(4)).to(device)
    found = rows_record(rows, index, weights, case.who)
    return found if case.layout is Layout.ROWS else as_masked(found)


def empty_record(
    layout: Layout, wire: WireTensor, device: torch.device
) -> RowsDispatchOutput | MaskedDispatchOutput:
    """Make the record of a rank that receives no token; wire: no rows, [0, H]."""
    counts = torch.zeros(NUM_EXPERTS, dtype=torch.int32, device=device)
    ids = torch.empty(0, 1, dtype=torch.int64, device=device)
    index = build_slot_index(ids, counts, [0] * NUM_EXPERTS)
    weights = torch.empty(0, device=device)
    found = rows_record(wire, index, weights, WeightsAppliedBy.RUNNER)
    return found if layout is Layout.ROWS else as_masked(found, capacity=0)


def check_no_slots(runner: ExpertRunner, weights: ExpertTensors, device: torch.device) -> None:
    x = torch.empty(0, weights.hidden_size, dtype=weights.dtype, device=device)
    for layout in Layout:
        for wire_format in (weights.wire_format, WireFormat.of(weights.dtype)):
            dispatched = empty_record(layout, quantize(x, wire_format), device)
            results = runner.run(dispatched, weights).hidden_states
            lead = (0,) if layout is Layout.ROWS else (NUM_EXPERTS, 0)
            assert results.shape == (*lead, weights.hidden_size)
            assert results.dtype == weights.dtype


# Slots of the two experts that have slots, with a value that is written to the row of each.
POISON = {3: float("nan"), 40: float("inf"), 75: float("-inf")}


def check_poison_stays_in_its_rows(
    runner: ExpertRunner, weights: ExpertTensors, device: torch.device
) -> None:
    """Check that results of rows with NaN or infinity are NaN, and all others unchanged."""
    case = Case(dtype=weights.dtype, is_quantized=False)
    dispatched = record(case, weights.hidden_size, weights.wire_format, device)
    assert isinstance(dispatched, RowsDispatchOutput)
    clean = dispatched.hidden_states.data
    broken = clean.clone()
    for column, (slot, value) in enumerate(POISON.items()):
        broken[int(dispatched.index.row_of_slot[slot]), 100 * column] = value
    num_used = int(dispatched.num_tokens_per_expert.sum())
    is_poisoned = torch.zeros(num_used, dtype=torch.bool, device=device)
    is_poisoned[list(POISON)] = True
    for wire_format in (weights.wire_format, WireFormat.of(weights.dtype)):
        expected, found = (
            runner.run(
                replace(dispatched, hidden_states=quantize(x, wire_format)), weights
            ).hidden_states[:num_used]
            for x in (clean, broken)
        )
        assert expected.isfinite().all()
        assert found[is_poisoned].isnan().all()
        assert torch.equal(found[~is_poisoned], expected[~is_poisoned])
