"""Features of GPUs only: graphs of low latency, replayed with other tokens and routing.

    MULTI_RANK_BACKEND=nccl scripts/launch_multi_rank.sh 2 tests/integrations/deep_ep/test_real.py

runs them on two GPUs of this machine; without MULTI_RANK_BACKEND there are no such tests.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import pytest
import torch
from torch import Tensor

from epcomm.bench.timing import captured
from epcomm.integrations.deep_ep import Buffer
from tests.integrations.deep_ep.devices import here
from tests.integrations.deep_ep.v1_ranks import world

HIDDEN, TOP_K, NUM_LOCAL = 2048, 4, 4
# Elements that share a scale.
BLOCK = 128


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Tokens x [T, H] that FP8 holds exactly, ids and weights [T, K], at addresses that stay."""

    x: Tensor
    ids: Tensor
    weights: Tensor

    @classmethod
    def of(cls, num_tokens: int) -> Self:
        """Allocate tokens that go to no expert."""
        shape = (num_tokens, TOP_K)
        return cls(
            x=torch.zeros(num_tokens, HIDDEN, dtype=torch.bfloat16, device=here()),
            ids=torch.full(shape, -1, device=here()),
            weights=torch.zeros(shape, device=here()),
        )

    def draw(self, seed: int) -> None:
        """Draw other tokens, which differ between ranks."""
        seeded = torch.Generator().manual_seed(100 * seed + world().rank())
        num_tokens = len(self.x)
        powers = torch.tensor([-4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0])
        x = powers[torch.randint(0, len(powers), self.x.shape, generator=seeded)]
        # This gives each block one scale, with which codes of powers of two are exact.
        x[:, ::BLOCK] = 4
        self.x.copy_(x)
        num_experts = NUM_LOCAL * world().size()
        ids = torch.rand(num_tokens, num_experts, generator=seeded).topk(TOP_K).indices
        self.ids.copy_(ids.masked_fill(torch.rand(ids.shape, generator=seeded) < 0.2, -1))
        self.weights.copy_(2.0 ** torch.randint(-2, 1, ids.shape, generator=seeded))

    def check(self, y: Tensor) -> None:
        """Compare y with sums over this rank's tokens; expert e multiplies them by 1 + e."""
        factors = (self.weights * (1 + self.ids)).masked_fill(self.ids < 0, 0)
        expected = self.x.float() * factors.sum(1, keepdim=True)
        assert torch.equal(y, expected.bfloat16())


def experts(slabs: Tensor | tuple[Tensor, Tensor], counts: Tensor) -> Tensor:
    """Return slabs times 1 + expert, and NaN where no row was received."""
    if isinstance(slabs, tuple):
        codes, scales = slabs
        rows = codes.float() * scales.repeat_interleave(BLOCK, dim=2)
    else:
        rows = slabs.float()
    first = 1.0 + NUM_LOCAL * world().rank()
    factors = first + torch.arange(NUM_LOCAL, device=here())
    is_row = torch.arange(rows.shape[1], device=here()) < counts.unsqueeze(1)
    results = (rows * factors.view(-1, 1, 1)).bfloat16()
    return results.masked_fill(~is_row.unsqueeze(2), float("nan"))


def run_in_flight(buffer: Buffer, batches: list[Batch], *, use_fp8: bool) -> list[Tensor]:
    """Send both batches before the first is received, as engines overlap them; return each y."""
    num_tokens, num_experts = len(batches[0].x), NUM_LOCAL * world().size()
    sent = [
        buffer.low_latency_dispatch(
            each.x, each.ids, num_tokens, num_experts, use_fp8=use_fp8, return_recv_hook=True
        )
        for each in batches
    ]
    returned = []
    for each, (slabs, counts, handle, _, hook) in zip(batches, sent, strict=True):
        hook()
        returned.append(
            buffer.low_latency_combine(
                experts(slabs, counts), each.ids, each.weights, handle, return_recv_hook=True
            )
        )
    for _, _, hook in returned:
        hook()
    return [y for y, _, _ in returned]


def run_beside(buffer: Buffer, batches: list[Batch], *, use_fp8: bool) -> list[Tensor]:
    """Make calls on the communication stream, and a product on this one during each."""
    num_tokens, num_experts = len(batches[0].x), NUM_LOCAL * world().size()
    found = []
    for each in batches:
        slabs, counts, handle, event, _ = buffer.low_latency_dispatch(
            each.x, each.ids, num_tokens, num_experts, use_fp8=use_fp8, async_finish=True
        )
        torch.mm(each.x, each.x.T)
        event.current_stream_wait()
        y, event, _ = buffer.low_latency_combine(
            experts(slabs, counts), each.ids, each.weights, handle, async_finish=True
        )
        torch.mm(each.x, each.x.T)
        event.current_stream_wait()
        found.append(y)
    stream = buffer.get_comm_stream()
    assert isinstance(stream, torch.cuda.Stream)
    assert stream.priority < 0, "its kernels would wait for those of a product"
    return found


# Few tokens are sent in lines, others in bulk.
in_all_forms = pytest.mark.parametrize(
    ("num_tokens", "use_fp8"), [(4, True), (4, False), (64, True)]
)


@pytest.mark.ranks(2, 4)
@in_all_forms
def test_a_graph_of_two_batches_in_flight_serves_any_tokens(num_tokens: int, use_fp8: bool) -> None:
    check_graph_of(run_in_flight, num_tokens, use_fp8=use_fp8)


@pytest.mark.ranks(2)
@in_all_forms
def test_a_graph_of_calls_beside_products_serves_any_tokens(num_tokens: int, use_fp8: bool) -> None:
    check_graph_of(run_beside, num_tokens, use_fp8=use_fp8)


def check_graph_of(run: Callable[..., list[Tensor]], num_tokens: int, *, use_fp8: bool) -> None:
    """Capture two batches, and replay them five times with others in their place."""
    buffer = Buffer(world(), low_latency_mode=True, explicitly_destroy=True)
    batches = [Batch.of(num_tokens) for _ in range(2)]
    kept: list[list[Tensor]] = []
    graph = captured(lambda: kept.append(run(buffer, batches, use_fp8=use_fp8)))
    for seed in range(5):
        for number, each in enumerate(batches):
            each.draw(2 * seed + number)
        for y in kept[-1]:
            y.fill_(float("nan"))
        graph.replay()
        for each, y in zip(batches, kept[-1], strict=True):
            each.check(y)
    buffer.destroy()
