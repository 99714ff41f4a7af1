"""Calls that are begun run on the thread of transfers, in call order, and wait() returns them."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Event
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from epcomm import (
    DeepEPNormalDispatcher,
    EPConfig,
    EPError,
    EPGroup,
    ExpertParallelExperts,
    HandleError,
    RowsCombineInput,
    RowsDispatchOutput,
    TopKOutput,
)
from epcomm.buffers.collective.all_to_all import SendPlan
from epcomm.records import at_once
from epcomm.spec import HostLayout
from epcomm.testing.data import BatchSpec, RankBatch, holed_ids, make_batch, make_weights
from tests.cases.operators import Operators
from tests.cases.recorder import LIMIT_S, Recorder
from tests.multi_rank import BACKEND_ENV, SHARED_GPUS

if TYPE_CHECKING:
    from mpi4py import MPI

# Processes of CPUs share memory; GPUs use NVLink, alone where ranks share one.
ON_DEVICES = {"nccl": ("collective", "nvlink"), SHARED_GPUS: ("nvlink",)}
BACKENDS = ON_DEVICES.get(os.environ.get(BACKEND_ENV, ""), ("collective", "shared_memory"))
NUM_HOSTS = 2
# Rank 0 has no tokens.
BATCH = BatchSpec(
    tokens_of_rank=lambda rank, world_size: 3 * rank,
    choose_ids=holed_ids,
    hidden_size=16,
    num_local_experts=2,
)


def needs_threads(test: Callable[..., None]) -> Callable[..., None] | None:
    """Leave a test of begun calls on a thread to CPU ranks; GPUs have test_side_stream.py."""
    return None if os.environ.get(BACKEND_ENV) in ON_DEVICES else test


class Rank:
    """A layer of one rank over `backend`, and its batch."""

    def __init__(
        self, group: EPGroup, backend: str, spec: BatchSpec = BATCH, **changes: int
    ) -> None:
        config = EPConfig(
            backend=backend,
            mode="normal",
            max_tokens_per_rank=64,
            batches_in_flight=8,
            # Over NCCL, ranks learn of a refused combine only so.
            check_calls=os.environ.get(BACKEND_ENV) == "nccl",
        )
        weights = make_weights(spec, group.world_size)
        self.group, config = group, replace(config, **changes)
        layer = ExpertParallelExperts(weights, group, config, top_k=spec.top_k)
        self.layer = layer.to(group.device)
        self.batch = make_batch(spec, group.rank, group.world_size).to(group.device)
        found = self.layer.phases.prefill
        assert isinstance(found, DeepEPNormalDispatcher), "the mode is normal"
        self.dispatcher = found

    def results(self, out: RowsDispatchOutput) -> RowsCombineInput:
        found = self.layer.runner.run(out, self.layer.weights)
        assert isinstance(found, RowsCombineInput), "the buffer returns rows"
        return found

    def begun(self, x: Tensor, topk: TopKOutput) -> Tensor:
        """Compute the layer by begun calls."""
        pending = self.dispatcher.dispatch_async(x, topk, experts_need_grad=True)
        return self.dispatcher.combine_async(self.results(pending.wait())).wait()

    def check_usable(self) -> None:
        with torch.no_grad():
            y = self.begun(self.batch.x, self.batch.topk)
            assert torch.equal(y, self.layer(self.batch.x, self.batch.topk))


@contextmanager
def rank_over(backend: str, ranks: MPI.Comm | None = None) -> Iterator[Rank]:
    with EPGroup(ranks) as group:
        if backend == "hierarchical":
            size = group.world_size
            group.hosts = HostLayout.of([rank * NUM_HOSTS // size for rank in range(size)])
        yield Rank(group, backend)


def gradients(
    rank: Rank, batch: RankBatch, run: Callable[[Tensor, TopKOutput], Tensor]
) -> list[Tensor]:
    """Return y and all gradients of a layer that `run` computes."""
    x, weights = batch.x.clone().requires_grad_(), batch.topk_weights.clone().requires_grad_()
    rank.layer.zero_grad()
    y = run(x, TopKOutput(topk_ids=batch.topk_ids, topk_weights=weights))
    (y * batch.dy).sum().backward()
    found = [x.grad, weights.grad, *(each.grad for each in rank.layer.parameters())]
    return [y.detach(), *(each.clone() for each in found if each is not None)]


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.mpi_ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_begun_calls_return_the_bits_of_calls(
    backend: str, num_ranks: int, ep_ranks: MPI.Comm | None
) -> None:
    with rank_over(backend, ep_ranks) as rank:
        rank.check_usable()
        found = gradients(rank, rank.batch, rank.begun)
        expected = gradients(rank, rank.batch, rank.layer)
        assert len(found) == len(expected) == 5
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


class Beside(torch.autograd.Function):
    """A node whose backward runs a function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[], None]) -> Tensor:  # noqa: ANN401
        ctx.run = run
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]  # noqa: ANN401
        ctx.run()
        return grad, None


