"""What the Ascend deep_ep can do, by chip: limits of sizes and its communication window.

Source: sgl-kernel-npu, deep_ep and the tiling of its operators; nothing here ran on an NPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from epcomm.platforms.ascend.chip import Soc
from epcomm.platforms.ascend.environment import window_mib
from epcomm.spec import BufferSpec
from epcomm.types import align_up

MIB = 2**20
# The kernels move rows in units of 512 bytes, and scales and indices of 32.
_ROW_UNIT, _SCALE_UNIT, _ROW_TAIL = 512, 32, 44
# Beside the rows of normal mode: its states and its counts.
_NORMAL_EXTRA_MIB = 4 + 204
MAX_TOP_K = 16
MAX_EXPERTS = 512
# Rows that the low-latency kernel can number, of all ranks together.
MAX_LOCAL_EXPERTS_TIMES_RANKS = 2048
# Ranks of one host. Across hosts A2 communicates in layers, whose handles only the kernels read,
# and its normal mode takes no quant_mode.
_A2_RANKS = (2, 8)


@dataclass(frozen=True, kw_only=True)
class SizeLimits:
    """The limits of one mode on one chip: hidden sizes, their unit, and ranks, all inclusive.

    max_tokens: of a rank, in low latency; those of normal mode are Rounds.max_tokens.
    """

    hidden: tuple[int, int]
    hidden_multiple: int = 1
    ranks: tuple[int, int]
    max_tokens: int | None = None


_NORMAL = SizeLimits(hidden=(1024, 7168), ranks=(2, 384))
_LOW_LATENCY = SizeLimits(hidden=(1024, 8192), ranks=(2, 768), max_tokens=512)


def normal_limits(soc: Soc | None) -> SizeLimits:
    """Return the limits of normal mode; those of an unknown chip are the widest."""
    return replace(_NORMAL, hidden=(7168, 7168), ranks=_A2_RANKS) if soc is Soc.A2 else _NORMAL


def low_latency_limits(soc: Soc | None) -> SizeLimits:
    """Return the limits of low latency; those of an unknown chip are the widest."""
    if soc is not Soc.A2:
        return _LOW_LATENCY
    return SizeLimits(hidden=(1024, 7168), hidden_multiple=32, ranks=_A2_RANKS, max_tokens=256)


def size_reasons(
    spec: BufferSpec, world_size: int, limits: SizeLimits, soc: Soc | None
) -> list[str]:
    """List the sizes that the kernels were not written for."""
    reasons, where = [], "" if soc is None else f" on {soc}"
    lowest, highest = limits.hidden
    if not lowest <= spec.hidden_size <= highest:
        wanted = lowest if lowest == highest else f"{lowest} to {highest}"
        reasons.append(f"hidden_size is {spec.hidden_size}, expected {wanted}{where}")
    if spec.hidden_size % limits.hidden_multiple:
        reasons.append(
            f"hidden_size is {spec.hidden_size}, expected a multiple of {limits.hidden_multiple}"
            f"{where}"
        )
    fewest, most = limits.ranks
    if not fewest <= world_size <= most:
        reasons.append(f"serves {fewest} to {most} ranks{where}, not {world_size}")
    num_experts = spec.num_local_experts * world_size
    if num_experts > MAX_EXPERTS:
        reasons.append(f"{num_experts} experts, at most {MAX_EXPERTS}")
    return reasons


def normal_window_bytes(spec: BufferSpec, num_tokens: int) -> int:
    """HCCL window that normal mode needs for `num_tokens` tokens of a rank in one round."""
    row = align_up(2 * spec.hidden_size, _ROW_UNIT)
    return 2 * (num_tokens * spec.top_k * (row + _sent_bytes(spec)) + _NORMAL_EXTRA_MIB * MIB)


def low_latency_window_bytes(spec: BufferSpec, world_size: int) -> int:
    """HCCL window that low latency needs for M tokens of a rank."""
    assert spec.max_tokens_per_rank is not None, "low latency has a limit"
    out = world_size * spec.num_local_experts * _sent_bytes(spec)
    combine_bytes = align_up(2 * spec.hidden_size, _ROW_UNIT) * spec.top_k
    return 2 * spec.max_tokens_per_rank * (out + combine_bytes)


def _sent_bytes(spec: BufferSpec) -> int:
    # Two bytes an element, also where INT8 travels: combine brings bfloat16 back.
    return align_up(align_up(2 * spec.hidden_size, _SCALE_UNIT) + _ROW_TAIL, _ROW_UNIT)


def window_reasons(needed: int, variables: Mapping[str, str]) -> list[str]:
    """List why the HCCL window is too small, with the setting that is to be changed."""
    window = window_mib(variables)
    if window.reason is not None:
        return [window.reason]
    if needed <= window.value * MIB:
        return []
    mib = -(-needed // MIB)
    return [
        f"needs a window of {mib} MiB, but {window.name} is {window.value}; set it to {mib} on all "
        "ranks"
    ]
