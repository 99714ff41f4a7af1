"""Compute the HCCL windows that calls need, and compare them with HCCL_BUFFSIZE.

Source: the tiling functions of sgl-kernel-npu and of the vendor's operators, as documented.
"""

from collections.abc import Mapping

from epcomm.config import environment
from epcomm.types import align_up
from fakes.ascend.sizes import require_size

MIB = 1 << 20
# MiB of the window that HCCL gives without HCCL_BUFFSIZE.
DEFAULT_MIB = 200


def window_bytes(names: tuple[str, ...], variables: Mapping[str, str] | None = None) -> int:
    """Return the window set by the first of the variables `names` that is set."""
    variables = environment() if variables is None else variables
    texts = [variables[name] for name in names if name in variables]
    return int(texts[0] if texts else DEFAULT_MIB) * MIB


def normal_bytes(max_tokens: int, num_topk: int, hidden_size: int) -> int:
    """Return the window bytes of dispatch() and combine() of deep_ep."""
    row = align_up(2 * hidden_size, 512) + align_up(align_up(2 * hidden_size, 32) + 44, 512)
    return 2 * (max_tokens * num_topk * row + 4 * MIB + 204 * MIB)


def low_latency_bytes(max_tokens: int, num_topk: int, hidden_size: int, num_experts: int) -> int:
    """Return the window bytes of low_latency_dispatch() and its combine."""
    # Two bytes an element, also for INT8 rows, because combine needs them.
    sent = num_experts * align_up(align_up(2 * hidden_size, 32) + 44, 512)
    returned = num_topk * align_up(2 * hidden_size, 512)
    return 2 * max_tokens * (sent + returned)


def fused_deep_moe_bytes(
    max_tokens: int, num_ranks: int, num_local_experts: int, hidden_size: int
) -> int:
    """Return the window bytes of fused_deep_moe() of deep_ep with fuse_mode 1."""
    return num_ranks * max_tokens * num_local_experts * hidden_size * 2 * 2


def dispatch_ffn_combine_bytes(num_tokens: int, num_topk: int, hidden_size: int) -> int:
    """Return the window bytes of fused_deep_moe() of deep_ep with fuse_mode 2."""
    return 3 * num_tokens * num_topk * hidden_size + 10 * MIB


def require_window(operator: str, needed: int, names: tuple[str, ...]) -> None:
    """Require a window of the bytes that the operator needs, if limits of sizes apply."""
    there = window_bytes(names)
    rule = f"the window of {there // MIB} MiB holds {-(-needed // MIB)} MiB; set {names[0]}"
    require_size(operator, there >= needed, rule)
