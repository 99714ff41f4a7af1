"""Graphs whose replays take a receive buffer of low latency that an eager batch holds.

On GPUs a graph is one of CUDA. An interpreter has none, so kernels are recorded, and called again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import ClassVar, cast

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from epcomm import EPGroup
from epcomm.buffers.base import Dispatched
from epcomm.buffers.nvlink.low_latency import NVLinkLowLatencyBuffer, NVLinkMaskedBuffer
from epcomm.calls.call import DispatchCall
from epcomm.errors import HandleError
from epcomm.kernels import launch
from epcomm.records import Pending
from epcomm.types import RowsPer
from tests.buffers.nvlink.test_low_latency import (
    HIDDEN,
    NUM_LOCAL,
    TOP_K,
    BulkSingleBuffer,
    MixedSingleBuffer,
    call_of,
    expected_sums,
    factor_of,
    opened,
)

AnyBuffer = NVLinkLowLatencyBuffer | NVLinkMaskedBuffer


class MixedMaskedBuffer(NVLinkMaskedBuffer):
    """A single receive buffer; one rank sends in lines while the other sends in bulk."""

    num_buffers: ClassVar[int] = 1
    line_tokens: ClassVar[int] = 1


class BulkMaskedBuffer(MixedMaskedBuffer):
    """A single receive buffer; no rank sends in lines."""

    line_tokens: ClassVar[int] = 0


def compute(out: Dispatched, factors: Tensor, results: Tensor) -> None:
    """Write the results of experts to their slots [C, H], NaN elsewhere; the host reads nothing."""
    counts, first = out.index.num_tokens_per_expert, out.index.first_slot
    slot = torch.arange(len(results), device=results.device)
    if out.index.row_of_slot is None:
        rows = out.rows.data.reshape(-1, HIDDEN)
    else:
        rows = out.rows.data[out.index.row_of_slot.long().clamp(min=0)]
    expert = torch.searchsorted(first[1:], slot, right=True).clamp(max=NUM_LOCAL - 1)
    is_used = slot < (first[:-1] + counts)[expert]
    results.copy_(torch.where(is_used[:, None], rows * factors[expert, None], float("nan")))


@dataclass(kw_only=True)
class Run:
    """One rank's calls to a buffer; `perform` records the operations of tests in a capture."""

    buffer: AnyBuffer
    results: Tensor
    factors: Tensor
    perform: Callable[[Callable[[], None]], None] = lambda step: step()

    def compute(self, out: Dispatched) -> None:
        self.perform(partial(compute, out, self.factors, self.results))

    def combine_async(self, call: DispatchCall, out: Dispatched) -> Pending[Tensor]:
        if self.buffer._spec.returns_slots:
            return self.buffer.combine_slots_async(
                self.results, out.exchange_plan, call.topk_weights
            )
        return self.buffer.combine_async(
            self.results, out.exchange_plan, rows_per=RowsPer.SLOT, slot_weights=out.slot_weights
        )

    def combine(self, call: DispatchCall, out: Dispatched) -> Tensor:
        return self.combine_async(call, out).wait()

    def whole(self, call: DispatchCall) -> Tensor:
        out = self.buffer.dispatch(call)
        self.compute(out)
        return self.combine(call, out)

    def capture(self, call: DispatchCall) -> tuple[Callable[[], None], Tensor]:
        """Return a function that replays a batch, and its y; nothing is run."""
        if self.results.is_cuda:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = self.whole(call)
            return graph.replay, y
        steps: list[Callable[[], None]] = []
        buffer, kernels = self.buffer, self.buffer._kernels

        def recorded(kernel: Callable[..., None]) -> Callable[..., None]:
            return lambda *args, **kwargs: steps.append(partial(kernel, *args, **kwargs))

        names = {name: recorded(getattr(kernels, name)) for name in kernels.__all__}
        buffer._kernels = cast(ModuleType, SimpleNamespace(**names))
        self.perform = steps.append
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(buffer, "_is_captured", lambda: True)
            y = self.whole(call)
        buffer._kernels, self.perform = kernels, lambda step: step()

        def replay() -> None:
            for step in steps:
                step()

        return replay, y


