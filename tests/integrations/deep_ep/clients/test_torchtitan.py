"""Unmodified torchtitan runs on the drop-in: its operators, its dispatcher, both layouts."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.integrations.deep_ep.clients.batches import HIDDEN, NUM_EXPERTS, TOP_K, Batch, needs
from tests.integrations.deep_ep.devices import here, on_gpus

NUM_RANKS = 2
NUM_LOCAL = NUM_EXPERTS // NUM_RANKS
# torchtitan pads batches, so that all ranks have as many tokens.
NUM_TOKENS = 5

# Importing torchtitan takes seconds.
pytestmark = [pytest.mark.slow, needs("torchtitan")]


@pytest.fixture
def cpu_operators() -> Iterator[None]:
    """Register the operators of torchtitan, which are for CUDA only, for CPUs."""
    if on_gpus():
        yield
        return
    from torchtitan.distributed.deepep import deepep

    library = torch.library.Library("deepep", "IMPL")
    for name in ("dispatch", "combine"):
        library.impl(name, getattr(deepep, f"_{name}_op_impl"), "CPU")
    yield
    library._destroy()


def dispatcher_of(*, cudagraphable: bool) -> Any:  # noqa: ANN401 - its own class
    from torchtitan.models.common.token_dispatcher import DeepEPTokenDispatcher

    config = DeepEPTokenDispatcher.Config(
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        num_max_tokens_per_rank=8,
        hidden_dim=HIDDEN,
        cudagraphable=cudagraphable,
    )
    dispatcher = DeepEPTokenDispatcher(config)
    dispatcher.wire_meshes(ep_mesh=init_device_mesh(here().type, (NUM_RANKS,)))
    return dispatcher


def run(dispatcher: Any, batch: Batch) -> Tensor:  # noqa: ANN401 - its own class
    """Dispatch, multiply the rows of expert e by 1 + e, combine."""
    counts = torch.zeros(NUM_EXPERTS, device=here())
    rows, counts, metadata = dispatcher.dispatch(batch.x, batch.weights, batch.ids, counts)
    first = NUM_LOCAL * dist.get_rank()
    factors = 1.0 + first + torch.arange(NUM_LOCAL, device=here())
    factors = factors.repeat_interleave(counts.to(here()))
    # With static sizes rows after the last one are undefined.
    results = torch.zeros_like(rows)
    results[: len(factors)] = rows[: len(factors)] * factors.unsqueeze(1).bfloat16()
    return dispatcher.combine(results, metadata, batch.x)


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.usefixtures("cpu_operators")
def test_compact_layout_forward_and_backward() -> None:
    dispatcher, batch = dispatcher_of(cudagraphable=True), Batch.of_rank(NUM_TOKENS)
    for _ in range(2):
        batch.x.grad = batch.weights.grad = None
        batch.check_backward(run(dispatcher, batch))


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.usefixtures("cpu_operators")
def test_expanded_layout_of_static_sizes() -> None:
    dispatcher, batch = dispatcher_of(cudagraphable=True), Batch.of_rank(NUM_TOKENS)
    with torch.no_grad():
        y = run(dispatcher, batch)
    batch.check(y)
