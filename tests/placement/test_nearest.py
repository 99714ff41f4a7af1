"""Replicas that are near, and their table."""

from __future__ import annotations

import torch

from epcomm.placement.nearest import nearest_replicas, replica_table

# Two physical experts a rank, two ranks a host, four ranks: physical 0 1 | 2 3 || 4 5 | 6 7.
REPLICAS = ((0, 2, 6), (1,), (3, 4), (5, 7))


def test_own_rank_comes_before_own_host_and_that_before_all() -> None:
    by_rank = [
        nearest_replicas(REPLICAS, rank=rank, num_local=2, ranks_of_host=2) for rank in range(4)
    ]
    assert by_rank == [
        ((0,), (1,), (3,), (5, 7)),
        ((2,), (1,), (3,), (5, 7)),
        ((6,), (1,), (4,), (5,)),
        ((6,), (1,), (4,), (7,)),
    ]


def test_docstring_example_holds() -> None:
    replicas = ((0, 3), (1, 2), (2, 3))
    found = nearest_replicas(replicas, rank=1, num_local=1, ranks_of_host=2)
    assert found == ((0,), (1,), (2, 3))


def test_table_is_padded_and_chooses_in_turn() -> None:
    table = replica_table(REPLICAS, device=torch.device("cpu"), max_replicas=4, first=1)
    assert table.replicas.shape == (4, 4)
    assert table.replicas[2].tolist() == [3, 4, -1, -1]
    assert table.num_replicas.tolist() == [3, 1, 2, 2]
    ids = torch.tensor([[0, 2], [0, -1]])
    assert table.choose(ids).tolist() == [[2, 4], [6, -1]]
    assert table.choose(ids).tolist() == [[6, 3], [0, -1]]
    same = replica_table(REPLICAS, device=torch.device("cpu"), takes_turns=False)
    assert torch.equal(same.choose(ids), same.choose(ids))
