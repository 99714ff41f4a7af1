"""Share the slots of either layout, and the checks of experts, among the GPU runners."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from epcomm.kernels.gemm.operands import Product
from epcomm.platforms.cuda import Capabilities, cuda_reasons, triton_reasons
from epcomm.platforms.machine import Machine, this_machine
from epcomm.quantization import quantizer_for
from epcomm.records import MaskedDispatchOutput, RowsDispatchOutput
from epcomm.runners.base import ExpertRunner, slot_weights_to_apply
from epcomm.spec import Availability
from epcomm.types import Int8Profile, Layout, WireFormat, WireTensor
from epcomm.weights.quantized import EightBitWeights
from epcomm.weights.unquantized import ExpertTensors


@dataclass(frozen=True, kw_only=True, eq=False)
class Slots:
    """The slots that the kernels compute, from either layout.

    rows: [R, H].   row_of_slot: [C], int32, or None: slot s is row s.   counts: [L], int32, slots
    of each expert.   first_slot: [L + 1], int32.   weights: [C], float32, router weights that
    multiply the results, or None.   num_slots: C.
    """

    rows: WireTensor
    row_of_slot: Tensor | None
    counts: Tensor
    first_slot: Tensor
    weights: Tensor | None
    num_slots: int

    def first_product(self, weights: EightBitWeights, profile: Int8Profile) -> Product:
        """Return rows and gate_up matrices; rows that came unquantised are quantised here."""
        rows = self.rows
        if not rows.format.dtype.is_quantized:
            quantize = quantizer_for(rows.data.device)
            rows = quantize(rows.data, weights.wire_format, profile=profile)
        assert rows.scales is not None, "quantised rows have scales"
        return Product(
            codes=rows.data,
            scales=rows.scales,
            row_of_slot=self.row_of_slot,
            counts=self.counts,
            first_slot=self.first_slot,
            matrices=weights.gate_up_proj,
            matrix_scales=weights.gate_up_scale,
        )

    def second_product(self, codes: Tensor, scales: Tensor, weights: EightBitWeights) -> Product:
        """Return hidden rows, one for each slot, and down matrices."""
        return Product(
            codes=codes,
            scales=scales,
            counts=self.counts,
            first_slot=self.first_slot,
            matrices=weights.down_proj,
            matrix_scales=weights.down_scale,
        )


class GpuSlotsRunner(ExpertRunner):
    """Hands the slots of either layout to kernels. No gradients.

    capabilities: compute capabilities of GPUs that have the kernels' instructions.
    size_multiple: hidden_size and intermediate_size must be multiples of this.
    row_formats: wire formats of rows that the kernels read, and use between the products.
    """

    layouts: ClassVar[frozenset[Layout]] = frozenset(Layout)
    capabilities: ClassVar[Capabilities]
    size_multiple: ClassVar[int]
    row_formats: ClassVar[tuple[WireFormat, ...]]

    @classmethod
    def probe(cls, machine: Machine) -> Availability:
        return Availability.judge(
            missing=triton_reasons(machine),
            command="pip install triton",
            absent=cuda_reasons(machine) or cls.capabilities.lacking(machine.capability(None)),
            needs=f"an NVIDIA GPU of {cls.capabilities}",
        )

    @classmethod
    def supports(cls, weights: ExpertTensors, machine: Machine | None = None) -> Availability:
        if not isinstance(weights, cls.kinds):
            return super().supports(weights)
        reasons = [
            f"{name} is {size}, expected a multiple of {cls.size_multiple}"
            for name, size in sizes_of(weights).items()
            if size % cls.size_multiple
        ]
        machine = machine or this_machine()
        device = machine.device_of(next(iter(weights.tensors().values())))
        if device.type != "cuda":
            reasons.append(f"the experts are on {device}, expected cuda")
        else:
            reasons += cls.capabilities.lacking(machine.capability(device))
        if weights.wire_format not in cls.row_formats:
            read = ", ".join(map(str, cls.row_formats))
            reasons.append(f"the experts want {weights.wire_format} rows, expected {read}")
        reasons += triton_reasons(machine)
        return Availability(ok=not reasons, reasons=tuple(reasons))

    def _compute_rows(self, dispatched: RowsDispatchOutput, weights: ExpertTensors) -> Tensor:
        return self.compute(slots_of_rows(dispatched, self.name), weights)

    def _compute_masked(self, dispatched: MaskedDispatchOutput, weights: ExpertTensors) -> Tensor:
        results = self.compute(_slots_of_masked(dispatched, self.name), weights)
        return results.view(dispatched.hidden_states.data.shape)

    @abstractmethod
    def compute(self, slots: Slots, weights: ExpertTensors) -> Tensor:
        """Compute the slots, [C, H], in the dtype of the hidden states; padding is undefined.

        Local. Host sync: none.
        """


def sizes_of(weights: ExpertTensors) -> dict[str, int]:
    """Return the sizes that kernels may refuse, by name."""
    return {
        "hidden_size": weights.hidden_size,
        "intermediate_size": weights.intermediate_size,
    }


def slots_of_rows(dispatched: RowsDispatchOutput, caller: str) -> Slots:
    index = dispatched.index
    return Slots(
        rows=dispatched.hidden_states,
        row_of_slot=index.row_of_slot,
        counts=index.num_tokens_per_expert,
        first_slot=index.first_slot,
        weights=slot_weights_to_apply(dispatched, caller),
        num_slots=dispatched.num_slots,
    )


def _slots_of_masked(dispatched: MaskedDispatchOutput, caller: str) -> Slots:
    rows, counts = dispatched.hidden_states, dispatched.num_tokens_per_expert
    num_experts, capacity = rows.data.shape[:2]
    weights = slot_weights_to_apply(dispatched, caller)
    return Slots(
        rows=WireTensor(
            data=rows.data.flatten(0, 1),
            format=rows.format,
            scales=None if rows.scales is None else rows.scales.flatten(0, 1),
        ),
        row_of_slot=None,
        counts=counts,
        first_slot=torch.arange(num_experts + 1, dtype=torch.int32, device=counts.device)
        * capacity,
        weights=None if weights is None else weights.flatten(),
        num_slots=num_experts * capacity,
    )
