"""Limits of sizes and the communication window of the Ascend deep_ep, by chip.

Source: sgl-kernel-npu, deep_ep and the tiling of its operators; not run on an NPU.
"""

from dataclasses import dataclass, replace

from epcomm.platforms.ascend.chip import Soc
from epcomm.spec import BufferSpec
from epcomm.types import align_up

# Units of rows, and of scales and indices, in bytes; and bytes after a row.
_ROW_UNIT, _SCALE_UNIT, _ROW_TAIL = 512, 32, 44
# States and counts in the window of normal mode.
_NORMAL_EXTRA_BYTES = (4 + 204) * 2**20
MAX_TOP_K = 16
MAX_EXPERTS = 512
# Limit of the low-latency kernel for L * W.
MAX_LOCAL_EXPERTS_TIMES_RANKS = 2048
# Ranks of one host. Across hosts A2 communicates in layers, whose handles only its kernels read,
# and its normal mode has no quant_mode.
_A2_RANKS = (2, 8)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The sizes that the kernels of one mode take on one chip: inclusive ranges, None for no limit.

    hidden: H.   hidden_multiple: H is a multiple of it.
    gate_up_columns: 2I.   gate_up_multiple: 2I is a multiple of it.
    ranks: W.   top_k: K.   experts: E.   local_experts: L.
    max_tokens: tokens of a rank in one call; for normal mode see Rounds.max_tokens.
    """

    hidden: tuple[int, int] | None = None
    hidden_multiple: int = 1
    gate_up_columns: tuple[int, int] | None = None
    gate_up_multiple: int = 2
    ranks: tuple[int, int] | None = None
    top_k: int | None = None
    experts: int | None = None
    local_experts: int | None = None
    max_tokens: int | None = None

    def reasons(self, spec: BufferSpec, world_size: int, where: str = "") -> list[str]:
        """List the sizes that are not supported; `where` is appended to each message."""
        ranges = [("hidden_size", spec.hidden_size, self.hidden, self.hidden_multiple)]
        if spec.intermediate_size is not None:
            columns, multiple = 2 * spec.intermediate_size, self.gate_up_multiple
            ranges.append(("2 * intermediate_size", columns, self.gate_up_columns, multiple))
        reasons = []
        for name, found, bounds, multiple in ranges:
            if bounds is not None and not bounds[0] <= found <= bounds[1]:
                wanted = bounds[0] if bounds[0] == bounds[1] else f"{bounds[0]} to {bounds[1]}"
                reasons.append(f"{name} is {found}, expected {wanted}{where}")
            if found % multiple:
                reasons.append(f"{name} is {found}, expected a multiple of {multiple}{where}")
        if self.ranks is not None and not self.ranks[0] <= world_size <= self.ranks[1]:
            fewest, most = self.ranks
            reasons.append(f"serves {fewest} to {most} ranks{where}, not {world_size}")
        counts = {
            "top_k": (spec.top_k, self.top_k),
            "num_experts": (spec.num_local_experts * world_size, self.experts),
            "num_local_experts": (spec.num_local_experts, self.local_experts),
        }
        return reasons + [
            f"{name} is {found}, at most {most}"
            for name, (found, most) in counts.items()
            if most is not None and found > most
        ]


_NORMAL = Limits(hidden=(1024, 7168), ranks=(2, 384), experts=MAX_EXPERTS)
_LOW_LATENCY = replace(_NORMAL, hidden=(1024, 8192), ranks=(2, 768), max_tokens=512)


def normal_limits(soc: Soc | None) -> Limits:
    """Return the limits of normal mode; for an unknown chip, the widest."""
    return replace(_NORMAL, hidden=(7168, 7168), ranks=_A2_RANKS) if soc is Soc.A2 else _NORMAL


def low_latency_limits(soc: Soc | None) -> Limits:
    """Return the limits of low latency; for an unknown chip, the widest."""
    if soc is not Soc.A2:
        return _LOW_LATENCY
    return replace(_NORMAL, hidden_multiple=32, ranks=_A2_RANKS, max_tokens=256)


def normal_window_bytes(spec: BufferSpec, num_tokens: int) -> int:
    """Return the bytes of the HCCL window of normal mode for the tokens of a rank in one round."""
    row = align_up(2 * spec.hidden_size, _ROW_UNIT)
    return 2 * (num_tokens * spec.top_k * (row + _sent_bytes(spec)) + _NORMAL_EXTRA_BYTES)


def low_latency_window_bytes(spec: BufferSpec, world_size: int) -> int:
    """Return the bytes of the HCCL window of low latency for M tokens of a rank."""
    assert spec.max_tokens_per_rank is not None, "low latency has a limit"
    out = world_size * spec.num_local_experts * _sent_bytes(spec)
    combine_bytes = align_up(2 * spec.hidden_size, _ROW_UNIT) * spec.top_k
    return 2 * spec.max_tokens_per_rank * (out + combine_bytes)


def _sent_bytes(spec: BufferSpec) -> int:
    # Two bytes an element, also with INT8 rows.
    return align_up(align_up(2 * spec.hidden_size, _SCALE_UNIT) + _ROW_TAIL, _ROW_UNIT)
