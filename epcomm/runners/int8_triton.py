"""Compute INT8 experts by three Triton kernels that read rows in place, counts on the device."""

from typing import ClassVar

import torch
from torch import Tensor

from epcomm.platforms.cuda import Capabilities
from epcomm.platforms.machine import Machine
from epcomm.quantization import INT8_PER_TOKEN
from epcomm.records import RowsDispatchOutput
from epcomm.runners.base import int32_reasons, slot_weights_to_apply
from epcomm.runners.gpu_slots import GpuSlotsRunner, first_product, second_product
from epcomm.types import Int8Profile, WireFormat
from epcomm.weights.quantized import Int8ChannelWeights
from epcomm.weights.unquantized import ExpertTensors


class Int8TritonRunner(GpuSlotsRunner):
    """Reads rows through the index, without a copy; hidden rows pass through memory. No gradients.

    Beside the results it allocates 5 I + 4 bytes a slot: float32 hidden rows, their codes and
    scales. Results of slots that no expert computes are undefined.
    """

    name: ClassVar[str] = "int8_triton"
    kinds: ClassVar[tuple[type[ExpertTensors], ...]] = (Int8ChannelWeights,)
    # Ampere: the compiler has no integer products for older tensor cores.
    capabilities: ClassVar[Capabilities] = Capabilities(least=(8, 0))
    # The tensor memory access unit loads tiles of a matrix whose row stride is a multiple of 16 B.
    size_multiple: ClassVar[int] = 16
    int8_profiles: ClassVar[frozenset[Int8Profile]] = frozenset(Int8Profile)
    row_formats: ClassVar[tuple[WireFormat, ...]] = (INT8_PER_TOKEN,)

    @classmethod
    def _reasons(cls, weights: ExpertTensors, machine: Machine) -> list[str]:
        return int32_reasons(weights) + super()._reasons(weights, machine)

    def _compute_rows(self, dispatched: RowsDispatchOutput, weights: ExpertTensors) -> Tensor:
        from epcomm.kernels.gemm.int8 import multiply_int8, quantize_hidden_int8

        assert isinstance(weights, Int8ChannelWeights), "supports() said so"
        first = first_product(dispatched, weights, self.int8_profile, self.product_sms)
        inner_size, num_slots = weights.intermediate_size, dispatched.num_slots
        hidden = first.scales.new_empty(num_slots, inner_size)
        # MASKED rows have no index, and capacity for many more rows than the counts.
        is_packed = first.row_of_slot is not None
        multiply_int8(first, is_packed=is_packed, out=hidden)
        codes = torch.empty_like(hidden, dtype=torch.int8)
        scales = hidden.new_empty(num_slots, 1)
        quantize_hidden_int8(
            hidden,
            first.counts,
            first.first_slot,
            profile=self.int8_profile,
            out_codes=codes,
            out_scales=scales,
        )
        results = codes.new_empty(num_slots, weights.hidden_size, dtype=weights.hidden_dtype)
        multiply_int8(
            second_product(first, codes, scales, weights),
            slot_weights=slot_weights_to_apply(dispatched, self.name),
            is_packed=is_packed,
            out=results,
        )
        return results
