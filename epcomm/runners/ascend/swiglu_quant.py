"""Compute W8A8 experts on Ascend in two operators: the first multiplies, activates and quantises.

That saves writing and reading [C, 2I] of int32. The operator takes its matrices in NZ, and rounds
as npu_dynamic_quant does (Int8Profile.DIV). So EPConfig.int8_profile must be DIV, and a package
that quantises rows for dispatch must use DIV too.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from epcomm.runners.ascend.groups import (
    ExpertGroups,
    Int8Rows,
    fused_reasons,
    multiply_and_activate,
)
from epcomm.runners.ascend.nz import AscendNZRunner
from epcomm.types import Int8Profile
from epcomm.weights.quantized import Int8ChannelWeights
from epcomm.weights.unquantized import ExpertTensors


class AscendSwigluQuantRunner(AscendNZRunner):
    """Runs experts without gradients on a second copy of them; users choose it by name.

    See AscendNZRunner for the copies.
    """

    name: ClassVar[str] = "ascend_swiglu_quant"
    kinds: ClassVar[tuple[type[ExpertTensors], ...]] = (Int8ChannelWeights,)
    int8_profiles: ClassVar[frozenset[Int8Profile]] = frozenset({Int8Profile.DIV})

    def __init__(self, *, int8_profile: Int8Profile = Int8Profile.DIV) -> None:
        super().__init__(int8_profile=int8_profile)

    @classmethod
    def _operators(cls, weights: ExpertTensors) -> tuple[str, ...]:
        return ("npu_grouped_matmul_swiglu_quant", "npu_grouped_matmul", "npu_format_cast")

    @classmethod
    def _size_reasons(cls, intermediate_size: int) -> list[str]:
        return fused_reasons(intermediate_size)

    def _between(
        self, rows: Int8Rows, matrices: Tensor, weights: Int8ChannelWeights, groups: ExpertGroups
    ) -> Int8Rows:
        return multiply_and_activate(rows, matrices, groups, weight_scale=weights.gate_up_scale)
