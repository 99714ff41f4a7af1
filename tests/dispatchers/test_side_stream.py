"""Calls that are begun on GPUs run beside the stream of their caller."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from epcomm import EPGroup, interleave
from epcomm.calls.side_stream import StreamTransfers
from epcomm.testing.data import BatchSpec, random_ids
from epcomm.testing.oracle import relative_error
from tests.dispatchers.test_chunks import inputs_of, layer_of
from tests.dispatchers.test_transfers import BACKENDS, Rank

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
# Cycles that a GPU sleeps: more than half a second.
CYCLES = 1_000_000_000
SPEC = BatchSpec(
    tokens_of_rank=lambda rank, world_size: 64,
    choose_ids=random_ids,
    hidden_size=256,
    num_local_experts=2,
    dtype=torch.bfloat16,
)
ROUNDS = 30


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_arrive_while_the_stream_of_the_caller_computes(backend: str, group: EPGroup) -> None:
    rank = Rank(group, backend)
    transfers = group.calls.transfers
    assert isinstance(transfers, StreamTransfers)
    for _ in range(3):
        rank.check_usable()
    with torch.no_grad():
        begun = rank.dispatcher.dispatch_async(rank.batch.x, rank.batch.topk)
        check_end_while_caller_computes(transfers)
        results = rank.results(begun.wait())
        torch.cuda.synchronize()
        begun_sums = rank.dispatcher.combine_async(results)
        check_end_while_caller_computes(transfers)
        y = begun_sums.wait()
        assert torch.equal(y, rank.layer(rank.batch.x, rank.batch.topk))


def check_end_while_caller_computes(transfers: StreamTransfers) -> None:
    """Check that the device ends the begun call before what its caller has launched since."""
    torch.cuda._sleep(CYCLES)
    computed = torch.cuda.Event()
    computed.record()
    call = transfers.last
    # As the next call does, launch what follows the counts of a dispatch.
    transfers.settle()
    call.end.synchronize()
    assert not computed.query()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_of_begun_calls_is_not_reused_too_early(backend: str, group: EPGroup) -> None:
    layer = layer_of(group, SPEC, backend=backend)
    found = layer.phases.prefill
    x, topk = inputs_of(layer, SPEC)
    with torch.no_grad():
        expected = layer(x, topk)
        for number in range(ROUNDS):
            torch.cuda._sleep(CYCLES // 100)
            begun = found.dispatch_async(x.clone(), replace(topk, topk_ids=topk.topk_ids.clone()))
            poison(number)
            out = begun.wait()
            torch.cuda._sleep(CYCLES // 100)
            results = layer.runner.run(out, layer.weights)
            del out, begun
            begun_sums = found.combine_async(results)
            del results
            poison(number)
            y = begun_sums.wait()
            del begun_sums
            poison(number)
            assert torch.equal(y, expected), number


def poison(number: int) -> None:
    """Allocate what is free, write NaN, and free it again."""
    sizes = [64 * 256 * 2**place for place in range(4)]
    held = [torch.full((size,), torch.nan, device="cuda") for size in sizes for _ in range(3)]
    del held
    if number % 10 == 0:
        gc.collect()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", ["normal", "low_latency"])
def test_a_graph_holds_two_micro_batches(backend: str, mode: str, group: EPGroup) -> None:
    budget = {"max_recv_slots": 64 * SPEC.top_k * group.world_size} if mode == "normal" else {}
    layer = layer_of(group, SPEC, backend=backend, mode=mode, **budget)
    x, topk = inputs_of(layer, SPEC)
    halves = [
        (part, replace(topk, topk_ids=topk.topk_ids[part], topk_weights=topk.topk_weights[part]))
        for part in (slice(0, 32), slice(32, 64))
    ]
    held, decode = x.clone(), mode == "low_latency"

    def run() -> Tensor:
        batches = (layer.steps(held[part], topk, decode=decode) for part, topk in halves)
        return torch.cat(interleave(*batches))

    with torch.no_grad():
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run()
        for factor in (1, 2):
            held.copy_(factor * x)
            expected = run()
            for _ in range(3):
                graph.replay()
            assert torch.equal(y, expected)
            plain = layer(held, topk, decode=decode)
            assert relative_error(expected, plain) <= torch.finfo(x.dtype).eps
        layer.check()
