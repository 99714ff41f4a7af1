"""Imitate fuse_mode 1, aclnnFusedDeepMoe: W8A8 on A3, with gate and up interleaved in tiles.

Each 128 columns of the first weight are 64 of the gate and then 64 of up. Everything between the
integers is float32. Permitted orders of its products and quotients differ in the last bit; here
they are those of the documentation.
"""

from typing import Self

import torch
from torch import Tensor

from epcomm.quantization.int8 import INT8_MAX
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
from fakes.ascend.formats import ACL_FORMAT_NZ, as_nd, format_of
from fakes.ascend.limits import (
    Soc,
    current_machine,
    require,
    require_modelled,
    require_soc,
)
from fakes.ascend.operators.activation import Int8Rows, int8_codes
from fakes.ascend.operators.grouped_matmul import integer_product
from fakes.ascend.sizes import require_size
from fakes.ascend.windows import fused_deep_moe_bytes, require_window

# Columns of the gate in a tile, followed by those of up.
HALF_TILE = 64
# Half of the vector cores of A3.
MAX_LOCAL_EXPERTS = 24
# Dtypes of weights that the operator takes on A5.
_MX_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2)


class TiledExperts(Experts):
    """w13 int8 [L, H, 2I], s13 float32 [L, 2I], in tiles; w2 int8 [L, H, I], s2 float32 [L, H]."""

    @classmethod
    def of(cls, call: FusedCall) -> Self:
        """Read the experts of the rank from a call."""
        w13, w2 = as_nd(NAME, call.w13), as_nd(NAME, call.w2)
        return cls(w13=w13, s13=call.s13, w2=w2, s2=call.s2)

    def hidden(self, expert: int, codes: Tensor, scales: Tensor) -> Int8Rows:
        """See Experts. A row of zeros gets the scale 0."""
        sums = integer_product(codes, self.w13[expert]).float()
        rows = sums * self.s13[expert] * scales[:, None]
        tiles = rows.unflatten(1, (-1, 2, HALF_TILE))
        gate, up = tiles[:, :, 0].flatten(1), tiles[:, :, 1].flatten(1)
        gated = gate / (1.0 + torch.exp(-gate)) * up
        amax = gated.abs().amax(dim=1, keepdim=True)
        quotients = gated * INT8_MAX * torch.reciprocal(amax)
        return Int8Rows(codes=int8_codes(quotients), scales=amax.squeeze(1) * (1.0 / INT8_MAX))

    def output(self, expert: int, hidden: Int8Rows) -> Tensor:
        """Compute the second product, bfloat16 [N, H]; see Experts."""
        sums = integer_product(hidden.codes, self.w2[expert].T).float()
        return (sums * self.s2[expert] * hidden.scales[:, None]).bfloat16()


def _check(call: FusedCall) -> None:
    _check_chip(call)
    check_tokens(call)
    num_tokens, max_tokens = call.x.shape[0], call.limit
    rule = f"num_max_dispatch_tokens_per_rank is {max_tokens}, less than {num_tokens} tokens"
    require(NAME, num_tokens <= max_tokens, rule)
    width = check_w13(call)
    rule = f"2I is a multiple of {2 * HALF_TILE}, a tile, got {width}"
    require(NAME, width % (2 * HALF_TILE) == 0, rule)
    num_local, hidden_size = call.num_local, call.x.shape[1]
    require_tensor("gmm1_permuted_weight_scale", call.s13, torch.float32, [num_local, width])
    require_weight("gmm2_weight", call.w2, [num_local, hidden_size, width // 2])
    require_tensor("gmm2_weight_scale", call.s2, torch.float32, [num_local, hidden_size])
    for name, weight in (("gmm1_permuted_weight", call.w13), ("gmm2_weight", call.w2)):
        rule = f"{name} is in NZ with fuse_mode 1; npu_format_cast(weight, {ACL_FORMAT_NZ})"
        require(NAME, format_of(weight) == ACL_FORMAT_NZ, rule)
    _check_sizes(call, width)


def _check_chip(call: FusedCall) -> None:
    require_soc(NAME, "fuse_mode 1", Soc.A3, Soc.A5)
    if current_machine().soc is Soc.A5:
        takes = call.w13.dtype in _MX_DTYPES
        rule = f"on A5 weights are MX (FP8 or FP4), got {call.w13.dtype}; INT8 runs on A3"
        require(NAME, takes, rule)
        require_modelled(NAME, not takes, "MX weights, those of A5,")


def _check_sizes(call: FusedCall, width: int) -> None:
    hidden_size, num_topk = call.x.shape[1], call.ids.shape[1]
    max_tokens, num_experts, num_local = call.limit, call.num_experts, call.num_local
    require_size(NAME, max_tokens <= 256, f"1 to 256 tokens a rank, got {max_tokens}")
    require_size(NAME, num_topk <= 12, f"K is 1 to 12, got {num_topk}")
    require_size(NAME, num_experts <= 512, f"E is at most 512, got {num_experts}")
    rule = f"{MAX_LOCAL_EXPERTS} experts a rank at most, got {num_local}"
    require_size(NAME, num_local <= MAX_LOCAL_EXPERTS, rule)
    require_size(NAME, 512 <= hidden_size <= 7168, f"H is 512 to 7168, got {hidden_size}")
    require_size(NAME, 1024 <= width <= 6144, f"2I is 1024 to 6144, got {width}")
    needed = fused_deep_moe_bytes(max_tokens, call.num_ranks, num_local, hidden_size)
    require_window(NAME, needed, WINDOW_VARIABLES)


def _counts(received: Tensor) -> Tensor:
    """int32 [L * W], expert by expert: no sums, unlike the counts of low latency."""
    return received.flatten().to(torch.int32)


FUSED_DEEP_MOE = FusedOperator(
    check=_check,
    profile=Int8Profile.RINT127,
    experts=TiledExperts.of,
    counts=_counts,
    limits_rows=False,
)
