"""A layer that computes its batch in chunks, while other chunks are sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from epcomm import EPConfig, EPError, EPGroup, ExpertParallelExperts, TopKOutput
from epcomm.calls.transfers import ThreadTransfers
from epcomm.dispatchers.dispatcher import Dispatcher
from epcomm.experts import PipelinePath
from epcomm.quantization import quantize
from epcomm.runners import grouped_mm
from epcomm.spec import HostLayout
from epcomm.testing.data import BatchSpec, make_batch, make_weights
from epcomm.testing.layer_suite import FP32_TOLERANCE
from epcomm.testing.oracle import relative_error
from epcomm.types import WireDtype, WireFormat
from epcomm.weights.unquantized import LateGradient
from tests.cases.recorder import Recorder
from tests.dispatchers.test_transfers import BACKENDS, BATCH, needs_threads

NUM_RANKS, NUM_CHUNKS = 2, 4
# Rank 0 has no tokens and rank 1 fewer than chunks; with four ranks, rank 3 has more.
SPEC = BATCH
MAX_TOKENS = 64
CONFIG = EPConfig(mode="normal", max_tokens_per_rank=MAX_TOKENS)
# The mistakes of a rank in one chunk.
PARTS = ("experts", "dispatch", "ids", "capacity")


def layer_of(group: EPGroup, spec: BatchSpec = SPEC, **changes: Any) -> ExpertParallelExperts:  # noqa: ANN401
    weights = make_weights(spec, group.world_size)
    config = replace(CONFIG, **changes)
    return ExpertParallelExperts(weights, group, config, top_k=spec.top_k).to(group.device)


def results_of(
    layer: ExpertParallelExperts, spec: BatchSpec, *, checkpoints: bool = False
) -> dict[str, Tensor]:
    """Return y, the gradients of the inputs, and those of the experts."""
    group = layer.group
    batch = make_batch(spec, group.rank, group.world_size).to(group.device)
    x, weights = batch.x.requires_grad_(), batch.topk_weights.requires_grad_()
    topk = TopKOutput(topk_ids=batch.topk_ids, topk_weights=weights)
    layer.zero_grad()
    y = checkpoint(layer, x, topk, use_reentrant=False) if checkpoints else layer(x, topk)
    assert isinstance(y, Tensor)
    (y * batch.dy).sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    found = {"y": y.detach(), "dx": x.grad, "dw": weights.grad}
    grads = {name: each.grad for name, each in layer.named_parameters()}
    return found | {name: each.clone() for name, each in grads.items() if each is not None}


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", ["plain", "checkpointed", "joined"])
def test_chunks_change_only_the_sums_of_expert_gradients(
    backend: str, dtype: torch.dtype, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on GPUs, the gradients of experts are computed for all chunks together.
    monkeypatch.setattr(ThreadTransfers, "are_free", way != "joined")
    joined = Mock(wraps=grouped_mm._joined)
    monkeypatch.setattr(grouped_mm, "_joined", joined)
    spec, checkpoints = replace(SPEC, dtype=dtype), way == "checkpointed"
    with EPGroup() as group:
        expected = results_of(layer_of(group, spec, backend=backend), spec)
        layer = layer_of(group, spec, backend=backend, chunks=NUM_CHUNKS)
        found = results_of(layer, spec, checkpoints=checkpoints)
        # Once for each of both products.
        assert joined.call_count == (0 if group.calls.transfers.are_free else 2)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if name in ("y", "dx", "dw"):
                # On a CPU, float32 products of few rows are computed in another order.
                if dtype is torch.float32:
                    assert relative_error(found[name], value) <= FP32_TOLERANCE, name
                else:
                    assert torch.equal(found[name], value), name
            else:
                # Each chunk rounds its gradient once, and the sum is rounded once.
                rounding = torch.finfo(dtype).eps / 2
                most = max((NUM_CHUNKS + 2) * rounding, FP32_TOLERANCE)
                assert relative_error(found[name], value) <= most, name
        with torch.no_grad():
            y = layer(*inputs_of(layer, spec))
        assert torch.equal(y, found["y"])
        stats = layer.stats()
        assert stats.num_calls == 2
        assert stats.num_tokens == 2 * y.shape[0]


def inputs_of(layer: ExpertParallelExperts, spec: BatchSpec) -> tuple[Tensor, TopKOutput]:
    group = layer.group
    batch = make_batch(spec, group.rank, group.world_size).to(group.device)
    return batch.x, batch.topk


@needs_threads
@pytest.mark.ranks(NUM_RANKS)
def test_chunks_are_sent_while_others_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    with EPGroup() as group:
        layer = layer_of(group, chunks=NUM_CHUNKS)
        run_experts, number = PipelinePath._run_experts, 0

        def run(*args: Any) -> Any:  # noqa: ANN401
            """Compute a chunk after the next is received and the one before is returned."""
            nonlocal number
            number += 1
            recorder.compute_until("dispatch", min(number + 1, NUM_CHUNKS))
            recorder.compute_until("combine", number - 1)
            found = run_experts(*args)
            rows = found.hidden_states
            if rows.requires_grad:
                rows.register_hook(lambda grad: recorder.compute_until("cached_dispatch", 2))
            return found

        monkeypatch.setattr(PipelinePath, "_run_experts", run)
        results_of(layer, SPEC)
        assert number == NUM_CHUNKS
        calls = {"dispatch": NUM_CHUNKS, "combine": 2 * NUM_CHUNKS, "cached_dispatch": NUM_CHUNKS}
        assert recorder.ended == calls
        assert recorder.on_caller == 0


@needs_threads
@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_experts_are_computed_while_those_of_rows_are_returned(
    dtype: torch.dtype, is_transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(SPEC, dtype=dtype, tokens_of_rank=lambda rank, size: 5)
    with EPGroup() as group:
        weights = make_weights(spec, group.world_size)
        if is_transposed:
            matrices = {n: each.mT.contiguous() for n, each in weights.tensors().items()}
            expert_format = replace(weights.format, is_transposed=True)
            weights = replace(weights, format=expert_format, **matrices)
        layer = ExpertParallelExperts(weights, group, CONFIG, top_k=spec.top_k)
        with monkeypatch.context() as patch:
            patch.setattr(Dispatcher, "is_asynchronous", False)
            expected = results_of(layer, spec)
        recorder, add, taken = Recorder(monkeypatch), LateGradient.add, []

        def add_late(late: LateGradient, gradient: Tensor | None) -> Tensor | None:
            """Compute a gradient after the rows of backward have been returned."""
            taken.append(gradient)
            recorder.compute_until("combine", 2)
            return add(late, gradient)

        monkeypatch.setattr(LateGradient, "add", add_late)
        found = results_of(layer, spec)
        # Backward did not compute these gradients with those of the rows.
        assert taken == [None, None]
        assert recorder.on_caller == 0
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.mpi_ranks(NUM_RANKS)
@pytest.mark.parametrize("failing", range(NUM_CHUNKS))
@pytest.mark.parametrize("part", PARTS)
def test_an_error_in_one_chunk_is_raised_on_all_ranks(
    part: str, failing: int, group: EPGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_error(group, "collective", part, failing, monkeypatch)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("backend", ["shared_memory", "hierarchical"])
@pytest.mark.parametrize("part", PARTS)
def test_an_error_in_one_chunk_is_raised_on_all_ranks_of_hosts(
    part: str, backend: str, group: EPGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "hierarchical":
        group.hosts = HostLayout.of([0, 0, 1, 1])
    check_error(group, backend, part, 1, monkeypatch)


def check_error(
    group: EPGroup, backend: str, part: str, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a mistake of rank 1 in chunk `failing` leaves the group usable."""
    with torch.no_grad():
        layer = layer_of(group, backend=backend, chunks=NUM_CHUNKS)
        spec = replace(SPEC, tokens_of_rank=lambda rank, size: 2 * NUM_CHUNKS)
        x, topk = inputs_of(layer, spec)
        y = layer(x, topk)
        error: type[Exception] = EPError
        x_bad, bad = x, topk
        if group.rank == 1 and part == "ids":
            bad = replace(topk, topk_ids=topk.topk_ids.clone())
            bad.topk_ids[2 * failing] = 1000
        elif group.rank == 1 and part == "capacity":
            # The chunks up to this one have a token too many.
            num_tokens = NUM_CHUNKS * MAX_TOKENS + 1 + failing
            x_bad = x[:1].repeat(num_tokens, 1)
            bad = TopKOutput(
                topk_ids=topk.topk_ids[:1].repeat(num_tokens, 1),
                topk_weights=topk.topk_weights[:1].repeat(num_tokens, 1),
            )
        elif group.rank == 1:
            owner: Any = PipelinePath if part == "experts" else layer.phases.prefill
            name = "_run_experts" if part == "experts" else "_prepare"
            call, number = getattr(owner, name), 0

            def fail_once(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
                nonlocal number
                number += 1
                if number == failing + 1:
                    raise OSError("no memory")
                return call(*args, **kwargs)

            monkeypatch.setattr(owner, name, fail_once)
            error = OSError
        with pytest.raises(error, match="no memory" if error is OSError else "rank 1"):
            layer(x_bad, bad)
        monkeypatch.undo()
        assert torch.equal(layer(x, topk), y)


@pytest.mark.ranks(NUM_RANKS)
def test_ranks_that_disagree_on_chunks_are_refused() -> None:
    with EPGroup() as group, pytest.raises(EPError, match="chunks: 2 on rank 0, 3 on rank 1"):
        layer_of(group, chunks=2 + group.rank)


@pytest.mark.ranks(NUM_RANKS)
def test_tensors_that_do_not_fit_are_reported_by_all_ranks(group: EPGroup) -> None:
    layer = layer_of(group, chunks=NUM_CHUNKS)
    assert layer.explain().endswith(f"chunks: {NUM_CHUNKS}")
    x, topk = inputs_of(layer, SPEC)
    y = layer(x, topk)
    with pytest.raises(EPError):
        layer(torch.ones(5, 16) if group.rank == 1 else x, topk)
    pair: Any = (topk.topk_ids, topk.topk_weights)
    with pytest.raises(EPError):
        layer(x, pair if group.rank == 1 else topk)
    assert torch.equal(layer(x, topk), y)


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.parametrize("chunks", [None, NUM_CHUNKS])
def test_a_backward_of_the_inputs_alone_leaves_nothing_to_the_next(chunks: int | None) -> None:
    with EPGroup() as group:
        layer = layer_of(group, chunks=chunks)
        expected = results_of(layer, SPEC)
        x, topk = inputs_of(layer, SPEC)
        x.requires_grad_()
        y = layer(x, topk)
        dy = make_batch(SPEC, group.rank, group.world_size).dy
        torch.autograd.grad(1000 * y.sum(), x, retain_graph=True)
        layer.zero_grad()
        (y * dy).sum().backward()
        for name, parameter in layer.named_parameters():
            assert torch.equal(parameter.grad, expected[name]), name


@pytest.mark.ranks(NUM_RANKS)
def test_rows_that_are_quantised_already_are_divided_too() -> None:
    with EPGroup() as group, torch.no_grad():
        layers = [
            layer_of(group, chunks=chunks, dispatch_dtype="fp8_e4m3")
            for chunks in (None, NUM_CHUNKS)
        ]
        x, topk = inputs_of(layers[0], SPEC)
        rows = quantize(x, WireFormat(dtype=WireDtype.FP8_E4M3))
        y, expected = (layer(rows, topk) for layer in reversed(layers))
        assert y.shape == expected.shape
        assert relative_error(y, expected.double()) <= FP32_TOLERANCE
