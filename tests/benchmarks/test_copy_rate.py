import pytest
import torch

from benchmarks.measuring import copy_rate
from benchmarks.measuring.copy_rate import Copies, CopyFinding, MovedBytes, moved_bytes
from epcomm.testing.data import RankBatch


def batch_of(ids: list[list[int]], hidden_size: int) -> RankBatch:
    x = torch.zeros(len(ids), hidden_size, dtype=torch.bfloat16)
    topk_ids = torch.tensor(ids, dtype=torch.int64)
    return RankBatch(x=x, topk_ids=topk_ids, topk_weights=torch.ones(topk_ids.shape), dy=x)


def test_the_example_in_the_module() -> None:
    # 4 experts a rank: ranks 0, 1 and 3.
    batch = batch_of([[0, 1, 2, 3, 4, 5, 12, 13]], 2048)
    assert moved_bytes([batch], 4) == MovedBytes(
        copied=3 * (4096 + 64) + 3 * 4096,
        touched=4096 + 3 * 4160 + 8 * 4096 + 2 * 3 * 4096 + 4096,
    )


def test_bytes_of_all_ranks_are_added_those_of_a_rank_to_itself_too() -> None:
    # H = 8: 16 B a token, 16 B for two pairs. Rows: 2 and 1 of the first rank, 2 of the second.
    batches = [batch_of([[0, 2], [1, 0]], 8), batch_of([[3, 0]], 8)]
    assert moved_bytes(batches, 2) == MovedBytes(
        copied=5 * (32 + 16), touched=5 * 32 + (2 * 3 + 6 + 2 * 5) * 16
    )


def test_both_shares_compare_like_with_like() -> None:
    # 2 ms for 6 MB are 3 GB/s; copies read and write 20.
    found = CopyFinding(
        moved=MovedBytes(copied=6_000_000, touched=20_000_000), ms=2.0, copy_gb_per_s=10.0
    )
    assert found.copied_over_copy_rate == pytest.approx(0.3)
    assert found.touched_over_copy_rate == pytest.approx(0.5)


def test_a_round_of_copies_takes_as_long_as_its_slowest_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copy_rate, "BUFFER_BYTES", 4_000_000)
    copies = Copies(torch.empty(0, 1000, dtype=torch.bfloat16))
    assert copies.num_bytes == 4_000_000
    # Rounds of 4, 2 and 5 ms, in which two ranks copy 8 MB.
    assert copies.gb_per_s([[1.0, 2.0, 5.0], [4.0, 1.0, 1.0]]) == pytest.approx(2.0)
