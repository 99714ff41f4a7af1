import pytest
import torch
import torch.distributed as dist

from epcomm import EPGroup, EPTimeout, ShapeError
from epcomm.collectives.staged import StagedCollectives
from epcomm.collectives.torch_dist import TorchDistCollectives

pytestmark = pytest.mark.ranks(2)


def test_rows_and_records_travel_through_the_host() -> None:
    # The device of the transport itself, so copies to the host do nothing.
    over = TorchDistCollectives(dist.group.WORLD)
    staged = StagedCollectives(over, over.device)
    rank = staged.rank
    sent = torch.full((3, 2), float(rank))
    out = torch.full((3, 2), float("nan"))
    splits = ([1, 2], [1, 2]) if rank == 0 else ([2, 1], [2, 1])
    received = staged.all_to_all(sent, send_splits=splits[0], recv_splits=splits[1], out=out)
    assert received is out
    assert received[:, 0].tolist() == ([0.0, 1.0, 1.0] if rank == 0 else [0.0, 0.0, 1.0])
    assert staged.all_gather(torch.tensor([rank])).flatten().tolist() == [0, 1]
    assert [each["rank"] for each in staged.gather_records({"rank": rank})] == [0, 1]
    with pytest.raises(ShapeError, match="expected a contiguous"):
        staged.all_to_all(sent.T)
    staged.close()
    assert staged.process_group is None


def test_waits_of_the_host_last_as_long_and_name_the_ranks_of_the_whole() -> None:
    # Use a new process group, because a timeout stays on the board of a process group.
    process_group = dist.new_group()
    over = TorchDistCollectives(process_group)
    staged = StagedCollectives(over, over.device)
    alone = staged.split([[0], [1]], scope=", in a host")
    both = staged.split([[0, 1]], scope=", in a host")
    staged.limit_waits(0.2)
    assert over.bounded.timeout_s == 0.2
    if staged.rank == 0:
        with pytest.raises(EPTimeout, match=r"here, in a host: .*rank 1"):
            both.all_gather(torch.zeros(1), phase="here")
    assert alone.names.own == staged.rank
    dist.barrier()


def test_a_group_may_have_tensors_on_another_device() -> None:
    device = torch.device("cuda", 0)
    group = EPGroup(device=device)
    assert (group.device, group.collectives.bounded) == (device, None)
    assert EPGroup(device="cpu").collectives.bounded is not None
