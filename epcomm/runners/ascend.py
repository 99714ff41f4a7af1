"""Experts on an Ascend NPU: the vendor's grouped matmul, in BF16 and W8A8.

group_list is counts here, which npu_dequant_swiglu_quant knows alone and npu_grouped_matmul calls
type 1. Rows behind the last group stay undefined, as records have it.
"""

from __future__ import annotations

from typing import ClassVar, overload

import torch
from torch import Tensor

from epcomm.ascend_operators import has_kernel
from epcomm.buffers.base import Availability
from epcomm.errors import ConfigError, ShapeError
from epcomm.ops.slots import gather_rows
from epcomm.quantization import quantize
from epcomm.quantized_weights import Int8ChannelWeights
from epcomm.records import (
    CombineInput,
    DispatchOutput,
    MaskedCombineInput,
    MaskedDispatchOutput,
    RowsCombineInput,
    RowsDispatchOutput,
)
from epcomm.runners.base import ExpertRunner, slot_weights_to_apply, weight_slots
from epcomm.types import UNQUANTIZED_DTYPES, Layout, WireDtype, WireTensor
from epcomm.weights import ExpertFormat, ExpertTensors, ExpertWeights

_OPERATORS = ("npu_grouped_matmul", "npu_swiglu", "npu_dequant_swiglu_quant")
# Of npu_grouped_matmul: rows are cut by M, group_list holds counts, one tensor comes out.
_CUT_ROWS, _COUNTS, _ONE_TENSOR = 0, 1, 2
# Of npu_dequant_swiglu_quant: the left half goes through silu, the result to codes a token.
_DYNAMIC = 1
_PLAIN = ExpertFormat()


class AscendRunner(ExpertRunner):
    """No gradients. Slots that no expert computes are undefined."""

    name: ClassVar[str] = "ascend"
    kinds: ClassVar[tuple[type[ExpertTensors], ...]] = (ExpertWeights, Int8ChannelWeights)
    layouts: ClassVar[frozenset[Layout]] = frozenset({Layout.ROWS})

    @classmethod
    def supports(cls, weights: ExpertTensors) -> Availability:
        if not isinstance(weights, cls.kinds):
            return super().supports(weights)
        reasons = []
        has_bias = isinstance(weights, ExpertWeights) and (
            weights.gate_up_bias is not None or weights.down_bias is not None
        )
        if weights.format != _PLAIN or has_bias:
            reasons.append(f"computes {_PLAIN} without biases, not {weights.format}")
        if weights.dtype is not torch.bfloat16:
            reasons.append(f"hidden states are {weights.dtype}, expected bfloat16")
        device = _device_of(weights)
        missing = [name for name in _OPERATORS if not has_kernel(name, device)]
        if missing:
            reasons.append(f"{', '.join(missing)} not on {device.type}; import torch_npu")
        return Availability(ok=not reasons, reasons=tuple(reasons))

    @classmethod
    def is_candidate(cls, weights: ExpertTensors) -> bool:
        # Elsewhere nobody would want to read why it does not serve.
        return super().is_candidate(weights) and _device_of(weights).type == "npu"

    @classmethod
    def wire_dtypes(cls, weights: ExpertTensors) -> frozenset[WireDtype]:
        if isinstance(weights, Int8ChannelWeights):
            return UNQUANTIZED_DTYPES | {WireDtype.INT8}
        return UNQUANTIZED_DTYPES

    @overload
    def run(self, dispatched: RowsDispatchOutput, weights: ExpertTensors) -> RowsCombineInput: ...

    @overload
    def run(
        self, dispatched: MaskedDispatchOutput, weights: ExpertTensors
    ) -> MaskedCombineInput: ...

    def run(self, dispatched: DispatchOutput, weights: ExpertTensors) -> CombineInput:
        if not isinstance(dispatched, RowsDispatchOutput):
            raise ShapeError(f"{self.name}: the record has the MASKED layout, expected ROWS")
        rows = dispatched.hidden_states
        if torch.is_grad_enabled() and rows.data.requires_grad:
            raise ConfigError(
                f"{self.name}: rows need gradients, which these operators do not have; use "
                "torch.no_grad()"
            )
        index = dispatched.index
        if index.slot_alignment > 1:
            raise ShapeError(
                f"{self.name}: slots begin at multiples of {index.slot_alignment}, expected one "
                "expert's right behind another's; set slot_alignment to 1"
            )
        counts = dispatched.num_slots_per_expert.to(torch.int64)
        if isinstance(weights, Int8ChannelWeights):
            results = self._run_int8(_packed(rows, dispatched, weights), weights, counts)
        else:
            assert isinstance(weights, ExpertWeights), "supports() said so"
            packed = gather_rows(rows.data, index).to(weights.dtype)
            hidden = _grouped(packed, weights.gate_up_matrices(), counts)
            results = _grouped(torch.ops.npu.npu_swiglu(hidden), weights.down_matrices(), counts)
        scale = slot_weights_to_apply(dispatched, self.name)
        return dispatched.combine_input(results if scale is None else weight_slots(results, scale))

    def _run_int8(self, rows: WireTensor, weights: Int8ChannelWeights, counts: Tensor) -> Tensor:
        assert rows.scales is not None, "quantised rows have scales"
        sums = _grouped(
            rows.data, weights.gate_up_proj.transpose(1, 2), counts, output_dtype=torch.int32
        )
        codes, scales = torch.ops.npu.npu_dequant_swiglu_quant(
            sums,
            weight_scale=weights.gate_up_scale,
            activation_scale=rows.scales.flatten(),
            group_index=counts,
            activate_left=True,
            quant_mode=_DYNAMIC,
        )
        return _grouped(
            codes,
            weights.down_proj.transpose(1, 2),
            counts,
            scale=weights.down_scale,
            per_token_scale=scales,
            output_dtype=torch.bfloat16,
        )


def _packed(
    rows: WireTensor, dispatched: RowsDispatchOutput, weights: Int8ChannelWeights
) -> WireTensor:
    """INT8 rows, one a slot; rows that came unquantised are quantised here."""
    if not rows.format.dtype.is_quantized:
        rows = quantize(rows.data, weights.wire_format)
    assert rows.scales is not None, "quantised rows have scales"
    return WireTensor(
        data=gather_rows(rows.data, dispatched.index),
        format=rows.format,
        scales=gather_rows(rows.scales, dispatched.index),
    )


def _grouped(
    rows: Tensor,
    matrices: Tensor,
    counts: Tensor,
    *,
    scale: Tensor | None = None,
    per_token_scale: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """rows [C, K] times the matrix of each expert, [E, K, N]."""
    return torch.ops.npu.npu_grouped_matmul(
        [rows],
        [matrices],
        scale=None if scale is None else [scale],
        per_token_scale=None if per_token_scale is None else [per_token_scale],
        group_list=counts,
        split_item=_ONE_TENSOR,
        group_type=_CUT_ROWS,
        group_list_type=_COUNTS,
        output_dtype=output_dtype,
    )[0]


def _device_of(weights: ExpertTensors) -> torch.device:
    return next(iter(weights.tensors().values())).device
