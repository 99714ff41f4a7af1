"""Check the sizes that the fused operators refuse, or would silently compute wrongly.

Source: sgl-kernel-npu, the tiling of fused_deep_moe and dispatch_ffn_combine, and documentation;
sizes of dispatch_ffn_combine and mega_moe: vllm-ascend. Not run on an NPU.
"""

from __future__ import annotations

from collections.abc import Mapping

from epcomm.fuseep.interleave import TILE
from epcomm.platforms.ascend.chip import Soc
from epcomm.platforms.ascend.environment import variable_reasons
from epcomm.platforms.ascend.formats import TILE_ROWS
from epcomm.platforms.ascend.limits import MAX_EXPERTS, Limits, window_reasons
from epcomm.spec import BufferSpec

# Most tokens of a rank in one call of an operator. The documentation says so for mode 1; mode 2
# gets no more, which bounds its window and its rows.
MAX_CALL_TOKENS = 256
# The window of mode 2 has 10 MB beside the rows; an MB is 2**20 bytes, as HCCL_BUFFSIZE counts.
_MODE_2_EXTRA_BYTES = 10 * 2**20
# The window of mode 1 holds rows of dispatch and of combine, with 2 bytes an element.
_MODE_1_COPIES, _MODE_1_ELEMENT_BYTES = 2, 2
# The window of mode 2 holds 3 bytes an element of a row: INT8 in dispatch and 2 bytes in combine.
_MODE_2_ELEMENT_BYTES = 3


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


def fused_deep_moe_window_bytes(
    spec: BufferSpec, world_size: int, limits: Limits = FUSED_DEEP_MOE_LIMITS
) -> int:
    """Return the bytes of mode 1's HCCL window: all ranks' rows at every local expert."""
    slots = world_size * max_call_tokens(spec, limits) * spec.num_local_experts
    return slots * spec.hidden_size * _MODE_1_ELEMENT_BYTES * _MODE_1_COPIES


def dispatch_ffn_combine_window_bytes(
    spec: BufferSpec, limits: Limits = DISPATCH_FFN_COMBINE_LIMITS
) -> int:
    """Return the bytes of mode 2's HCCL window; the operator refuses a smaller window.

    The operator's message says 3 MB.
    """
    rows = max_call_tokens(spec, limits) * spec.top_k
    return _MODE_2_ELEMENT_BYTES * rows * spec.hidden_size + _MODE_2_EXTRA_BYTES


def max_received_rows(
    spec: BufferSpec, world_size: int, limits: Limits = DISPATCH_FFN_COMBINE_LIMITS
) -> int:
    """Return the most rows that a rank can receive in one call: max_output_size of mode 2.

    A token's experts are distinct, so that a rank of L experts gets a token min(K, L) times at
    most, and each of W ranks has max_call_tokens() tokens. (Upstream passes M * W * K, which is
    more than can come where L < K.) The kernel drops rows that do not fit and reports nothing.
    """
    return max_call_tokens(spec, limits) * world_size * min(spec.top_k, spec.num_local_experts)


def fused_deep_moe_reasons(
    spec: BufferSpec,
    world_size: int,
    *,
    soc: Soc | None,
    environment: Mapping[str, str],
    limits: Limits = FUSED_DEEP_MOE_LIMITS,
) -> list[str]:
    """Return why mode 1 does not serve W8A8 experts of these sizes; empty if it does.

    Args:
        spec: the sizes of the layer.
        world_size: W.
        soc: the processor; None, if it is not known, gives no reason.
        environment: a snapshot of the environment variables.
        limits: the sizes that the operator takes; a test on small sizes passes other limits.
    """
    reasons = _soc_reasons("fused_deep_moe takes MX weights there, not INT8", soc)
    reasons += limits.reasons(spec, world_size)
    if spec.max_recv_slots is not None:
        reasons.append("has capacity for any routing and no slot budget; leave max_recv_slots None")
    reasons += window_reasons(fused_deep_moe_window_bytes(spec, world_size, limits), environment)
    return reasons + variable_reasons(environment, soc)


def dispatch_ffn_combine_reasons(
    spec: BufferSpec,
    world_size: int,
    *,
    soc: Soc | None,
    environment: Mapping[str, str],
    limits: Limits = DISPATCH_FFN_COMBINE_LIMITS,
) -> list[str]:
    """Return why mode 2 does not serve W8A8 experts of these sizes; empty if it does.

    Args: see fused_deep_moe_reasons().
    """
    reasons = _soc_reasons("dispatch_ffn_combine does not exist there", soc)
    reasons += limits.reasons(spec, world_size)
    rows = max_received_rows(spec, world_size, limits)
    if spec.max_recv_slots is not None and spec.max_recv_slots < rows:
        reasons.append(
            f"max_recv_slots is {spec.max_recv_slots}, but a rank may receive {rows} rows "
            f"({max_call_tokens(spec, limits)} tokens * {world_size} ranks * "
            f"{min(spec.top_k, spec.num_local_experts)} experts of a rank), and rows beyond it "
            f"would vanish silently; set it to {rows} or leave it None"
        )
    reasons += window_reasons(dispatch_ffn_combine_window_bytes(spec, limits), environment)
    return reasons + variable_reasons(environment, soc)


def mega_moe_reasons(
    spec: BufferSpec,
    world_size: int,
    *,
    soc: Soc | None,
    environment: Mapping[str, str],
    limits: Limits = MEGA_MOE_LIMITS,
) -> list[str]:
    """Return why mode 3 does not serve W8A8 experts of these sizes; empty if it does.

    The size of its HCCL window is not documented; the operator checks it.

    Args: see fused_deep_moe_reasons().
    """
    reasons = _soc_reasons("mega_moe of deep_ep is documented for A3 alone", soc)
    reasons += limits.reasons(spec, world_size)
    if spec.max_recv_slots is not None:
        reasons.append("has capacity for any routing and no slot budget; leave max_recv_slots None")
    return reasons + variable_reasons(environment, soc)


def _soc_reasons(on_a5: str, soc: Soc | None) -> list[str]:
    why = {Soc.A2: "FuseEP is not built for it", Soc.A5: on_a5}
    if soc is None or soc not in why:
        return []
    return [f"the processor is {soc.value}, expected {Soc.A3.value}: {why[soc]}"]
