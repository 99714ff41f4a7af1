import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from epcomm import (
    DeepEPNormalDispatcher,
    EPConfig,
    EPGroup,
    Mode,
    MoESpec,
    TopKOutput,
    WireDtype,
    WireFormat,
)
from epcomm.buffers.base import Buffer
from epcomm.spec import HostLayout
from epcomm.testing import buffer_suite
from epcomm.testing.data import BatchSpec, RankBatch, random_ids
from epcomm.types import RowsPer
from tests.cases.playing import identity
from tests.cases.recorder import LIMIT_S
from tests.dispatchers.test_transfers import Beside
from tests.hosts.network import sent_bytes
from tests.hosts.test_suites import hosts_of

pytestmark = pytest.mark.slow

HIDDEN_SIZE, TOP_K = 1024, 8
# Most bytes of a row besides its elements, per top-k entry: its id and its weight.
ENTRY_BYTES = 16
# The call of rows; the calls whose bytes are distinguished.
LEAST_BYTES, NUM_CALLS = 20e6, 2
# The headers of TCP and Ethernet, 66 bytes of 9,000, and those of the exchanges.
TOLERANCE = 0.01
# Tokens of a rank, by the number of ranks, so that each host sends LEAST_BYTES.
NUM_TOKENS = {4: 1536, 8: 640}
# Bits of an element of a sum with its share of scales: a float32 for 128 elements, or a byte for 16
# and a float32 for the row.
SUM_BITS = {None: 32.0, WireDtype.FP8_E4M3: 8 + 32 / 128, WireDtype.NVFP4: 4 + 8 / 16 + 32 / 1024}


def bytes_of(buffer: Buffer, batch: RankBatch, num_calls: int) -> int:
    """Return the bytes that the kernel counts on this host during some calls. Collective: yes."""
    before = _sent_of_host()
    for _ in range(num_calls):
        out = buffer.dispatch(buffer_suite.make_call(batch))
        buffer.combine(out.rows.data, out.exchange_plan, rows_per=RowsPer.ROW)
    return _sent_of_host() - before


@pytest.mark.host_ranks(4, 8)
@pytest.mark.parametrize("buffer_name", ["CollectiveBuffer", "HierarchicalBuffer"])
@pytest.mark.parametrize("combine_dtype", SUM_BITS)
def test_kernel_counts_the_bytes_of_traffic_between_hosts(
    buffer_name: str, combine_dtype: WireDtype | None, group: EPGroup
) -> None:
    rank, world_size = group.rank, group.world_size
    hosts = hosts_of(group)
    spec = BatchSpec(
        hidden_size=HIDDEN_SIZE,
        num_local_experts=64 // world_size,
        top_k=TOP_K,
        tokens_of_rank=lambda rank, world_size: NUM_TOKENS[world_size],
        choose_ids=random_ids,
    )
    env = buffer_suite.BufferEnv(
        group=group,
        backend=buffer_name,
        mode=Mode.NORMAL,
        hosts=hosts,
        combine=None if combine_dtype is None else WireFormat(dtype=combine_dtype),
    )
    batches, buffer = env.batches(spec), env.open(spec)
    bytes_of(buffer, batches[rank], 1)
    sent = buffer.traffic()
    of_call = sent.bytes_between
    # As many rows return as are sent, in float32 with ids and weights; inside a host none is
    # quantised.
    share, links = SUM_BITS[combine_dtype] / 32, getattr(buffer, "_outer", buffer).traffic()
    assert links.combine_bytes / links.dispatch_bytes == pytest.approx(share, rel=0.05)
    once, twice = (bytes_of(buffer, batches[rank], n * NUM_CALLS) for n in (1, 2))
    counted = torch.tensor([(twice - once) / NUM_CALLS], dtype=torch.float64)
    of_host = _sum_over_host(torch.tensor([of_call]), hosts, rank)
    assert of_host >= LEAST_BYTES * (1 + share) / 2
    assert counted.item() == pytest.approx(of_host, rel=TOLERANCE)
    print(f"rank {rank}: counted {counted.item():.0f}, traffic() {of_host:.0f}")

    if buffer_name == "HierarchicalBuffer":
        most = pairs_between(batches[rank].topk_ids, spec.num_local_experts, hosts, rank)
        row_bytes = HIDDEN_SIZE * 4 + TOP_K * ENTRY_BYTES
        # Combine returns one row for each received row.
        of_all = torch.tensor([most, of_call])
        dist.all_reduce(of_all)
        assert of_all[1] <= 2 * of_all[0] * row_bytes


@pytest.mark.host_ranks(4)
@pytest.mark.parametrize(("backend", "rows_of_token"), [("collective", 2), ("hierarchical", 1)])
def test_kernel_counts_the_rows_of_a_begun_call_before_it_is_waited_for(
    backend: str, rows_of_token: int, group: EPGroup
) -> None:
    spec = MoESpec(hidden_size=HIDDEN_SIZE, num_experts=4, top_k=2, dtype=torch.float32)
    dispatcher = DeepEPNormalDispatcher(group, spec, EPConfig(backend=backend))
    # Both experts of every token are on the other host, on different ranks.
    num_tokens, other = 512, 1 - group.rank // 2
    ids = torch.tensor([[2 * other, 2 * other + 1]]).expand(num_tokens, 2).contiguous()
    topk = TopKOutput(topk_ids=ids, topk_weights=torch.ones(num_tokens, 2))
    x, leaf = torch.randn(num_tokens, HIDDEN_SIZE).requires_grad_(), torch.ones(1).requires_grad_()
    # What the two ranks of a host send to the other in each call.
    call_bytes = 2 * num_tokens * rows_of_token * HIDDEN_SIZE * 4

    def compute_until_sent(num_calls: int) -> None:
        deadline_s, product = time.monotonic() + LIMIT_S, torch.eye(64)
        while sent_bytes() - before < num_calls * call_bytes:
            assert time.monotonic() < deadline_s, f"call {num_calls} waits for wait()"
            product = product @ torch.eye(64)

    before = _sent_of_host()
    begun = dispatcher.dispatch_async(x, topk)
    beside = Beside.apply(leaf, lambda: compute_until_sent(4))
    compute_until_sent(1)
    begun_sums = dispatcher.combine_async(identity(begun.wait()))
    beside = beside + Beside.apply(leaf, lambda: compute_until_sent(3))
    compute_until_sent(2)
    (begun_sums.wait().sum() + beside.sum()).backward()
    assert sent_bytes() - before < 5 * call_bytes


def _sent_of_host() -> int:
    """Return the bytes sent so far, read while no rank sends. Collective: yes."""
    dist.barrier()
    found = sent_bytes()
    dist.barrier()
    return found


def pairs_between(ids: Tensor, num_local: int, hosts: HostLayout, rank: int) -> int:
    """Return the number of pairs of a token and another host with some of its experts."""
    own = hosts.host_of_rank[rank]
    return sum(
        len({hosts.host_of_rank[expert // num_local] for expert in token} - {own})
        for token in ids.tolist()
    )


def _sum_over_host(value: Tensor, hosts: HostLayout, rank: int) -> float:
    values = [torch.zeros_like(value) for _ in hosts.host_of_rank]
    dist.all_gather(values, value)
    ranks = hosts.ranks_of_host[hosts.host_of_rank[rank]]
    return float(sum(values[other].item() for other in ranks))
