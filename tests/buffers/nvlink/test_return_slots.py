"""Low latency over NVLink whose router weights come with combine: each slot is returned."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from epcomm import ConfigError, EPGroup, Mode, ShapeError
from epcomm.buffers.base import Dispatched, ReturnsSlots
from epcomm.buffers.nvlink.low_latency import NVLinkLowLatencyBuffer, NVLinkMaskedBuffer
from epcomm.buffers.nvlink.low_latency_state import NVLinkLowLatencyExchangePlan
from epcomm.buffers.row_layout import wire_tensor_of
from epcomm.buffers.sizes import CallShape
from epcomm.calls.call import DispatchCall
from epcomm.kernels import launch
from epcomm.protocol import BatchFlags
from epcomm.quantization import FP8_FLOAT32_SCALES, FP8_POWER_OF_TWO_SCALES, dequantize, quantize
from epcomm.spec import BufferSpec
from epcomm.testing.poison import poisoned_memory
from epcomm.types import ROW_MAJOR, RowsPer, ScaleLayout, WireFormat
from tests.cases.specs import BF16, buffer_spec

ROWS, MASKED = "NVLinkLowLatencyBuffer", "NVLinkMaskedBuffer"
H, K, L, M = 300, 3, 3, 5
# The most tokens that a rank sends in lines: all, by T, so that ranks of one batch differ, or none.
# What the others hold, the second holds of either half; a GPU takes no time for them.
LINE_TOKENS = (2,) if launch.IS_INTERPRETED else (8, 2, 0)
# T of ranks 0 and 1, batch by batch: each receive buffer has several turns.
TOKENS = ((5, 2), (0, 3), (1, 5), (4, 0), (2, 2))


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """One rank's batch: a call, and the weights of its combine, NaN where there is no expert."""

    call: DispatchCall
    topk_weights: Tensor

    @classmethod
    def of(
        cls,
        group: EPGroup,
        number: int,
        num_tokens: int,
        wire: WireFormat = BF16,
        rank: int | None = None,
    ) -> Batch:
        """Draw a batch of this rank, or of another."""
        seed = 101 * number + (group.rank if rank is None else rank)
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(num_tokens, H, generator=generator).to(torch.bfloat16)
        scores = torch.rand(num_tokens, L * group.world_size, generator=generator)
        ids = scores.topk(K, dim=1).indices
        ids[torch.rand(ids.shape, generator=generator) < 0.3] = -1
        weights = torch.rand(num_tokens, K, generator=generator).masked_fill(ids < 0, float("nan"))
        rows = x.to(group.device)
        call = DispatchCall(
            hidden_states=quantize(rows, wire) if wire.dtype.is_quantized else rows,
            topk_ids=ids.to(group.device),
            # These weights are not read.
            topk_weights=torch.empty(0, device=group.device),
            flags=BatchFlags.NONE,
        )
        return cls(call=call, topk_weights=weights.to(group.device))

    def expected_y(self, wire: WireFormat) -> Tensor:
        """Sum in float32, in order of k, results of experts that multiply by their number + 1."""
        x = dequantize(wire_tensor_of(self.call, wire), torch.float32)
        total = torch.zeros(x.shape, device=x.device)
        for k in range(K):
            ids = self.call.topk_ids[:, k : k + 1]
            rows = (x * (ids + 1)).to(torch.bfloat16).float()
            term = self.topk_weights[:, k : k + 1] * rows
            total += torch.where(ids < 0, 0.0, term)
        return total.to(torch.bfloat16)


def spec_of(wire: WireFormat = BF16, scale_layout: ScaleLayout = ROW_MAJOR) -> BufferSpec:
    return buffer_spec(
        H, K, L, M, dispatch_format=wire, returns_slots=True, scale_layout=scale_layout
    )


def results_of(out: Dispatched, rank: int) -> Tensor:
    """Return the results of experts, which multiply by their number + 1, and NaN elsewhere."""
    rows = dequantize(out.rows, torch.float32)
    if out.index.row_of_slot is None:
        values = rows.flatten(0, 1)
    else:
        values = rows[out.index.row_of_slot.clamp(min=0).long()]
    results = torch.full_like(values, float("nan"))
    first, counts = out.index.first_slot.tolist(), out.index.num_tokens_per_expert.tolist()
    for expert, count in enumerate(counts):
        mine = slice(first[expert], first[expert] + count)
        results[mine] = values[mine] * (rank * len(counts) + expert + 1)
    return results.to(torch.bfloat16)


def check_sources(group: EPGroup, out: Dispatched, number: int, tokens: tuple[int, ...]) -> None:
    """Compare the sources of slots with loops over all ranks' ids."""
    exchange_plan = out.exchange_plan
    assert isinstance(exchange_plan, NVLinkLowLatencyExchangePlan)
    slabs = exchange_plan.slabs
    begins = [0] * L
    for source, num_tokens in enumerate(tokens):
        theirs = Batch.of(group, number, num_tokens, rank=source).call.topk_ids
        for expert in range(L):
            mine = (theirs == group.rank * L + expert).any(dim=1).nonzero().flatten().tolist()
            begin, count = divmod(int(slabs.source_ranges[expert, source]), 2**32)
            assert (begin, count) == (begins[expert], len(mine))
            found = slabs.token_of_slot[expert, begin : begin + count].tolist()
            assert found == mine
            begins[expert] += count


BY_COLUMN = ScaleLayout(column_major=True, alignment=4)
PACKED = replace(BY_COLUMN, packed=True)


def open_slots(group: EPGroup, name: str, spec: BufferSpec) -> ReturnsSlots:
    """Open a buffer that returns slots."""
    buffer = group.open_buffer(name, spec)
    assert isinstance(buffer, ReturnsSlots)
    return buffer


