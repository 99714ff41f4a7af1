"""Compute FP8 and mxfp8 experts by Triton kernels that read rows in place, counts on the device."""

from collections.abc import Callable
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from epcomm.platforms.cuda import Capabilities
from epcomm.platforms.machine import Machine
from epcomm.quantization import FP8_FLOAT32_SCALES
from epcomm.records import RowsDispatchOutput
from epcomm.runners.base import BatchInvariance, slot_weights_to_apply
from epcomm.runners.gpu_slots import GpuSlotsRunner, first_product, second_product
from epcomm.types import WireFormat
from epcomm.weights.quantized import BLOCK, Fp8BlockWeights, Mxfp8Weights, QuantizedWeights
from epcomm.weights.unquantized import ExpertTensors

# A function with the signature of those in kernels/gemm/fp8.py.
Multiply = Callable[..., object]


class Fp8TritonRunner(GpuSlotsRunner):
    """Reads rows through the index, without a copy; the second quantisation is fused. No gradients.

    Results of slots that no expert computes are undefined.
    """

    name: ClassVar[str] = "fp8_triton"
    kinds: ClassVar[tuple[type[ExpertTensors], ...]] = (Fp8BlockWeights,)
    # Ada is the first GPU that multiplies e4m3.
    capabilities: ClassVar[Capabilities] = Capabilities(least=(8, 9))
    size_multiple: ClassVar[int] = BLOCK
    row_formats: ClassVar[tuple[WireFormat, ...]] = (FP8_FLOAT32_SCALES,)

    def _compute_rows(self, dispatched: RowsDispatchOutput, weights: ExpertTensors) -> Tensor:
        gate_up_fp8, down_fp8 = self._products
        assert isinstance(weights, QuantizedWeights), "supports() said so"
        first = first_product(dispatched, weights, self.int8_profile, self.product_sms)
        inner_size, num_slots = weights.intermediate_size, dispatched.num_slots
        codes = first.codes.new_empty(num_slots, inner_size)
        scales = first.scales.new_empty(num_slots, weights.wire_format.num_scales(inner_size))
        begun = gate_up_fp8(first, out_codes=codes, out_scales=scales)
        results = codes.new_empty(num_slots, weights.hidden_size, dtype=weights.hidden_dtype)
        second = second_product(first, codes, scales, weights)
        slot_weights = slot_weights_to_apply(dispatched, self.name)
        down_fp8(second, slot_weights=slot_weights, out=results, after=begun)
        return results

    @cached_property
    def _products(self) -> tuple[Multiply, Multiply]:
        # Cached, because an import in every call takes 1 us.
        from epcomm.kernels.gemm.fp8 import down_fp8, gate_up_fp8

        return gate_up_fp8, down_fp8


class Mxfp8TritonRunner(Fp8TritonRunner):
    """Runs mxfp8 experts as Fp8TritonRunner runs FP8 ones, by products in BF16."""

    name: ClassVar[str] = "mxfp8_triton"
    note: ClassVar[str] = (
        "dequantises to BF16 in tiles, which is faster on Hopper than scaling every 32 elements"
    )
    kinds: ClassVar[tuple[type[ExpertTensors], ...]] = (Mxfp8Weights,)
    capabilities: ClassVar[Capabilities] = Capabilities(least=(9, 0), most=(9, 0))
    row_formats: ClassVar[tuple[WireFormat, ...]] = (Mxfp8Weights.block_format,)

    @classmethod
    def batch_invariance(cls, weights: ExpertTensors, machine: Machine) -> BatchInvariance:
        # Tiles of 32 and of 128 rows add up the inner dimension in one order.
        device = machine.device_of(weights.gate_up_proj)
        return BatchInvariance.of_gpu(machine, device, "triton")

    @cached_property
    def _products(self) -> tuple[Multiply, Multiply]:
        from epcomm.kernels.gemm.mxfp8 import down_mxfp8, gate_up_mxfp8

        return gate_up_mxfp8, down_mxfp8
