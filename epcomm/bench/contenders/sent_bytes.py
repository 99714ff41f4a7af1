"""Count the bytes that one rank sends to other ranks in one call, from sizes alone.

Worked example, ExpertRows on rank 0 of 2, 3 rows to itself and 5 to rank 1, 4 rows from rank 1, one
expert a rank, rows of 8 B:

    out 5 * 8 = 40 B, home 4 * 8 = 32 B, counts 1 * 8 = 8 B
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Counts and ids are int64, router weights float32.
INT_BYTES, WEIGHT_BYTES = 8, 4


@dataclass(frozen=True, kw_only=True)
class SentBytes:
    """The bytes that a rank sends: in dispatch, in combine, and as control (counts, headers)."""

    dispatch: int
    combine: int
    control: int

    @property
    def total(self) -> int:
        """All kinds."""
        return self.dispatch + self.combine + self.control


def expert_rows_bytes(
    rank: int,
    *,
    send_splits: Sequence[int],
    recv_splits: Sequence[int],
    num_local: int,
    row_bytes: int,
) -> SentBytes:
    """Return the bytes of ExpertRows: bare rows both ways, and a count for each expert.

    Args:
        rank: the rank that sends.
        send_splits, recv_splits: [W], number of rows to and from each rank.
        num_local: L, the experts of a rank.
        row_bytes: bytes of H elements.
    """
    num_others = len(send_splits) - 1
    return SentBytes(
        dispatch=(sum(send_splits) - send_splits[rank]) * row_bytes,
        combine=(sum(recv_splits) - recv_splits[rank]) * row_bytes,
        control=num_others * num_local * INT_BYTES,
    )


def all_gather_bytes(world_size: int, *, max_tokens: int, top_k: int, row_bytes: int) -> SentBytes:
    """Return the bytes of AllGather, where a ring or direct exchange sends W - 1 blocks a rank.

    Args:
        world_size: W.
        max_tokens: the largest T, to which all ranks pad.
        top_k: K, the ids and weights of each token.
        row_bytes: bytes of H elements.
    """
    num_blocks = world_size - 1
    routing_bytes = top_k * (INT_BYTES + WEIGHT_BYTES)
    return SentBytes(
        dispatch=num_blocks * max_tokens * (row_bytes + routing_bytes),
        combine=num_blocks * max_tokens * row_bytes,
        control=num_blocks * INT_BYTES,
    )
