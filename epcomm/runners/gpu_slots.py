"""The products and checks of eight-bit experts that the GPU runners share."""

from typing import ClassVar

from torch import Tensor

from epcomm.kernels.gemm.operands import Product
from epcomm.platforms.cuda import Capabilities, cuda_reasons, triton_reasons
from epcomm.platforms.machine import Machine
from epcomm.quantization import quantizer_for
from epcomm.records import RowsDispatchOutput
from epcomm.runners.base import ExpertRunner, size_reasons
from epcomm.spec import Availability
from epcomm.types import Int8Profile, Layout, WireFormat
from epcomm.weights.quantized import QuantizedWeights
from epcomm.weights.unquantized import ExpertTensors


class GpuSlotsRunner(ExpertRunner):
    """Computes slots by kernels that read rows in place. No gradients.

    capabilities: compute capabilities of GPUs that have the kernels' instructions.
    size_multiple: hidden_size and intermediate_size must be multiples of this.
    row_formats: wire formats of rows that the kernels read, and use between the products.
    """

    layouts: ClassVar[frozenset[Layout]] = frozenset(Layout)
    has_limit: ClassVar[bool] = True
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
    def _reasons(cls, weights: ExpertTensors, machine: Machine) -> list[str]:
        reasons = size_reasons(weights, multiple=cls.size_multiple)
        device = machine.device_of(weights.gate_up_proj)
        if device.type != "cuda":
            reasons.append(f"the experts are on {device}, expected cuda")
        else:
            reasons += cls.capabilities.lacking(machine.capability(device))
        if weights.wire_format not in cls.row_formats:
            read = ", ".join(map(str, cls.row_formats))
            reasons.append(f"the experts need {weights.wire_format} rows, expected {read}")
        return reasons + triton_reasons(machine)


def first_product(
    dispatched: RowsDispatchOutput,
    weights: QuantizedWeights,
    profile: Int8Profile,
    num_sms: int | None = None,
) -> Product:
    """Return rows and gate_up matrices; unquantised rows are quantised here."""
    rows, index = dispatched.hidden_states, dispatched.index
    if not rows.format.dtype.is_quantized:
        rows = quantizer_for(rows.data.device)(rows.data, weights.wire_format, profile=profile)
    assert rows.scales is not None, "quantised rows have scales"
    return Product(
        codes=rows.data,
        scales=rows.scales,
        row_of_slot=index.row_of_slot,
        counts=index.num_tokens_per_expert,
        first_slot=index.first_slot,
        matrices=weights.gate_up_proj,
        matrix_scales=weights.gate_up_scale,
        num_sms=num_sms,
    )


def second_product(
    first: Product, codes: Tensor, scales: Tensor, weights: QuantizedWeights
) -> Product:
    """Return hidden rows, one for each slot of the first product, and down matrices."""
    return Product(
        codes=codes,
        scales=scales,
        counts=first.counts,
        first_slot=first.first_slot,
        matrices=weights.down_proj,
        matrix_scales=weights.down_scale,
        num_sms=first.num_sms,
    )
