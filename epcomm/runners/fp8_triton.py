"""FP8 experts on a GPU: two Triton kernels over rows where they lie, counts on the device."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar, overload

import torch
from torch import Tensor

from epcomm.buffers.base import Availability
from epcomm.errors import ConfigError
from epcomm.quantization import FP8_FLOAT32_SCALES, quantizer_for
from epcomm.quantized_weights import BLOCK, Fp8BlockWeights
from epcomm.records import (
    CombineInput,
    DispatchOutput,
    MaskedCombineInput,
    MaskedDispatchOutput,
    RowsCombineInput,
    RowsDispatchOutput,
)
from epcomm.runners.base import ExpertRunner
from epcomm.types import UNQUANTIZED_DTYPES, Layout, WeightsAppliedBy, WireDtype, WireTensor
from epcomm.weights import ExpertTensors


@dataclass(frozen=True, kw_only=True, eq=False)
class _Slots:
    """What the kernels read, the same for both layouts.

    rows: [R, H].   row_of_slot: [C], int32, or None: slot s is row s.   counts: [L], int32.
    first_slot: [L + 1], int32.   weights: [C], float32, to multiply results by, or None.
    """

    rows: WireTensor
    row_of_slot: Tensor | None
    counts: Tensor
    first_slot: Tensor
    weights: Tensor | None
    num_slots: int


class Fp8TritonRunner(ExpertRunner):
    """Reads rows through the index, without a copy; the second quantisation is fused. No gradients.

    Results of slots that no expert computes are undefined.
    """

    name: ClassVar[str] = "fp8_triton"
    kinds: ClassVar[tuple[type[ExpertTensors], ...]] = (Fp8BlockWeights,)
    layouts: ClassVar[frozenset[Layout]] = frozenset(Layout)

    @classmethod
    def supports(cls, weights: ExpertTensors) -> Availability:
        if not isinstance(weights, cls.kinds):
            return super().supports(weights)
        sizes = {
            "hidden_size": weights.hidden_size,
            "intermediate_size": weights.intermediate_size,
        }
        reasons = [
            f"{name} is {size}, expected a multiple of {BLOCK}"
            for name, size in sizes.items()
            if size % BLOCK
        ]
        device = next(iter(weights.tensors().values())).device
        if device.type != "cuda":
            reasons.append(f"the experts are on {device}, expected cuda")
        if weights.wire_format != FP8_FLOAT32_SCALES:
            reasons.append(
                f"the experts want {weights.wire_format} rows, but the kernels scale by float32 "
                f"as in {FP8_FLOAT32_SCALES}"
            )
        if find_spec("triton") is None:
            reasons.append("triton is not installed")
        return Availability(ok=not reasons, reasons=tuple(reasons))

    @classmethod
    def wire_dtypes(cls, weights: ExpertTensors) -> frozenset[WireDtype]:
        return UNQUANTIZED_DTYPES | {WireDtype.FP8_E4M3}

    @overload
    def run(self, dispatched: RowsDispatchOutput, weights: ExpertTensors) -> RowsCombineInput: ...

    @overload
    def run(
        self, dispatched: MaskedDispatchOutput, weights: ExpertTensors
    ) -> MaskedCombineInput: ...

    def run(self, dispatched: DispatchOutput, weights: ExpertTensors) -> CombineInput:
        assert isinstance(weights, Fp8BlockWeights), "supports() said so"
        self.check_rows(dispatched.hidden_states, weights, dispatched.layout)
        if torch.is_grad_enabled() and dispatched.hidden_states.data.requires_grad:
            raise ConfigError(
                "fp8_triton: rows need gradients, which these kernels do not have; use "
                "torch.no_grad(), or unquantised experts"
            )
        if isinstance(dispatched, MaskedDispatchOutput):
            shape = dispatched.hidden_states.data.shape
            results = _compute(_slots_of_masked(dispatched), weights)
            return dispatched.combine_input(results.view(shape))
        return dispatched.combine_input(_compute(_slots_of_rows(dispatched), weights))


def _slots_of_rows(dispatched: RowsDispatchOutput) -> _Slots:
    index = dispatched.index
    by_runner = dispatched.weights_applied_by is WeightsAppliedBy.RUNNER
    return _Slots(
        rows=dispatched.hidden_states,
        row_of_slot=index.row_of_slot,
        counts=index.num_slots_per_expert,
        first_slot=index.first_slot,
        weights=dispatched.slot_weights if by_runner else None,
        num_slots=dispatched.num_slots,
    )


def _slots_of_masked(dispatched: MaskedDispatchOutput) -> _Slots:
    rows, counts = dispatched.hidden_states, dispatched.num_slots_per_expert
    num_experts, room = rows.data.shape[:2]
    by_runner = dispatched.weights_applied_by is WeightsAppliedBy.RUNNER
    weights = dispatched.slot_weights if by_runner else None
    return _Slots(
        rows=WireTensor(
            data=rows.data.flatten(0, 1),
            format=rows.format,
            scales=None if rows.scales is None else rows.scales.flatten(0, 1),
        ),
        row_of_slot=None,
        counts=counts,
        first_slot=torch.arange(num_experts + 1, dtype=torch.int32, device=counts.device) * room,
        weights=None if weights is None else weights.flatten(),
        num_slots=num_experts * room,
    )


def _compute(slots: _Slots, weights: Fp8BlockWeights) -> Tensor:
    """[C, H] in the dtype of the hidden states."""
    from epcomm.kernels.grouped_gemm_fp8 import down_fp8, gate_up_fp8

    rows = slots.rows
    if not rows.format.dtype.is_quantized:
        rows = quantizer_for(rows.data.device)(rows.data, weights.wire_format)
    assert rows.scales is not None, "quantised rows have scales"
    inner_size, num_slots = weights.intermediate_size, slots.num_slots
    codes = rows.data.new_empty(num_slots, inner_size)
    scales = rows.scales.new_empty(num_slots, inner_size // BLOCK)
    gate_up_fp8(
        rows.data,
        rows.scales,
        slots.row_of_slot,
        slots.counts,
        slots.first_slot,
        matrices=weights.gate_up_proj,
        matrix_scales=weights.gate_up_scale,
        out_codes=codes,
        out_scales=scales,
    )
    results = codes.new_empty(num_slots, weights.hidden_size, dtype=weights.hidden_dtype)
    down_fp8(
        codes,
        scales,
        slots.counts,
        slots.first_slot,
        matrices=weights.down_proj,
        matrix_scales=weights.down_scale,
        slot_weights=slots.weights,
        out=results,
    )
    return results
