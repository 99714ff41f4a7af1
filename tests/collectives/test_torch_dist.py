import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from epcomm import ConfigError, EPGroup, HandleError, ShapeError
from epcomm.collectives import torch_dist
from epcomm.collectives.torch_dist import TorchDistCollectives

NUM_RANKS = 4
DTYPES = [
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float32),
    *(torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
]
# The number of rows that each rank (outer) sends to each rank (inner).
SPLITS = {
    "even": [[2] * NUM_RANKS] * NUM_RANKS,
    "uneven": [[src + 2 * dst for dst in range(NUM_RANKS)] for src in range(NUM_RANKS)],
    "some zero": [[(src + dst) % 3 for dst in range(NUM_RANKS)] for src in range(NUM_RANKS)],
    "all to rank 2": [[0, 0, 3, 0]] * NUM_RANKS,
    "rank 1 alone sends": [[0] * 4, [1, 2, 3, 4], [0] * 4, [0] * 4],
    "nothing": [[0] * NUM_RANKS] * NUM_RANKS,
}


def world() -> TorchDistCollectives:
    return TorchDistCollectives(dist.group.WORLD)


def payload(seed: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return arbitrary bits, including NaN, that are equal on every rank."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return (torch.rand(shape, generator=generator) < 0.5).to(device)
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    bits = torch.randint(0, 256, size, generator=generator).to(torch.uint8)
    return bits.view(dtype).to(device)


def bits_equal(actual: Tensor, expected: Tensor) -> bool:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    return not actual.numel() or torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


TAILS = [(), (3,), (2, 5)]


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.mpi_ranks(NUM_RANKS)
def test_all_to_all_moves_bits(group: EPGroup) -> None:
    rank, everyone = group.rank, range(NUM_RANKS)
    for dtype, (name, splits) in product(DTYPES, SPLITS.items()):
        for tail in TAILS:
            rows = [
                [payload(10 * src + dst, (n, *tail), dtype, group.device) for dst, n in row]
                for src, row in enumerate(map(enumerate, splits))
            ]
            received = group.collectives.all_to_all(
                torch.cat(rows[rank]),
                send_splits=splits[rank],
                recv_splits=[splits[src][rank] for src in everyone],
            )
            expected = torch.cat([rows[src][rank] for src in everyone])
            assert bits_equal(received, expected), (dtype, name, tail)


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.mpi_ranks(NUM_RANKS)
def test_all_to_all_splits_evenly_by_default(group: EPGroup) -> None:
    send = torch.arange(2 * NUM_RANKS, device=group.device) + 100 * group.rank
    received = group.collectives.all_to_all(send)
    assert received.tolist() == [
        100 * src + 2 * group.rank + row for src in range(NUM_RANKS) for row in (0, 1)
    ]


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.mpi_ranks(NUM_RANKS)
def test_all_gather_keeps_bits_and_ranks(group: EPGroup) -> None:
    for dtype, shape in product(DTYPES, [(5,), (3, 4), (1,), (0, 4)]):
        tensors = [payload(src, shape, dtype, group.device) for src in range(NUM_RANKS)]
        gathered = group.collectives.all_gather(tensors[group.rank])
        assert bits_equal(gathered, torch.stack(tensors)), (dtype, shape)
    scalar = torch.tensor(group.rank, device=group.device)
    assert group.collectives.all_gather(scalar).tolist() == [0, 1, 2, 3]
    nothing = torch.empty(3, 0, device=group.device)
    assert group.collectives.all_gather(nothing).shape == (NUM_RANKS, 3, 0)


@pytest.mark.ranks(NUM_RANKS)
def test_tensor_that_is_not_contiguous_is_refused_before_it_is_sent() -> None:
    collectives = world()
    transposed = torch.ones(4, 8, device=collectives.device).T
    for collective in (collectives.all_to_all, collectives.all_gather):
        with pytest.raises(ShapeError, match=r"tensor \[8, 4\] with strides \(1, 8\)"):
            collective(transposed)
    assert collectives.all_gather(transposed.contiguous()).shape == (NUM_RANKS, 8, 4)


@pytest.mark.ranks(NUM_RANKS)
def test_records_of_any_length_are_gathered_by_rank() -> None:
    collectives = world()

    def record(rank: int) -> dict[str, str | int | float | bool | None]:
        return {
            "rank": rank,
            "text": "é\n" * 1000 * rank,
            "half": rank / 2,
            "none": None,
            "yes": True,
        }

    assert collectives.gather_records(record(collectives.rank)) == [
        record(rank) for rank in range(NUM_RANKS)
    ]
    assert collectives.gather_records({}) == [{}] * NUM_RANKS
    # All lengths around the length of the first message, on one rank or another.
    for length in range(8192 - 32, 8192 + 2):
        texts = ["x" * length if rank == length % NUM_RANKS else "" for rank in range(NUM_RANKS)]
        found = collectives.gather_records({"text": texts[collectives.rank]})
        assert found == [{"text": text} for text in texts]


@pytest.mark.ranks(NUM_RANKS)
def test_findings_may_differ_and_are_told_to_all_ranks() -> None:
    collectives = world()
    findings = {"top_k": collectives.rank, f"of rank {collectives.rank}": "here"}
    told = collectives.agree({"top_k": 2}, what="plan", findings=findings)
    assert told == [{"top_k": rank, f"of rank {rank}": "here"} for rank in range(NUM_RANKS)]
    with pytest.raises(ConfigError, match="plan: ranks disagree on top_k: 0 on rank 0, 1 on rank"):
        collectives.agree({"top_k": collectives.rank}, what="plan", findings={"top_k": 2})


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.mpi_ranks(NUM_RANKS)
def test_disagreement_names_field_values_and_ranks_on_every_rank(group: EPGroup) -> None:
    record: dict[str, str | int] = {"top_k": 2, "hidden_size": 64}
    if group.rank == 1:
        record["hidden_size"] = 128
    if group.rank == 3:
        record["extra"] = "here"
    with pytest.raises(ConfigError) as caught:
        group.collectives.agree(record, what="open_buffer")
    assert str(caught.value) == (
        "open_buffer: ranks disagree on hidden_size: 64 on ranks 0, 2, 3, 128 on rank 1; on "
        'extra: "<absent>" on ranks 0, 1, 2, "here" on rank 3 '
        f"(this is {group.where}); make them equal on all ranks"
    )
    group.collectives.agree({"after": "the fault"}, what="the group is usable")


@pytest.mark.ranks(NUM_RANKS)
def test_a_closed_group_lets_go_of_its_process_group() -> None:
    group = EPGroup()
    group.calls.gather_records({})
    group.close()
    # The caller destroys the process group, which ends its threads only if nobody else holds it.
    assert group.collectives.process_group is None
    with pytest.raises(HandleError, match="collective: the EPGroup is closed"):
        group.calls.gather_records({})


@pytest.mark.ranks(2)
def test_ranks_connect_while_another_thread_waits_on_the_store(group: EPGroup) -> None:
    # gloo waits so while another group of the process connects, and the ranks would deadlock.
    store = dist.distributed_c10d._get_default_store()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(store.wait, ["never set"], timedelta(seconds=4))
        time.sleep(0.2)
        begun_s = time.monotonic()
        group.calls.open_transfers()
        assert time.monotonic() - begun_s < 2
        with pytest.raises(dist.DistStoreError):
            waiting.result()


@pytest.mark.ranks(2)
def test_groups_over_a_process_group_share_one_client_of_its_store() -> None:
    stores = []
    for _ in range(2):
        TorchDistCollectives(dist.group.WORLD).separate()
        stores.append(torch_dist._stores[dist.group.WORLD])
    assert stores[0] is stores[1]


@pytest.mark.ranks(2)
def test_ranks_wait_for_all_to_connect(group: EPGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    # Closing a connection breaks those that other ranks still make.
    connect = dist.ProcessGroupGloo

    def connect_slowly(*arguments: Any) -> dist.ProcessGroupGloo:  # noqa: ANN401
        made = connect(*arguments)
        time.sleep(0.5 * group.rank)
        return made

    monkeypatch.setattr(torch_dist.dist, "ProcessGroupGloo", connect_slowly)
    begun_s = time.monotonic()
    group.calls.open_transfers()
    assert time.monotonic() - begun_s >= 0.5


@pytest.mark.ranks(2)
def test_the_first_begun_call_on_a_device_makes_one_communicator(
    ep_ranks: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for is_capturing in (True, False, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=is_capturing: now)
        found = TorchDistCollectives(dist.group.WORLD)
        # The host does not wait in the collectives of devices.
        found.bounded = None
        found.separate_begun()
        made.append(found._open_group())
        assert found.all_gather(torch.tensor([found.rank])).flatten().tolist() == [0, 1]
    assert made[0] is dist.group.WORLD
    assert made[1] is made[2] is not dist.group.WORLD
