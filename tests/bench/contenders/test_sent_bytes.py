import pytest
import torch

from epcomm import EPConfig, EPGroup, Mode, MoESpec
from epcomm.bench.contenders.backends import Epcomm
from epcomm.bench.run import ALTERNATIVES
from epcomm.buffers.sizes import CallShape
from epcomm.buffers.traffic import BufferTraffic
from epcomm.testing.data import RankBatch

# Worked by hand: 2 ranks with 2 experts each, 3 tokens a rank, rows of 4 float32, 16 B.
# Rank 0: token 0 to experts 2, 3; token 1 to 0, 1; token 2 to 1, 3.
# Rank 1: token 0 to experts 0, 1; token 1 to 2, 3; token 2 to 0, 1.
IDS = (torch.tensor([[2, 3], [0, 1], [1, 3]]), torch.tensor([[0, 1], [2, 3], [0, 1]]))
ROW_BYTES = 16


def batch_of(rank: int) -> RankBatch:
    return RankBatch(
        x=torch.ones(3, 4), topk_ids=IDS[rank], topk_weights=torch.ones(3, 2), dy=torch.ones(3, 4)
    )


@pytest.mark.ranks(2)
def test_every_contender_counts_what_was_counted_by_hand() -> None:
    with EPGroup() as group, torch.no_grad():
        rank = group.rank
        sent = {name: make(4).sent_bytes(batch_of(rank)) for name, make in ALTERNATIVES.items()}
        spec = MoESpec(hidden_size=4, num_experts=4, top_k=2, dtype=torch.float32)
        epcomm = Epcomm(group, spec, EPConfig(mode=Mode.NORMAL, max_tokens_per_rank=3))
        counted = epcomm.sent_bytes(batch_of(rank))
        # Pairs to the other rank: 3 of rank 0, 4 of rank 1. Rows to it: 2 of each.
        call = CallShape(rank=rank, tokens_of_rank=(3, 3), rows_sent=2, rows_received=2)
        planned = epcomm.plan.wire_bytes(call)
    pairs = (3, 4)
    assert sent["expert_rows"] == BufferTraffic(
        dispatch_bytes=pairs[rank] * ROW_BYTES,
        combine_bytes=pairs[1 - rank] * ROW_BYTES,
        control_bytes=2 * 8,
    )
    assert sent["all_gather"] == BufferTraffic(dispatch_bytes=3 * (16 + 24), combine_bytes=3 * 16)
    # A row of 16 B is sent with its 2 ids and 2 weights, 16 B more, and is returned without them.
    assert (counted.dispatch_bytes, counted.combine_bytes) == (2 * 32, 2 * 16)
    assert counted == planned
