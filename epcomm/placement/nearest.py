"""Choose the replicas that the tokens of a rank use: all of them in turn, or the nearest ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from epcomm.records import ReplicaTable


def nearest_replicas(
    replicas: Sequence[Sequence[int]], *, rank: int, num_local: int, ranks_of_host: int
) -> tuple[tuple[int, ...], ...]:
    """Return the replicas of each expert on this rank, else those on its host, else all.

    With one expert a rank and two ranks a host, rank 1 uses replica 0 of (0, 3), replica 1 of
    (1, 2), and both of (2, 3).

    Args:
        replicas: physical ids of each logical expert.
        rank: whose tokens choose.
        num_local: L, physical experts of a rank.
        ranks_of_host: ranks of a host, which are neighbours.

    Local; pure.
    """

    def nearest_of(copies: Sequence[int]) -> tuple[int, ...]:
        for ranks in (1, ranks_of_host):
            near = [each for each in copies if each // num_local // ranks == rank // ranks]
            if near:
                return tuple(near)
        return tuple(copies)

    return tuple(nearest_of(copies) for copies in replicas)


def replica_table(
    replicas: Sequence[Sequence[int]],
    *,
    device: torch.device,
    max_replicas: int | None = None,
    first: int = 0,
    takes_turns: bool = True,
) -> ReplicaTable:
    """Return the table of replicas that kernels read.

    Args:
        replicas: physical ids of each logical expert, in the order of the round robin.
        device: where the tokens are.
        max_replicas: columns of the table; None: as many as these replicas need.
        first: offset of the round robin, such as the rank, so that ranks begin with different ones.
        takes_turns: calls begin with different replicas; False where ranks share their tokens.

    Local.   Host sync: yes, where the device is a GPU.
    """
    width = max_replicas or max((len(copies) for copies in replicas), default=1)
    rows = [(*copies, *[-1] * (width - len(copies))) for copies in replicas]
    numbers = [len(copies) for copies in replicas]
    return ReplicaTable(
        replicas=torch.tensor(rows, dtype=torch.int32, device=device),
        num_replicas=torch.tensor(numbers, dtype=torch.int32, device=device),
        calls=torch.zeros((), dtype=torch.int64, device=device) if takes_turns else None,
        first=first,
    )
