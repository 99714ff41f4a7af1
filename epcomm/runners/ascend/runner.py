"""Compute experts on an Ascend NPU by the vendor's grouped matmul, in BF16 and W8A8.

Rows after the last group stay undefined, as the records allow.
"""

from typing import ClassVar

import torch
from torch import Tensor

from epcomm.errors import ShapeError
from epcomm.ops.slots import gather_rows
from epcomm.platforms.ascend.operators import has_kernel
from epcomm.platforms.machine import Machine
from epcomm.quantization import quantize
from epcomm.records import RowsDispatchOutput
from epcomm.runners.ascend.groups import Int8Rows, activate_sums, multiply, width_reasons
from epcomm.runners.base import ExpertRunner, int32_reasons, slot_weights_to_apply, weight_slots
from epcomm.spec import Availability
from epcomm.types import Layout
from epcomm.weights.quantized import Int8ChannelWeights
from epcomm.weights.unquantized import ExpertFormat, ExpertTensors, ExpertWeights

_PLAIN = ExpertFormat()


class AscendRunner(ExpertRunner):
    """Runs experts through grouped operators, without gradients; unused slots are undefined.

    The operators read the matrices in place, as transposed views. See nz.py for copies in tiles.

    int8_profiles: codes between the products are the codes of RINT127, rint(x * 127 / a); their
    scale is a / 127, at most one unit in the last place from the scale of RINT127.
    """

    name: ClassVar[str] = "ascend"
    kinds: ClassVar[tuple[type[ExpertTensors], ...]] = (ExpertWeights, Int8ChannelWeights)
    layouts: ClassVar[frozenset[Layout]] = frozenset({Layout.ROWS})

    @classmethod
    def probe(cls, machine: Machine) -> Availability:
        is_here = has_kernel("npu_grouped_matmul", "npu")
        return Availability.judge(
            absent=[] if is_here else ["torch_npu is not imported, or has no devices"],
            needs="Ascend NPUs with their toolkit, and torch_npu imported",
        )

    @classmethod
    def _reasons(cls, weights: ExpertTensors, machine: Machine) -> list[str]:
        reasons = []
        has_bias = any(name.endswith("bias") for name in weights.tensors())
        if weights.format != _PLAIN or has_bias:
            biases = " with biases" if has_bias else ""
            reasons.append(f"computes {_PLAIN} without biases, not {weights.format}{biases}")
        if weights.dtype is not torch.bfloat16:
            reasons.append(f"hidden states are {weights.dtype}, expected bfloat16")
        if isinstance(weights, Int8ChannelWeights):
            reasons += int32_reasons(weights)
        device, operators = weights.gate_up_proj.device, cls._operators(weights)
        for name in operators:
            reasons += width_reasons(name, 2 * weights.intermediate_size)
        missing = [name for name in operators if not has_kernel(name, device)]
        if missing:
            reasons.append(f"{', '.join(missing)} not on {device.type}; import torch_npu")
        return reasons

    @classmethod
    def is_candidate(cls, weights: ExpertTensors) -> bool:
        # explain() should not list this runner for experts that are not on an NPU.
        return super().is_candidate(weights) and weights.gate_up_proj.device.type == "npu"

    def _compute_rows(self, dispatched: RowsDispatchOutput, weights: ExpertTensors) -> Tensor:
        alignment = dispatched.index.expert_alignment
        if alignment > 1:
            raise ShapeError(
                f"{self.name}: slots begin at multiples of {alignment}, expected experts without "
                f"gaps between them; dispatch with a plan made for runner {self.name}"
            )
        rows, row_of_slot = dispatched.hidden_states.data, dispatched.index.row_of_slot
        if len(rows if row_of_slot is None else row_of_slot) == 0:
            # The documentation does not say that operators take zero rows, which ranks often have.
            return rows.new_empty(0, rows.shape[1], dtype=weights.dtype)
        counts = dispatched.num_tokens_per_expert.to(torch.int64)
        if isinstance(weights, Int8ChannelWeights):
            results = self._run_int8(dispatched, weights, counts)
        else:
            assert isinstance(weights, ExpertWeights), "supports() said so"
            packed = gather_rows(rows, dispatched.index)
            gate_up, down = self._matrices(weights)
            hidden = multiply(packed.to(weights.dtype), gate_up, counts)
            results = multiply(torch.ops.npu.npu_swiglu(hidden), down, counts)
        scale = slot_weights_to_apply(dispatched, self.name)
        return results if scale is None else weight_slots(results, scale)

    @classmethod
    def _operators(cls, weights: ExpertTensors) -> tuple[str, ...]:
        is_int8 = isinstance(weights, Int8ChannelWeights)
        return ("npu_grouped_matmul", "npu_dequant_swiglu_quant" if is_int8 else "npu_swiglu")

    def _matrices(self, weights: ExpertTensors) -> tuple[Tensor, Tensor]:
        """Return the matrices [E, H, 2I] and [E, I, H] in the format that the products read."""
        return matrices_of(weights)

    def _run_int8(
        self, dispatched: RowsDispatchOutput, weights: Int8ChannelWeights, counts: Tensor
    ) -> Tensor:
        rows = dispatched.hidden_states
        if not rows.format.dtype.is_quantized:
            rows = quantize(rows.data, weights.wire_format, profile=self.int8_profile)
        assert rows.scales is not None, "quantised rows have scales"
        codes, scales = (gather_rows(part, dispatched.index) for part in (rows.data, rows.scales))
        slots = Int8Rows(codes=codes, scales=scales.flatten())
        gate_up, down = self._matrices(weights)
        hidden = self._between(slots, gate_up, weights, counts)
        return multiply(
            hidden.codes,
            down,
            counts,
            scale=weights.down_scale,
            per_token_scale=hidden.scales,
            output_dtype=torch.bfloat16,
        )

    def _between(
        self, rows: Int8Rows, matrices: Tensor, weights: Int8ChannelWeights, counts: Tensor
    ) -> Int8Rows:
        """Compute the first product, activate and quantise it, [C, I]."""
        sums = multiply(rows.codes, matrices, counts, output_dtype=torch.int32)
        scale = weights.gate_up_scale
        return activate_sums(sums, counts, weight_scale=scale, row_scales=rows.scales)


