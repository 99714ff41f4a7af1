"""Checks of both implementations of the FP8 products, in addition to equal results."""

from __future__ import annotations

import torch

from epcomm.quantization import FP8_FLOAT32_SCALES
from epcomm.records import RowsDispatchOutput
from epcomm.runners.fp8_triton import Down, GateUp
from epcomm.types import Layout, WeightsAppliedBy
from epcomm.weights.quantized import BLOCK, Fp8BlockWeights
from tests.kernels.gemm.slot_records import Case, record

# Fills memory that must not be written; as a code it is a number too.
SENTINEL = -7.0


def check_slots_of_nobody_are_left(
    products: tuple[GateUp, Down], weights: Fp8BlockWeights, device: torch.device
) -> None:
    """Check that padding between experts and after the last one is not written."""
    case = Case(
        layout=Layout.ROWS,
        who=WeightsAppliedBy.RUNNER,
        dtype=weights.dtype,
        is_quantized=True,
        is_strided=False,
        expert_alignment=8,
    )
    dispatched = record(case, weights.hidden_size, FP8_FLOAT32_SCALES, device)
    assert isinstance(dispatched, RowsDispatchOutput)
    index, rows = dispatched.index, dispatched.hidden_states
    assert index.row_of_slot is not None
    assert rows.scales is not None
    is_used = index.row_of_slot >= 0
    starts = index.first_slot.tolist()
    assert not is_used[: starts[-1]].all(), "there is padding"
    assert len(is_used) > starts[-1], "there are slots behind the last expert"
    num_slots, inner_size = len(is_used), weights.intermediate_size

    def untouched(num_columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((num_slots, num_columns), SENTINEL, device=device).to(dtype)

    codes = untouched(inner_size, torch.float8_e4m3fn)
    scales = untouched(inner_size // BLOCK, torch.float32)
    results = untouched(weights.hidden_size, weights.dtype)
    gate_up, down = products
    counts, first_slot = index.num_tokens_per_expert, index.first_slot
    gate_up(
        rows.data,
        rows.scales,
        index.row_of_slot,
        counts,
        first_slot,
        matrices=weights.gate_up_proj,
        matrix_scales=weights.gate_up_scale,
        out_codes=codes,
        out_scales=scales,
    )
    down(
        codes,
        scales,
        counts,
        first_slot,
        matrices=weights.down_proj,
        matrix_scales=weights.down_scale,
        slot_weights=dispatched.slot_weights,
        out=results,
    )
    for written in (codes.float(), scales, results.float()):
        assert (written[~is_used] == SENTINEL).all()
        assert (written[is_used] != SENTINEL).any(dim=1).all()