@pytest.mark.ranks(2)
@pytest.mark.slow
@pytest.mark.parametrize("line_tokens", LINE_TOKENS)
@pytest.mark.parametrize(
    ("backend", "wire", "scale_layout"),
    [
        (ROWS, BF16, ROW_MAJOR),
        (MASKED, BF16, ROW_MAJOR),
        (MASKED, FP8_FLOAT32_SCALES, BY_COLUMN),
        (MASKED, FP8_POWER_OF_TWO_SCALES, PACKED),
    ],
)
def test_slots_are_weighed_and_summed_at_home(
    backend: str,
    wire: WireFormat,
    scale_layout: ScaleLayout,
    line_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(NVLinkLowLatencyBuffer, "line_tokens", line_tokens)
    with EPGroup() as group, poisoned_memory():
        buffer = open_slots(group, backend, spec_of(wire, scale_layout))
        addresses = set()
        for number, tokens in enumerate(TOKENS):
            batch = Batch.of(group, number, tokens[group.rank], wire)
            pending = buffer.dispatch_async(batch.call)
            promised = pending.record
            out = pending.wait()
            assert promised is out, "the tensors exist before they are filled"
            assert out.slot_weights is None
            addresses.add((out.rows.data.data_ptr(), out.index.num_tokens_per_expert.data_ptr()))
            results = results_of(out, group.rank)
            if backend == MASKED:
                if out.rows.scales is not None:
                    assert out.rows.scale_layout == scale_layout
                    is_by_column = out.rows.scales.stride(1) == 1
                    assert is_by_column == scale_layout.column_major
                check_sources(group, out, number, tokens)
            y = torch.full((tokens[group.rank], H), float("nan"), dtype=torch.bfloat16)
            y = y.to(group.device)
            combining = buffer.combine_slots_async(
                results, out.exchange_plan, batch.topk_weights, out=y
            )
            assert combining.record is y
            assert combining.wait() is y
            assert torch.equal(y, batch.expected_y(wire)), f"batch {number}"
        buffer.check()
        assert len(addresses) == NVLinkLowLatencyBuffer.num_buffers


@pytest.mark.ranks(2)
@pytest.mark.slow
@pytest.mark.parametrize("line_tokens", LINE_TOKENS)
def test_a_refusal_reaches_all_and_the_next_batch_is_right(
    line_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NVLinkLowLatencyBuffer, "line_tokens", line_tokens)
    with EPGroup() as group:
        buffer = open_slots(group, ROWS, spec_of())
        batch = Batch.of(group, 0, 3)
        for refuses in (True, False):
            out = buffer.dispatch(batch.call)
            if refuses and group.rank == 1:
                error = ShapeError("bad rows here")
                rows = results_of(out, group.rank)[:0]
                buffer.combine(rows, out.exchange_plan, rows_per=RowsPer.ROW, error=error)
            else:
                results = results_of(out, group.rank)
                y = buffer.combine_slots_async(
                    results, out.exchange_plan, batch.topk_weights
                ).wait()
                assert y.isnan().all() if refuses else torch.equal(y, batch.expected_y(BF16))
            if refuses:
                with pytest.raises(ShapeError, match="bad rows" if group.rank else "on rank 1"):
                    buffer.check()
        buffer.check()


@pytest.mark.ranks(2)
@pytest.mark.slow
def test_slots_count_as_bytes_of_combine() -> None:
    with EPGroup() as group:
        buffer, tokens = open_slots(group, ROWS, spec_of()), (4, 3)
        batches = [Batch.of(group, 0, tokens[r], rank=r).call for r in range(2)]
        mine, theirs = (batches[group.rank], batches[1 - group.rank])
        # On devices with slow launches, empty batches precede this one.
        before = buffer.traffic()
        out = buffer.dispatch(mine)
        weights = torch.zeros(tokens[group.rank], K, device=group.device)
        combining = buffer.combine_slots_async(
            results_of(out, group.rank), out.exchange_plan, weights
        )
        combining.wait()
        to_me = (theirs.topk_ids >= 0) & (theirs.topk_ids // L == group.rank)
        from_me = (mine.topk_ids >= 0) & (mine.topk_ids // L != group.rank)
        shape = CallShape(
            rank=group.rank,
            tokens_of_rank=list(tokens),
            rows_sent=int(from_me.any(dim=1).sum()),
            rows_received=int(to_me.any(dim=1).sum()),
            slots_sent=int(from_me.sum()),
            slots_received=int(to_me.sum()),
        )
        assert buffer.traffic() == before + type(buffer).wire_bytes(spec_of(), shape)


@pytest.mark.ranks(2)
def test_other_backends_say_that_they_bring_sums_home() -> None:
    with EPGroup() as group, pytest.raises(ConfigError, match="returns sums"):
        group.open_buffer("StaticCollectiveBuffer", spec_of())


@pytest.mark.parametrize(
    ("wire", "scale_layout", "reason"),
    [
        (FP8_FLOAT32_SCALES, BY_COLUMN, None),
        (FP8_POWER_OF_TWO_SCALES, PACKED, None),
        (BF16, BY_COLUMN, "no scales that could be column-major"),
        (FP8_POWER_OF_TWO_SCALES, BY_COLUMN, "move as words"),
    ],
)
def test_scales_of_slabs_lie_in_words(
    wire: WireFormat, scale_layout: ScaleLayout, reason: str | None
) -> None:
    found = NVLinkMaskedBuffer.lacks(Mode.LOW_LATENCY, spec_of(wire, scale_layout), 2)
    assert (reason in found[0]) if reason else not found