@needs_threads
@pytest.mark.ranks(2)
@pytest.mark.mpi_ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_are_sent_while_the_caller_computes(
    backend: str, monkeypatch: pytest.MonkeyPatch, ep_ranks: MPI.Comm | None
) -> None:
    check_rows_are_sent(backend, 1, monkeypatch, ep_ranks)


@needs_threads
@pytest.mark.ranks(4)
@pytest.mark.mpi_ranks(4)
def test_rows_are_sent_between_and_inside_hosts_while_the_caller_computes(
    monkeypatch: pytest.MonkeyPatch, ep_ranks: MPI.Comm | None
) -> None:
    check_rows_are_sent("hierarchical", 2, monkeypatch, ep_ranks)


def check_rows_are_sent(
    backend: str, exchanges: int, monkeypatch: pytest.MonkeyPatch, ranks: MPI.Comm | None
) -> None:
    """Check that all exchanges of each call end on the thread, before the call is waited for."""
    recorder = Recorder(monkeypatch)
    with rank_over(backend, ranks) as rank:
        # Each rank has enough tokens to send some to every other.
        spec = replace(BATCH, tokens_of_rank=lambda rank, world_size: 32)
        batch = make_batch(spec, rank.group.rank, rank.group.world_size)
        x, leaf = batch.x.clone().requires_grad_(), torch.ones(2, requires_grad=True)

        begun = rank.dispatcher.dispatch_async(x, batch.topk)
        beside = Beside.apply(leaf, lambda: recorder.compute_until("combine", 2 * exchanges))
        recorder.compute_until("dispatch", exchanges)
        assert rank.group.traffic()[backend].dispatch_bytes > 0
        out = begun.wait()

        begun_sums = rank.dispatcher.combine_async(rank.results(out))
        beside += Beside.apply(leaf, lambda: recorder.compute_until("cached_dispatch", exchanges))
        recorder.compute_until("combine", exchanges)
        assert rank.group.traffic()[backend].combine_bytes > 0
        y = begun_sums.wait()

        (y.sum() + beside.sum()).backward()
        kinds = {"dispatch": 1, "combine": 2, "cached_dispatch": 1}
        assert recorder.ended == {kind: exchanges * each for kind, each in kinds.items()}
        assert recorder.on_caller == 0
        assert x.grad is not None


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_call_follows_the_calls_begun_before(backend: str) -> None:
    with rank_over(backend) as rank, torch.no_grad():
        x, topk = rank.batch.x, rank.batch.topk
        expected = rank.layer(x, topk)
        begun = rank.dispatcher.dispatch_async(x, topk)
        assert torch.equal(rank.layer(2 * x, topk), rank.layer(2 * x, topk))
        begun.wait()
        begun = rank.dispatcher.dispatch_async(x, topk)
        # An agreement of all ranks, which compares calls too.
        ExpertParallelExperts(
            make_weights(BATCH, 2), rank.group, rank.layer.config, top_k=BATCH.top_k
        )
        y = rank.dispatcher.combine(rank.results(begun.wait()))
        assert torch.equal(y, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_of_a_call_follows_the_calls_begun_before(backend: str) -> None:
    with rank_over(backend) as rank:
        x = rank.batch.x.clone().requires_grad_()
        expected = gradients(rank, rank.batch, rank.layer)[1]
        y = rank.layer(x, rank.batch.topk)
        with torch.no_grad():
            begun = rank.dispatcher.dispatch_async(rank.batch.x, rank.batch.topk)
        (y * rank.batch.dy).sum().backward()
        begun.wait()
        assert torch.equal(x.grad, expected)


@pytest.mark.ranks(2, 4)
@pytest.mark.mpi_ranks(2)
@pytest.mark.parametrize("next_call", ["dispatch", "begun dispatch", "combine", "close"])
@pytest.mark.parametrize("kind", ["dispatch", "combine"])
@pytest.mark.parametrize("droppers", [(0,), (0, 1, 2, 3)], ids=["rank 0", "all ranks"])
def test_a_call_that_is_never_waited_for_is_reported(
    kind: str, next_call: str, droppers: tuple[int, ...], num_ranks: int, ep_ranks: MPI.Comm | None
) -> None:
    backend = "collective" if num_ranks == 2 else "hierarchical"
    with rank_over(backend, ep_ranks) as rank, torch.no_grad():
        group = rank.group
        dispatcher, x, topk = rank.dispatcher, rank.batch.x, rank.batch.topk
        results = [rank.results(dispatcher.dispatch(x, topk)) for _ in range(2)]

        def begin() -> Any:  # noqa: ANN401
            if kind == "dispatch":
                return dispatcher.dispatch_async(x, topk)
            return dispatcher.combine_async(results[0])

        pending = begin()
        if group.rank not in droppers:
            pending.wait()
        del pending
        calls = {
            "dispatch": lambda: dispatcher.dispatch(x, topk),
            "begun dispatch": lambda: dispatcher.dispatch_async(x, topk).wait(),
            "combine": lambda: dispatcher.combine(results[1]),
            "close": group.close,
        }
        if next_call == "close" and group.rank not in droppers:
            return
        told = (
            f"{kind} of dispatcher 1 .normal.: the call was begun and never waited for .rank"
            if group.rank in droppers
            else f"{next_call.split()[-1]}: a call that was begun and never waited for on rank 0"
        )
        with pytest.raises(HandleError, match=told):
            calls[next_call]()
        if next_call != "close":
            rank.check_usable()
            dispatcher.combine(results[1])


@pytest.mark.ranks(2)
def test_a_call_that_nobody_waits_for_in_time_is_reported_by_close() -> None:
    group = EPGroup()
    rank = Rank(group, "collective")
    begun = rank.dispatcher.dispatch_async(rank.batch.x, rank.batch.topk)
    with pytest.raises(HandleError, match=r"dispatch of dispatcher 1 .* never waited for"):
        group.close()
    group.close()
    with pytest.raises(HandleError, match="closed"):
        rank.dispatcher.dispatch_async(rank.batch.x, rank.batch.topk)
    del begun


@needs_threads
@pytest.mark.ranks(2)
def test_close_does_not_wait_for_calls_that_it_cancels() -> None:
    group, may_go_on = EPGroup(), Event()
    transfers = group.calls.transfers
    if transfers is None:
        Rank(group, "collective")
        transfers = group.calls.transfers
    running = transfers.begin(lambda: at_once(lambda: may_go_on.wait(LIMIT_S)), "a call")
    waiting = transfers.begin(lambda: at_once(lambda: None), "another call")
    transfers.close()
    with pytest.raises(HandleError, match=r"another call: the EPGroup is closed \(rank"):
        waiting.wait()
    may_go_on.set()
    assert running.wait()
    group.close()


@pytest.mark.ranks(2)
def test_an_error_of_other_code_in_backward_leaves_the_group_usable(group: EPGroup) -> None:
    rank = Rank(group, BACKENDS[0])
    leaf = torch.ones(2, requires_grad=True, device=group.device)

    def fail() -> None:
        raise ValueError("not finite")

    out = rank.dispatcher.dispatch(rank.batch.x.requires_grad_(), rank.batch.topk)
    begun = rank.dispatcher.combine_async(rank.results(out))
    beside = Beside.apply(leaf, fail)
    y = begun.wait()
    with pytest.raises(ValueError, match="not finite"):
        (y.sum() + beside.sum()).backward()
    # Collect the call that backward has begun and not waited for.
    del out, begun, beside, y
    gc.collect()
    rank.check_usable()


@pytest.mark.mpi_ranks(2)
def test_without_threads_of_mpi_wait_makes_the_call(
    monkeypatch: pytest.MonkeyPatch, ep_ranks: MPI.Comm
) -> None:
    from mpi4py import MPI

    if ep_ranks.Get_rank() == 1:
        monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    recorder = Recorder(monkeypatch)
    with rank_over("collective", ep_ranks) as rank:
        assert not rank.dispatcher.is_asynchronous
        reason = "because MPI was initialised without MPI_THREAD_MULTIPLE on rank 1; set mpi4py.rc"
        assert f"begun calls: made in wait(), {reason}" in rank.layer.explain()
        rank.check_usable()
        assert recorder.on_caller == recorder.ended.total() == 4


@pytest.mark.ranks(2)
@pytest.mark.mpi_ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_failure_on_the_thread_is_raised_by_wait_on_all_ranks(
    backend: str, monkeypatch: pytest.MonkeyPatch, ep_ranks: MPI.Comm | None
) -> None:
    with rank_over(backend, ep_ranks) as rank:
        headers, failures = SendPlan.headers, [OSError("no memory")]

        def fail_once(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if failures:
                raise failures.pop()
            return headers(*args, **kwargs)

        if rank.group.rank == 1:
            monkeypatch.setattr(SendPlan, "headers", fail_once)
        begun = rank.dispatcher.dispatch_async(rank.batch.x, rank.batch.topk)
        error, told = (EPError, "rank 1") if rank.group.rank == 0 else (OSError, "no memory")
        with pytest.raises(error, match=told):
            begun.wait()
        rank.check_usable()


@pytest.mark.ranks(2)
def test_calls_are_not_begun_where_a_mode_must_see_them() -> None:
    with rank_over("collective") as rank, Operators():
        assert not rank.dispatcher.is_asynchronous
        begun = rank.dispatcher.dispatch_async(rank.batch.x, rank.batch.topk)
        rank.dispatcher.combine_async(rank.results(begun.wait())).wait()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_begun_calls_share_memory_with_calls_in_inference_mode(backend: str) -> None:
    with rank_over(backend) as rank:
        for is_inference in (True, False, True):
            with torch.inference_mode(is_inference):
                rank.check_usable()
