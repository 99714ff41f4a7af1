"""Compute W8A8 experts of any intermediate size on Ascend, with bfloat16 between the products.

Plans take this runner where npu_dequant_swiglu_quant refuses I, for example Mixtral's; elsewhere
they take `ascend`, which rounds less and quantises within that operator.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from epcomm.quantization import quantize
from epcomm.runners.ascend.groups import ExpertGroups, Int8Rows, multiply
from epcomm.runners.ascend.runner import AscendRunner
from epcomm.weights.quantized import Int8ChannelWeights
from epcomm.weights.unquantized import ExpertTensors


class AscendSwigluRunner(AscendRunner):
    """Runs AscendRunner with the first product and the activation rounded to bfloat16.

    Codes and scales between the products are those of RINT127.
    """

    name: ClassVar[str] = "ascend_swiglu"
    kinds: ClassVar[tuple[type[ExpertTensors], ...]] = (Int8ChannelWeights,)

    @classmethod
    def _operators(cls, weights: ExpertTensors) -> tuple[str, ...]:
        return ("npu_grouped_matmul", "npu_swiglu")

    @classmethod
    def _size_reasons(cls, intermediate_size: int) -> list[str]:
        return []

    def _between(
        self, rows: Int8Rows, matrices: Tensor, weights: Int8ChannelWeights, groups: ExpertGroups
    ) -> Int8Rows:
        sums = multiply(
            rows.codes,
            matrices,
            groups,
            scale=weights.gate_up_scale,
            per_token_scale=rows.scales,
            output_dtype=torch.bfloat16,
        )
        hidden = quantize(
            torch.ops.npu.npu_swiglu(sums), weights.wire_format, profile=self.int8_profile
        )
        assert hidden.scales is not None, "quantised rows have scales"
        return Int8Rows(codes=hidden.data, scales=hidden.scales.flatten())
