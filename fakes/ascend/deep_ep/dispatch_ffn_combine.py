"""Imitate fuse_mode 2, aclnnDispatchFFNCombine: W8A8 on A3, with float16 between integers.

Both GEMMs return float16, which overflows to infinity, as on the device. It is unknown whether the
exact product or the float32 product is rounded to float16; here it is the latter.
"""

from typing import Self

import torch
from torch import Tensor

from epcomm.types import Int8Profile
from fakes.ascend.deep_ep.config import WINDOW_VARIABLES
from fakes.ascend.deep_ep.fused_call import (
    NAME,
    Experts,
    FusedCall,
    FusedOperator,
    check_tokens,
    check_w13,
    require_tensor,
    require_weight,
)
from fakes.ascend.formats import as_nd
from fakes.ascend.limits import Soc, require, require_soc
from fakes.ascend.operators.activation import Int8Rows, gated_int8
from fakes.ascend.operators.grouped_matmul import integer_product, scale_values
from fakes.ascend.windows import dispatch_ffn_combine_bytes, require_window


class PlainExperts(Experts):
    """The experts of a rank as the device reads them.

    w13: int8 [L, H, 2I], gate first.   w2: int8 [L, I, H].   s13: float32 [L, 2I].
    s2: float32 [L, H].
    """

    @classmethod
    def of(cls, call: FusedCall) -> Self:
        """Read the experts of the rank from a call."""
        return cls(
            w13=as_nd(NAME, call.w13),
            s13=scale_values(call.s13).view(call.num_local, -1),
            w2=as_nd(NAME, call.w2),
            s2=scale_values(call.s2).view(call.num_local, -1),
        )

    def hidden(self, expert: int, codes: Tensor, scales: Tensor) -> Int8Rows:
        """See Experts. A row of zeros gets the scale 0."""
        rows = _half_product(codes, self.w13[expert], self.s13[expert]) * scales[:, None]
        gate, up = rows.chunk(2, dim=1)
        return gated_int8(gate, up)

    def output(self, expert: int, hidden: Int8Rows) -> Tensor:
        """Compute the second product, bfloat16 [N, H]; see Experts."""
        rows = _half_product(hidden.codes, self.w2[expert], self.s2[expert])
        return (rows * hidden.scales[:, None]).bfloat16()


def _half_product(codes: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Multiply codes [N, K] by weight [K, C] and scales [C], round to float16: float32 [N, C]."""
    return (integer_product(codes, weight).float() * scales).half().float()


def _check(call: FusedCall) -> None:
    require_soc(NAME, "fuse_mode 2", Soc.A3)
    check_tokens(call)
    # A wrong 8th argument is detected when rows arrive, see fused.py.
    require(NAME, call.limit > 0, f"max_output_size is above 0, got {call.limit}")
    width = check_w13(call)
    num_local, hidden_size = call.num_local, call.x.shape[1]
    require_tensor("gmm1_permuted_weight_scale", call.s13, torch.int64, [num_local * width])
    require_weight("gmm2_weight", call.w2, [num_local, width // 2, hidden_size])
    require_tensor("gmm2_weight_scale", call.s2, torch.int64, [num_local * hidden_size])
    needed = dispatch_ffn_combine_bytes(call.x.shape[0], call.ids.shape[1], hidden_size)
    require_window(NAME, needed, WINDOW_VARIABLES)


def _counts(received: Tensor) -> Tensor:
    """Return the rows of each expert, int32 [L]."""
    return received.sum(1).to(torch.int32)


DISPATCH_FFN_COMBINE = FusedOperator(
    check=_check,
    profile=Int8Profile.DIVTRUNC16,
    experts=PlainExperts.of,
    counts=_counts,
    limits_rows=True,
)
