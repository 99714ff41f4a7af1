"""The limits of the fused operators, some of which they do not check themselves.

Source: sgl-kernel-npu, the tiling of fused_deep_moe and dispatch_ffn_combine, and documentation;
sizes of dispatch_ffn_combine and mega_moe: vllm-ascend. Not run on an NPU.
"""

from __future__ import annotations

from epcomm.fuseep.weights import TILE
from epcomm.platforms.ascend.formats import TILE_ROWS
from epcomm.platforms.ascend.limits import MAX_EXPERTS, Limits
from epcomm.spec import BufferSpec

# Tokens of a rank in one call of an operator: the documented limit of mode 1. Mode 2 gets no more,
# which bounds its window and its rows.
MAX_CALL_TOKENS = 256

FUSED_DEEP_MOE_LIMITS = Limits(
    max_tokens=MAX_CALL_TOKENS,
    hidden=(512, 7168),
    # The weights of mode 1 are in NZ, whose rows are counted in whole tiles.
    hidden_multiple=TILE_ROWS,
    gate_up_columns=(1024, 6144),
    gate_up_multiple=TILE,
    top_k=12,
    experts=MAX_EXPERTS,
    # 24 is half of the 48 vector cores of A3.
    local_experts=24,
)
DISPATCH_FFN_COMBINE_LIMITS = Limits(
    max_tokens=MAX_CALL_TOKENS,
    hidden=(1024, 8192),
    hidden_multiple=512,
    gate_up_columns=(2048, 6144),
    gate_up_multiple=1024,
    ranks=(1, 64),
)
MEGA_MOE_LIMITS = Limits(
    max_tokens=4096,
    hidden=(1024, 8192),
    hidden_multiple=512,
    gate_up_columns=(1024, 6144),
    gate_up_multiple=1024,
    ranks=(2, 128),
    top_k=16,
    experts=1024,
    local_experts=128,
)


def max_call_tokens(spec: BufferSpec, limits: Limits) -> int:
    """Return the most tokens of this rank in one call; a longer batch takes several calls."""
    assert spec.max_tokens_per_rank is not None, "static sizes have a limit"
    return min(spec.max_tokens_per_rank, limits.max_tokens or MAX_CALL_TOKENS)


def max_received_rows(spec: BufferSpec, world_size: int, limits: Limits) -> int:
    """Return the most rows that a rank can receive in one call: max_output_size of mode 2.

    The experts of a token are distinct, so a rank of L experts receives a token at most min(K, L)
    times, and each of W ranks has max_call_tokens() tokens. (Upstream passes M * W * K, which is
    too much if L < K.) The kernel drops further rows and reports nothing.
    """
    return max_call_tokens(spec, limits) * world_size * min(spec.top_k, spec.num_local_experts)
