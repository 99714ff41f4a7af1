"""Compute Ascend experts on matrices in FRACTAL_NZ, which the runner copies once and keeps.

Users choose these runners by name, because the copies are a second set of experts in memory:
parameters stay row-major and [E, out, in], since checkpoints are loaded into and saved from them.
"""

from functools import partial
from typing import ClassVar

from torch import Tensor

from epcomm.platforms.ascend.formats import alignment_reasons, nz_reasons, to_nz
from epcomm.platforms.machine import Machine
from epcomm.runners.ascend.groups import Int8Rows, multiply_and_activate
from epcomm.runners.ascend.runner import AscendRunner, matrices_of
from epcomm.types import Int8Profile
from epcomm.weights.quantized import Int8ChannelWeights
from epcomm.weights.unquantized import ExpertTensors
from epcomm.weights.written import Derived

# The parameters that are copied, in the order of matrices_of().
_NAMES = ("gate_up_proj", "down_proj")


class AscendNZRunner(AscendRunner):
    """Runs AscendRunner on copies of the matrices in NZ: twice the memory of a layer's experts.

    Copies are made in the first run, one after another, and again in the first run after a
    parameter was replaced, moved or written to. torch counts writes to a tensor, but neither writes
    through its `.data` nor writes of other processes: call forget() after such a write. A device
    graph keeps reading the copies of its capture: run once before capture, and capture again after
    loading.
    """

    name: ClassVar[str] = "ascend_nz"

    def __init__(self, *, int8_profile: Int8Profile = Int8Profile.RINT127) -> None:
        super().__init__(int8_profile=int8_profile)
        self._prepared: dict[str, Derived[Tensor]] = {n: Derived(self.name) for n in _NAMES}

    @classmethod
    def _reasons(cls, weights: ExpertTensors, machine: Machine) -> list[str]:
        reasons = super()._reasons(weights, machine)
        for name, matrices in zip(_NAMES, matrices_of(weights), strict=True):
            reasons += alignment_reasons(name, matrices)
        # One rank that refuses in its first run would leave the others waiting.
        return reasons + nz_reasons(weights.gate_up_proj.device)

    @classmethod
    def is_candidate(cls, weights: ExpertTensors) -> bool:
        # A plan must not double the memory of experts unless the user named this runner.
        return False

    def forget(self) -> None:
        """Drop the copies; the next run makes them again. Local; no host sync."""
        for copy in self._prepared.values():
            copy.forget()

    @classmethod
    def _operators(cls, weights: ExpertTensors) -> tuple[str, ...]:
        return (*super()._operators(weights), "npu_format_cast")

    def _matrices(self, weights: ExpertTensors) -> tuple[Tensor, Tensor]:
        tensors = weights.tensors()
        gate_up, down = (
            self._prepared[name].of({name: tensors[name]}, partial(to_nz, matrices))
            for name, matrices in zip(_NAMES, matrices_of(weights), strict=True)
        )
        return gate_up, down


class AscendSwigluQuantRunner(AscendNZRunner):
    """Runs W8A8 experts in two operators: the first multiplies, activates and quantises.

    That saves writing and reading [C, 2I] of int32. The operator takes its matrices in NZ, and
    rounds as npu_dynamic_quant does (Int8Profile.DIV). So EPConfig.int8_profile must be DIV, and a
    package that quantises rows for dispatch must use DIV too.
    """

    name: ClassVar[str] = "ascend_swiglu_quant"
    kinds: ClassVar[tuple[type[ExpertTensors], ...]] = (Int8ChannelWeights,)
    int8_profiles: ClassVar[frozenset[Int8Profile]] = frozenset({Int8Profile.DIV})

    def __init__(self, *, int8_profile: Int8Profile = Int8Profile.DIV) -> None:
        super().__init__(int8_profile=int8_profile)

    @classmethod
    def _operators(cls, weights: ExpertTensors) -> tuple[str, ...]:
        return ("npu_grouped_matmul_swiglu_quant", "npu_grouped_matmul", "npu_format_cast")

    def _between(
        self, rows: Int8Rows, matrices: Tensor, weights: Int8ChannelWeights, counts: Tensor
    ) -> Int8Rows:
        return multiply_and_activate(rows, matrices, counts, weight_scale=weights.gate_up_scale)