def expected_of(call: DispatchCall, world_size: int, *, returns_slots: bool) -> Tensor:
    """Return y to the bit: slots that return separately are added in k order, and cast once."""
    if not returns_slots:
        return expected_sums(call, world_size)
    x, ids, weights = call.unquantized.float(), call.topk_ids, call.topk_weights
    y = torch.zeros_like(x)
    for k in range(TOP_K):
        rows = x * (ids[:, k] % 2 + 1).unsqueeze(1)
        y += torch.where(ids[:, k : k + 1] >= 0, rows * weights[:, k : k + 1], 0)
    return y.to(torch.bfloat16)


def check_refused(run: Run, y: Tensor) -> None:
    assert y.numel()
    assert y.isnan().all()
    with pytest.raises(HandleError, match="on ranks 0, 1"):
        run.buffer.check()
    # check() raises the fault only once.
    run.buffer.check()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "returns_slots"),
    [
        (BulkSingleBuffer, False),
        # An interpreter takes half a minute for each.
        pytest.param(MixedSingleBuffer, False, marks=pytest.mark.slow),
        pytest.param(MixedSingleBuffer, True, marks=pytest.mark.slow),
        pytest.param(BulkMaskedBuffer, False, marks=pytest.mark.slow),
        pytest.param(MixedMaskedBuffer, True, marks=pytest.mark.slow),
        *(() if launch.IS_INTERPRETED else ((BulkSingleBuffer, True),)),
    ],
)
def test_a_batch_whose_memory_a_replay_has_taken_is_not_combined(
    kind: type[AnyBuffer], returns_slots: bool
) -> None:
    with EPGroup() as group, opened(kind, group, returns_slots=returns_slots) as buffer:
        rank, world_size, device = group.rank, group.world_size, group.device
        num_slots = NUM_LOCAL * buffer._layout.num_rows
        run = Run(
            buffer=buffer,
            results=torch.empty(num_slots, HIDDEN, dtype=torch.bfloat16, device=device),
            factors=torch.tensor(
                [factor_of(rank * NUM_LOCAL + local) for local in range(NUM_LOCAL)],
                dtype=torch.bfloat16,
                device=device,
            ),
        )
        # One of these batches is sent in lines and the other in bulk.
        call, captured = (call_of(number, rank, world_size, device) for number in (2, 0))
        wanted = expected_of(call, world_size, returns_slots=returns_slots)
        captured_wanted = expected_of(captured, world_size, returns_slots=returns_slots)
        assert torch.equal(run.whole(captured), captured_wanted)

        # A capture runs no kernel, so the eager batch before it is not yet released.
        buffer.dispatch(call)
        replay, y = run.capture(captured)
        assert torch.equal(run.whole(call), wanted)
        for _ in range(2):
            replay()
            assert torch.equal(y, captured_wanted)
        assert torch.equal(run.whole(call), wanted)

        out = buffer.dispatch(call)
        run.compute(out)
        replay()
        assert torch.equal(y, captured_wanted)
        check_refused(run, run.combine(call, out))
        # Now the host treats the batch as one that is combined again.
        check_refused(run, run.combine(call, out))
        replay()
        assert torch.equal(y, captured_wanted)
        assert torch.equal(run.whole(call), wanted)

        # The replay also runs between the halves of a dispatch, and of a combine.
        sent = buffer.dispatch_async(call)
        replay()
        check_refused(run, run.combine(call, sent.wait()))
        out = buffer.dispatch(call)
        run.compute(out)
        sums = run.combine_async(call, out)
        replay()
        check_refused(run, sums.wait())
        assert torch.equal(y, captured_wanted)

        # No rank combines this batch.
        buffer.dispatch(call)
        replay()
        assert torch.equal(run.whole(call), wanted)
        replay()
        assert torch.equal(y, captured_wanted)
        buffer.check()
