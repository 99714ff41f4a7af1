"""Static sizes over NVLink with a budget of rows: no gaps, and an error if rows exceed it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from epcomm import EPGroup
from epcomm.buffers.base import Buffer, RowTopkDispatched
from epcomm.buffers.nvlink.normal import NVLinkBuffer
from epcomm.calls.call import DispatchCall, RowTopkCall
from epcomm.errors import CapacityError
from epcomm.protocol import BatchFlags
from epcomm.types import RowsPer
from tests.cases.specs import buffer_spec

HIDDEN, TOP_K, NUM_LOCAL = 24, 3, 2
# Rows that a rank can receive. One of two ranks may send all of them.
BUDGET = 6


def call_of(ids: list[list[int]], rank: int, device: torch.device) -> DispatchCall:
    """Return a call whose rows hold the numbers of the rank and the token."""
    topk_ids = torch.tensor(ids, dtype=torch.int64, device=device).view(-1, TOP_K)
    tokens = torch.arange(topk_ids.shape[0], device=device)
    x = (10.0 * rank + tokens).unsqueeze(1).repeat(1, HIDDEN).to(torch.bfloat16)
    weights = (1.0 + torch.arange(topk_ids.numel(), device=device)).view(topk_ids.shape)
    # Rows are in separate memory with gradients and without.
    flags = BatchFlags.GRAD_ENABLED if len(ids) % 2 else BatchFlags.NONE
    return RowTopkCall(hidden_states=x, topk_ids=topk_ids, topk_weights=weights, flags=flags)


def check_full(buffer: Buffer, group: EPGroup) -> Tensor:
    """Check a full batch: rank 0 gets two of its rows and four of rank 1; rank 1 gets one."""
    ids_of_rank = [[[0, 2, 1], [-1, 1, -1]], [[0, -1, -1], [1, 0, -1], [-1, -1, 0], [1, -1, -1]]]
    call = call_of(ids_of_rank[group.rank], group.rank, group.device)
    out = buffer.dispatch(replace(call, flags=BatchFlags.NONE))
    assert isinstance(out, RowTopkDispatched)
    ids, weights = out.row_topk
    sources = [0, 1, 10, 11, 12, 13] if group.rank == 0 else [0]
    assert out.rows.data.shape == (BUDGET, HIDDEN)
    assert out.rows.data[: len(sources), 0].tolist() == sources
    local = (
        [[0, -1, 1], [-1, 1, -1], [0, -1, -1], [1, 0, -1], [-1, -1, 0], [1, -1, -1]]
        if group.rank == 0
        else [[-1, 0, -1], *[[-1] * 3] * 5]
    )
    assert ids.tolist() == local
    assert torch.equal(weights == 0, ids < 0)
    rows = out.rows.data * 2
    rows[len(sources) :] = float("nan")
    y = buffer.combine(rows, out.exchange_plan, rows_per=RowsPer.ROW)[0]
    num_ranks = torch.tensor([[2.0], [1.0]] if group.rank == 0 else [[1.0]], device=group.device)
    assert torch.equal(y, call.unquantized * 2 * num_ranks.bfloat16())
    return y


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_rows_have_no_gaps_and_one_more_than_fits_is_heard_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The host of this rank reads nothing.
    monkeypatch.setattr(NVLinkBuffer, "_read_counts", None)
    with EPGroup() as group:
        spec = buffer_spec(HIDDEN, TOP_K, NUM_LOCAL, BUDGET)
        buffer = group.open_buffer("NVLinkRowBudgetBuffer", spec)
        check_full(buffer, group)
        buffer.check()
        num_tokens = 3 if group.rank == 0 else 4
        call = call_of([[0, -1, -1]] * num_tokens, group.rank, group.device)
        out = buffer.dispatch(replace(call, flags=BatchFlags.GRAD_ENABLED))
        y = buffer.combine(out.rows.data, out.exchange_plan, rows_per=RowsPer.ROW)[0]
        assert y.isnan().all()
        with pytest.raises(CapacityError, match=r"rank 0 received up to 7 rows.*_rank = 6 .*to 7"):
            buffer.check()
        check_full(buffer, group)
        buffer.check()