class AscendSwigluRunner(AscendRunner):
    """Runs W8A8 experts of any I, with the first product and the activation in bfloat16.

    Plans take this runner where npu_dequant_swiglu_quant refuses I, for example Mixtral's;
    elsewhere they take `ascend`, which rounds less and quantises within that operator. Codes and
    scales between the products are those of RINT127.
    """

    name: ClassVar[str] = "ascend_swiglu"
    kinds: ClassVar[tuple[type[ExpertTensors], ...]] = (Int8ChannelWeights,)

    @classmethod
    def _operators(cls, weights: ExpertTensors) -> tuple[str, ...]:
        return ("npu_grouped_matmul", "npu_swiglu")

    def _between(
        self, rows: Int8Rows, matrices: Tensor, weights: Int8ChannelWeights, counts: Tensor
    ) -> Int8Rows:
        sums = multiply(
            rows.codes,
            matrices,
            counts,
            scale=weights.gate_up_scale,
            per_token_scale=rows.scales,
            output_dtype=torch.bfloat16,
        )
        hidden = torch.ops.npu.npu_swiglu(sums)
        hidden = quantize(hidden, weights.wire_format, profile=self.int8_profile)
        assert hidden.scales is not None, "quantised rows have scales"
        return Int8Rows(codes=hidden.data, scales=hidden.scales.flatten())


def matrices_of(weights: ExpertTensors) -> tuple[Tensor, Tensor]:
    """Return the matrices [E, H, 2I] and [E, I, H] as views of the parameters."""
    if isinstance(weights, ExpertWeights):
        return weights.gate_up_matrices(), weights.down_matrices()
    assert isinstance(weights, Int8ChannelWeights), "supports() said so"
    return weights.gate_up_proj.transpose(1, 2), weights.down_proj.transpose(1, 2)
