"""Records of both layouts for the runners of GPUs: what no slot uses is NaN."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from epcomm import MaskedDispatchOutput, RowsDispatchOutput, WireTensor
from epcomm.ops.static_slots import build_static_slot_index
from epcomm.quantization import quantize
from epcomm.records import Handle, Route, SlotIndex
from epcomm.types import Layout, WeightsAppliedBy, WireFormat
from epcomm.weights import ExpertWeights

NUM_EXPERTS, NUM_ROWS = 3, 90
# Expert 0 gets more rows than a tile has, expert 1 none, and 5 slots belong to nobody.
IDS = [0] * 70 + [2] * 15 + [-1] * 5
# Enough for starts at multiples of 8.
NUM_SLOTS = 90
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Case:
    layout: Layout
    who: WeightsAppliedBy
    dtype: torch.dtype
    is_quantized: bool
    is_strided: bool
    slot_alignment: int = 1

    @property
    def id(self) -> str:
        rows = "quantised" if self.is_quantized else "plain"
        return (
            f"{self.layout.value}, weights by {self.who.value}, {self.dtype}, {rows} rows"
            f"{' that lie apart' if self.is_strided else ''}"
            f"{f', aligned to {self.slot_alignment}' if self.slot_alignment > 1 else ''}"
        )


CASES = [
    Case(layout=layout, who=who, dtype=dtype, is_quantized=is_quantized, is_strided=is_strided)
    for layout, who, dtype, is_quantized, is_strided in product(
        Layout, WeightsAppliedBy, DTYPES, [True, False], [False, True]
    )
    if not is_strided or (is_quantized and layout is Layout.ROWS)
]


def make_weights(hidden_size: int, inner_size: int, device: torch.device) -> ExpertWeights:
    """Seeded, so that rows of order one give results of order one."""
    generator = torch.Generator().manual_seed(1)
    gate_up = torch.randn(NUM_EXPERTS, 2 * inner_size, hidden_size, generator=generator)
    down = torch.randn(NUM_EXPERTS, hidden_size, inner_size, generator=generator)
    return ExpertWeights(
        gate_up_proj=(gate_up / hidden_size**0.5).to(device),
        down_proj=(down / inner_size**0.5).to(device),
    )


def make_index(device: torch.device, slot_alignment: int = 1) -> SlotIndex:
    """Rows in random order."""
    order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(2))
    ids = torch.tensor(IDS)[order].unsqueeze(1).to(device)
    return build_static_slot_index(ids, NUM_EXPERTS, NUM_SLOTS, slot_alignment=slot_alignment)


def apart(tensor: Tensor) -> Tensor:
    """The same rows with gaps of 16 bytes between them, full of NaN."""
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
    """Rows without a slot are NaN."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(NUM_ROWS, hidden_size, generator=generator).to(device, case.dtype)
    assert index.slots_of_row is not None
    x[(index.slots_of_row < 0).all(dim=1)] = float("nan")
    wire = quantize(x, quantized if case.is_quantized else WireFormat.of(case.dtype))
    if not case.is_strided:
        return wire
    assert wire.scales is not None
    return replace(wire, data=apart(wire.data), scales=apart(wire.scales))


def record(
    case: Case, hidden_size: int, quantized: WireFormat, device: torch.device
) -> RowsDispatchOutput | MaskedDispatchOutput:
    """One batch in the layout of the case; quantized: the format of quantised rows."""
    index = make_index(device, case.slot_alignment)
    rows = make_rows(case, index, hidden_size, quantized, device)
    weights = torch.rand(NUM_SLOTS, generator=torch.Generator().manual_seed(4)).to(device)
    handle = Handle(owner=None, route=Route(), call=1, num_tokens=NUM_ROWS, needs_backward=False)
    if case.layout is Layout.ROWS:
        return RowsDispatchOutput(
            hidden_states=rows,
            index=index,
            slot_weights=weights,
            weights_applied_by=case.who,
            handle=handle,
        )
    counts, starts = index.num_slots_per_expert.tolist(), index.first_slot.tolist()
    room = max(counts) + 3

    def spread(values: Tensor) -> Tensor:
        raw = values.contiguous().view(torch.uint8)
        wide = raw.new_full((NUM_EXPERTS, room, raw.shape[1]), 0x7F)
        for expert, count in enumerate(counts):
            mine = index.row_of_slot[starts[expert] : starts[expert] + count]  # type: ignore[index]
            wide[expert, :count] = raw[mine.long()]
        return wide.view(values.dtype)

    masked_weights = weights.new_full((NUM_EXPERTS, room), float("nan"))
    for expert, count in enumerate(counts):
        masked_weights[expert, :count] = weights[starts[expert] : starts[expert] + count]
    return MaskedDispatchOutput(
        hidden_states=replace(
            rows,
            data=spread(rows.data),
            scales=None if rows.scales is None else spread(rows.scales),
        ),
        num_slots_per_expert=index.num_slots_per_expert,
        slot_weights=masked_weights,
        weights_applied_by=case.who,
        handle=handle,
    )


def results_of_experts(
    dispatched: RowsDispatchOutput | MaskedDispatchOutput, results: Tensor
) -> list[Tensor]:
    """Those of each expert that has slots, and of nobody else."""
    counts = dispatched.num_slots_per_expert.tolist()
    if isinstance(dispatched, MaskedDispatchOutput):
        return [results[expert, :count] for expert, count in enumerate(counts)]
    starts = dispatched.index.first_slot.tolist()
    return [results[starts[expert] :][:count] for expert, count in enumerate(counts)]
