"""Imitate fuse_mode 3, mega_moe of cann_ops_transformer, with W8A8 experts on A3.

Its arithmetic between the products is not documented: here float32, as in mode 1.
Source: sgl-kernel-npu, documentation and signature; not checked on an NPU.
"""

from typing import Self

import torch
from torch import Tensor

from epcomm.types import Int8Profile
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
from fakes.ascend.limits import Soc, require, require_soc
from fakes.ascend.operators.activation import Int8Rows, gated_int8
from fakes.ascend.operators.grouped_matmul import integer_product

# Tokens of a rank in one call.
MAX_TOKENS = 4096


class ListedExperts(Experts):
    """The experts of a rank: w13 int8 [L, H, 2I], gate first; w2 int8 [L, I, H]; float32 scales."""

    @classmethod
    def of(cls, call: FusedCall) -> Self:
        """Read the experts of the rank from a call."""
        return cls(w13=call.w13, s13=call.s13, w2=call.w2, s2=call.s2)

    def hidden(self, expert: int, codes: Tensor, scales: Tensor) -> Int8Rows:
        """See Experts."""
        product = integer_product(codes, self.w13[expert]).float() * self.s13[expert]
        gate, up = (product * scales[:, None]).chunk(2, dim=1)
        return gated_int8(gate, up)

    def output(self, expert: int, hidden: Int8Rows) -> Tensor:
        """Compute the second product, bfloat16 [N, H]; see Experts."""
        product = integer_product(hidden.codes, self.w2[expert]).float() * self.s2[expert]
        return (product * hidden.scales[:, None]).bfloat16()


def _check(call: FusedCall) -> None:
    require_soc(NAME, "fuse_mode 3", Soc.A3)
    check_tokens(call)
    fits = call.x.shape[0] <= call.limit <= MAX_TOKENS
    rule = f"num_max_dispatch_tokens_per_rank is {call.x.shape[0]} to {MAX_TOKENS}"
    require(NAME, fits, f"{rule}, got {call.limit}")
    width, num_local, hidden_size = check_w13(call), call.num_local, call.x.shape[1]
    require_tensor("gmm1_permuted_weight_scale", call.s13, torch.float32, [num_local, width])
    require_weight("gmm2_weight", call.w2, [num_local, width // 2, hidden_size])
    require_tensor("gmm2_weight_scale", call.s2, torch.float32, [num_local, hidden_size])


MEGA_MOE = FusedOperator(
    check=_check,
    profile=Int8Profile.RINT127,
    experts=ListedExperts.of,
    counts=lambda received: received.sum(1).to(torch.int32),
    limits_rows=False,
)
