"""The table of replicas that kernels read."""

from __future__ import annotations

import torch

from epcomm.placement.replicas import replica_table


def test_table_is_padded_and_chooses_in_turn() -> None:
    replicas = ((0, 2, 6), (1,), (3, 4), (5, 7))
    table = replica_table(replicas, device=torch.device("cpu"), max_replicas=4, first=1)
    assert table.replicas.shape == (4, 4)
    assert table.replicas[2].tolist() == [3, 4, -1, -1]
    assert table.num_replicas.tolist() == [3, 1, 2, 2]
    ids = torch.tensor([[0, 2], [0, -1]])
    assert table.choose(ids).tolist() == [[2, 4], [6, -1]]
    assert table.choose(ids).tolist() == [[6, 3], [0, -1]]
    same = replica_table(replicas, device=torch.device("cpu"), takes_turns=False)
    assert torch.equal(same.choose(ids), same.choose(ids))
