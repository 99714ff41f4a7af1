"""Compute FP8 experts on Hopper by kernels in CUDA C++, compiled at the first call."""

from functools import cached_property
from typing import ClassVar

from epcomm.platforms.cuda import Capabilities
from epcomm.platforms.machine import Machine
from epcomm.runners.base import BatchInvariance
from epcomm.runners.fp8_triton import Fp8TritonRunner, Multiply
from epcomm.weights.unquantized import ExpertTensors


class Fp8WgmmaRunner(Fp8TritonRunner):
    """Runs the products of Fp8TritonRunner in CUDA; results differ in the order of sums alone.

    The first call on a device compiles for some two seconds; make it before capturing a graph.
    """

    name: ClassVar[str] = "fp8_wgmma"
    # Only compute capability 9.0 has the wgmma instructions.
    capabilities: ClassVar[Capabilities] = Capabilities(least=(9, 0), most=(9, 0))

    @classmethod
    def _reasons(cls, weights: ExpertTensors, machine: Machine) -> list[str]:
        from epcomm.kernels.cuda_jit import nvrtc_is_installed
        from epcomm.kernels.gemm.fp8_hopper import HIDDEN_DTYPES

        reasons = super()._reasons(weights, machine)
        if weights.dtype not in HIDDEN_DTYPES:
            reasons.append(f"hidden states are {weights.dtype}, expected bfloat16 or float16")
        is_on_gpu = machine.device_of(weights.gate_up_proj).type == "cuda"
        if is_on_gpu and not machine.has_library(nvrtc_is_installed):
            reasons.append("NVRTC is not installed")
        return reasons

    @classmethod
    def batch_invariance(cls, weights: ExpertTensors, machine: Machine) -> BatchInvariance:
        # Every tile has 128 rows and adds up the blocks of the inner dimension in order, whether
        # rows are read through the index or not; see fp8_hopper.cu.
        device = machine.device_of(weights.gate_up_proj)
        return BatchInvariance.of_gpu(machine, device, "NVRTC")

    @cached_property
    def _products(self) -> tuple[Multiply, Multiply]:
        from epcomm.kernels.gemm.fp8_hopper import down_fp8, gate_up_fp8

        return gate_up_fp8, down_fp8
