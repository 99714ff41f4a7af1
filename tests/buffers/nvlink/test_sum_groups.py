"""Low latency over NVLink returns a sum of each group of experts; one process plays all ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from epcomm import Mode
from epcomm.buffers.nvlink import base
from epcomm.buffers.nvlink.low_latency import NVLinkLowLatencyBuffer, NVLinkMaskedBuffer
from epcomm.buffers.nvlink.memory import SymmetricMemory
from epcomm.buffers.sizes import CallShape
from epcomm.calls.call import DispatchCall
from epcomm.errors import RankNames, ShapeError
from epcomm.kernels.nvlink.common.layout import SUM_FORMATS
from epcomm.protocol import BatchFlags
from epcomm.quantization import dequantize, quantize
from epcomm.spec import BufferSpec
from epcomm.types import RowsPer, WireFormat
from tests.buffers.nvlink.test_return_slots import results_of
from tests.cases.specs import BF16, buffer_spec

FP8, MXFP8, NVFP4 = SUM_FORMATS
NAN = float("nan")
HIDDEN, TOP_K, NUM_LOCAL, MAX_TOKENS = 20, 5, 4, 3
# The most tokens that a rank sends in lines: with 2, ranks of one batch differ, by their T.
IN_LINES, MIXED, IN_BULK = 3, 2, 0


def spec_of(sum_groups: int | None, *, at_source: bool = False) -> BufferSpec:
    return buffer_spec(
        HIDDEN, TOP_K, NUM_LOCAL, MAX_TOKENS, sum_groups=sum_groups, sums_at_source=at_source
    )


def open_ranks(
    kind: type[NVLinkLowLatencyBuffer], spec: BufferSpec, world_size: int, device: torch.device
) -> list[NVLinkLowLatencyBuffer]:
    """Open the buffers of all ranks in this process."""
    layout = kind.layout_for(spec, world_size)
    # The signals of a barrier follow the layout. The memory is shared, because the interpreter
    # computes in int32 with addresses below 2**31, such as those of a heap.
    num_bytes = (layout.num_bytes + 1024) // 128 * 128
    blocks = torch.zeros(world_size, num_bytes, dtype=torch.uint8, device=device).share_memory_()
    addresses = tuple(block.data_ptr() for block in blocks)
    buffers = []
    for rank, block in enumerate(blocks):
        own = SimpleNamespace(
            rank=rank,
            world_size=world_size,
            device=device,
            names=RankNames.of_all(rank, world_size),
            streams=Mock(),
            kernel_timeout_s=5.0,
        )
        memory = SymmetricMemory(block=block, addresses=addresses, keeps=blocks)
        calls = SimpleNamespace(collectives=own, gather_records=lambda mine, **_: [mine])
        with (
            patch.object(base, "open_symmetric_memory", Mock(return_value=memory)),
            patch.object(kind, "_warm_up"),
        ):
            buffers.append(cast(Any, kind)(calls, spec))
            buffers[rank].prepare()
    return buffers


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """The tokens of one rank; groups: of each expert."""

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    groups: Tensor

    @classmethod
    def of(
        cls,
        number: int,
        rank: int,
        world_size: int,
        num_groups: int,
        *,
        at_source: bool,
        hidden_size: int = HIDDEN,
    ) -> Batch:
        """Make up to M tokens, some with entries for no expert.

        at_source: the experts of a group are on several ranks.
        """
        groups = torch.arange(NUM_LOCAL * world_size) * num_groups // (NUM_LOCAL * world_size)
        if at_source:
            groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(3))]
        generator = torch.Generator().manual_seed(10 * number + rank)
        num_tokens = (2 * number + rank + 2) % (MAX_TOKENS + 1)
        scores = torch.rand(num_tokens, NUM_LOCAL * world_size, generator=generator)
        ids = scores.topk(TOP_K, dim=1).indices
        ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
        return cls(
            x=torch.randn(num_tokens, hidden_size, generator=generator).to(torch.bfloat16),
            topk_ids=ids,
            topk_weights=torch.rand(ids.shape, generator=generator).masked_fill(ids < 0, NAN),
            groups=groups,
        )

    def call(self, device: torch.device) -> DispatchCall:
        return DispatchCall(
            hidden_states=self.x.to(device),
            topk_ids=self.topk_ids.to(device),
            topk_weights=self.topk_weights.clone().to(device),
            topk_groups=self.groups[self.topk_ids].to(device),
            flags=BatchFlags.NONE,
        )

    def expected_y(self, sums: WireFormat = BF16) -> Tensor:
        """Add the entries of a group in k order, round, quantise; add groups in order, round."""
        y = torch.zeros(self.x.shape)
        for group in range(int(self.groups.max()) + 1):
            total = torch.zeros(self.x.shape)
            for k in range(TOP_K):
                ids = self.topk_ids[:, k : k + 1]
                rows = (self.x.float() * (ids + 1)).to(torch.bfloat16).float()
                is_there = (ids >= 0) & (self.groups[ids] == group)
                total += torch.where(is_there, self.topk_weights[:, k : k + 1] * rows, 0.0)
            sent = quantize(total.to(torch.bfloat16), sums)
            y += dequantize(sent, torch.float32)
        return y.to(torch.bfloat16)


@pytest.mark.parametrize("kind", [NVLinkLowLatencyBuffer, NVLinkMaskedBuffer])
@pytest.mark.parametrize(
    ("world_size", "groups", "line_tokens", "at_source", "sums"),
    [
        (2, 2, MIXED, False, BF16),
        (2, 2, MIXED, True, BF16),
        (2, 1, MIXED, False, FP8),
        (2, 2, MIXED, False, NVFP4),
        # An interpreter takes many seconds for these.
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (2, 1, MIXED, False, BF16),
                (2, 4, IN_LINES, False, BF16),
                (4, 2, IN_BULK, False, BF16),
                (4, 4, IN_LINES, False, BF16),
                (4, 2, IN_BULK, True, BF16),
                (4, 1, IN_BULK, False, FP8),
                (2, 2, MIXED, False, MXFP8),
                (4, 2, IN_LINES, False, MXFP8),
                (4, 2, IN_LINES, False, NVFP4),
            )
        ),
    ],
)
def test_sums_are_those_of_groups(
    kind: type[NVLinkLowLatencyBuffer],
    world_size: int,
    groups: int,
    line_tokens: int,
    at_source: bool,
    sums: WireFormat,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr(NVLinkLowLatencyBuffer, "line_tokens", line_tokens)
    num_groups = world_size * groups
    spec = spec_of(num_groups, at_source=at_source)
    if sums is not BF16:
        # Two pieces of lines, and a short last block.
        spec = replace(spec, hidden_size=3500, combine_format=sums)
    buffers = open_ranks(kind, spec, world_size, device)

    def batches_of(number: int) -> list[Batch]:
        options = {"at_source": at_source, "hidden_size": spec.hidden_size}
        ranks = range(world_size)
        return [Batch.of(number, r, world_size, num_groups, **options) for r in ranks]

    for number in range(3):
        batches = batches_of(number)
        calls = [batch.call(device) for batch in batches]
        dispatching = [b.dispatch_async(call) for b, call in zip(buffers, calls, strict=True)]
        sent = [each.wait() for each in dispatching]
        for call in calls:
            # Combine does not read the tensors of the caller.
            call.topk_weights.fill_(NAN)
            if call.topk_groups is not None:
                call.topk_groups.fill_(0)
        combining = [
            buffer.combine_async(
                results_of(out, rank),
                out.exchange_plan,
                rows_per=RowsPer.SLOT,
                slot_weights=out.slot_weights,
            )
            for rank, (buffer, out) in enumerate(zip(buffers, sent, strict=True))
        ]
        for rank, batch in enumerate(batches):
            y = combining[rank].wait()
            assert torch.equal(y.cpu(), batch.expected_y(sums)), f"batch {number}, rank {rank}"
    for rank, buffer in enumerate(buffers):
        buffer.check()
        sent = [bytes_of(kind, spec, batches_of(number), rank) for number in range(3)]
        assert buffer.traffic().combine_bytes == sum(sent)


def bytes_of(
    kind: type[NVLinkLowLatencyBuffer], spec: BufferSpec, batches: list[Batch], rank: int
) -> int:
    """Return the bytes that plans predict for the combine of a batch."""
    assert spec.sum_groups is not None
    shape = CallShape.of(
        [batch.topk_ids for batch in batches],
        rank,
        num_local_experts=NUM_LOCAL,
        group_size=NUM_LOCAL * len(batches) // spec.sum_groups,
    )
    return kind.wire_bytes(spec, shape).combine_bytes


def test_a_refusal_reaches_ranks_that_sum_slots() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    buffers = open_ranks(NVLinkLowLatencyBuffer, spec_of(4, at_source=True), 2, device)
    batches = [Batch.of(0, rank, 2, 4, at_source=True) for rank in range(2)]
    calls = [batch.call(device) for batch in batches]
    dispatching = [b.dispatch_async(call) for b, call in zip(buffers, calls, strict=True)]
    sent = [each.wait() for each in dispatching]
    results = [results_of(out, rank) for rank, out in enumerate(sent)]
    combining = buffers[0].combine_async(results[0], sent[0].exchange_plan, rows_per=RowsPer.SLOT)
    error = ShapeError("bad rows here")
    buffers[1].combine(results[1][:0], sent[1].exchange_plan, rows_per=RowsPer.ROW, error=error)
    y = combining.wait()
    assert len(y)
    assert y.isnan().all()
    with pytest.raises(ShapeError, match="on rank 1"):
        buffers[0].check()


@pytest.mark.parametrize(
    ("sum_groups", "at_source", "reason"),
    [
        (None, False, None),
        (2, False, None),
        (8, False, None),
        (3, False, "no whole groups"),
        (16, False, "no whole groups"),
        # A rank may have parts of groups.
        (1, True, None),
    ],
)
def test_groups_of_each_rank_have_as_many_experts(
    sum_groups: int | None, at_source: bool, reason: str | None
) -> None:
    spec = spec_of(sum_groups, at_source=at_source)
    found = NVLinkLowLatencyBuffer.lacks(Mode.LOW_LATENCY, spec, 2)
    assert (reason in found[0]) if reason else not found
