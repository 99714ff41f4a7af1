from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from epcomm import (
    ConfigError,
    DeepEPNormalDispatcher,
    EPConfig,
    EPGroup,
    HandleError,
    MoESpec,
    TopKOutput,
    WireFormat,
    plan,
)
from epcomm.collectives.torch_dist import TorchDistCollectives
from epcomm.spec import HostLayout
from tests.cases.specs import buffer_spec

NUM_RANKS = 4
MOE = MoESpec(hidden_size=16, num_experts=8, top_k=2, dtype=torch.float32)
SPEC = buffer_spec(16, 2, 2, rows=WireFormat.of(torch.float32))


def test_without_a_process_group_the_message_says_how_to_make_one() -> None:
    with pytest.raises(ConfigError, match=r"call torch\.distributed\.init_process_group first"):
        EPGroup()
    with pytest.raises(ConfigError, match="ranks is str, expected a ProcessGroup"):
        EPGroup("world")


@pytest.mark.ranks(NUM_RANKS)
def test_a_mesh_dimension_numbers_ranks_inside_itself() -> None:
    device = EPGroup().device.type
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("data", "expert"))
    rank = dist.get_rank()
    for name, position, others in (
        ("expert", rank % 2, [rank // 2 * 2, rank // 2 * 2 + 1]),
        ("data", rank // 2, [rank % 2, rank % 2 + 2]),
    ):
        group = EPGroup(mesh[name])
        assert (group.rank, group.world_size) == (position, 2)
        mine = torch.tensor(rank, device=group.device)
        assert group.collectives.all_gather(mine).tolist() == others


@pytest.mark.ranks(NUM_RANKS)
def test_a_mesh_of_two_dimensions_says_where_all_its_ranks_run() -> None:
    # Rank 3 is first on the first host, but the process group determines numbers and hosts.
    with EPGroup(mesh_of([3, 1], [0, 2])) as group:
        assert (group.rank, group.world_size) == (dist.get_rank(), 4)
        assert group.hosts == HostLayout(host_of_rank=(0, 1, 0, 1))
        assert group.mesh.mesh.tolist() == [0, 1, 2, 3]
        # The mesh overrides the detected hosts: these ranks share memory.
        chosen = plan(EPConfig(mode="normal"), MOE, group).prefill
        assert chosen.buffer_spec.hosts == group.hosts
        apart = "shared_memory: ranks are on 2 hosts by the mesh of EPGroup, expected one whose"
        assert apart in chosen.explain()
    with EPGroup(mesh_of([0, 1, 2, 3])) as group:
        assert plan(EPConfig(mode="normal"), MOE, group).prefill.backend == "shared_memory"
    with pytest.raises(ConfigError, match="the DeviceMesh has 3 dimensions, expected 1, or 2"):
        EPGroup(mesh_of([[0], [1]], [[2], [3]]))


@pytest.mark.ranks(NUM_RANKS)
def test_two_dimensions_of_a_larger_mesh_say_where_some_of_its_ranks_run() -> None:
    rank = dist.get_rank()
    # The other ranks are not members, so ranks have different numbers of groups.
    alone = dist.new_group([0])
    names = ("stage", "host", "rank")
    mesh = init_device_mesh(EPGroup().device.type, (2, 2, 1), mesh_dim_names=names)
    for _ in range(2):
        with EPGroup(mesh["host", "rank"]) as group:
            mine = torch.tensor(rank, device=group.device)
            assert group.collectives.all_gather(mine).tolist() == [rank // 2 * 2, rank // 2 * 2 + 1]
            assert group.hosts == HostLayout(host_of_rank=(0, 1))
    if isinstance(alone, dist.ProcessGroup):
        dist.destroy_process_group(alone)


@pytest.mark.ranks(NUM_RANKS)
def test_a_mesh_of_hosts_of_some_ranks_is_part_of_a_larger_one() -> None:
    # Ranks outside the mesh would have to take part, but they make no EPGroup.
    problem = "not a member" if dist.get_rank() == 1 else "3 of 4 ranks and is not part of a larger"
    with pytest.raises(ConfigError, match=problem):
        EPGroup(mesh_of([3], [0], [2]))


@pytest.mark.ranks(NUM_RANKS)
def test_ranks_that_disagree_on_hosts_all_hear_of_it() -> None:
    rows = ([0, 1], [2, 3]) if dist.get_rank() == 2 else ([0, 2], [1, 3])
    with EPGroup(mesh_of(*rows)) as group:
        with pytest.raises(ConfigError) as caught:
            plan(EPConfig(mode="normal"), MOE, group)
        text = str(caught.value)
        assert 'hosts: "2 hosts of ranks 0 2, 1 3" on ranks 0, 1, 3' in text
        assert '"2 hosts of ranks 0 1, 2 3" on rank 2' in text
    # A single rank that reports it suffices.
    mesh = mesh_of([0, 1], [2, 3]) if dist.get_rank() == 1 else None
    with EPGroup(mesh) as group, pytest.raises(ConfigError, match='"not given" on ranks 0, 2, 3'):
        plan(EPConfig(mode="normal"), MOE, group)


def mesh_of(*hosts: list[int] | list[list[int]]) -> DeviceMesh:
    """Make a mesh without process groups for its dimensions; ranks may pass different meshes."""
    return DeviceMesh(EPGroup().device.type, list(hosts), _init_backend=False)


@pytest.mark.ranks(NUM_RANKS)
def test_a_rank_outside_is_told_that_it_is_no_member() -> None:
    first_two = dist.new_group([0, 1])
    mesh = DeviceMesh(EPGroup().device.type, [0, 1])
    for ranks in (first_two, mesh):
        if dist.get_rank() < 2:
            assert EPGroup(ranks).world_size == 2
        else:
            with pytest.raises(ConfigError, match="this rank is not a member of the process group"):
                EPGroup(ranks)


@pytest.mark.ranks(NUM_RANKS)
def test_a_group_of_several_backends_is_as_good_as_its_own_device() -> None:
    # init_process_group without a backend makes one per device type.
    group = EPGroup(dist.new_group(backend="cpu:gloo"))
    gathered = group.collectives.all_gather(torch.tensor(group.rank))
    assert gathered.tolist() == [0, 1, 2, 3]


@pytest.mark.ranks(NUM_RANKS)
def test_calls_of_two_groups_over_the_same_collectives_are_compared() -> None:
    collectives = TorchDistCollectives(dist.group.WORLD)
    dispatchers = [DeepEPNormalDispatcher(EPGroup(collectives), MOE) for _ in range(2)]
    x = torch.ones(1, MOE.hidden_size)
    topk = TopKOutput(topk_ids=torch.tensor([[0, 1]]), topk_weights=torch.ones(1, 2))
    with pytest.raises(HandleError, match=r"rank 2 is in dispatch of dispatcher 2 .* while ranks"):
        dispatchers[collectives.rank == 2].dispatch(x, topk)
    dispatchers[0].dispatch(x, topk)


@pytest.mark.ranks(NUM_RANKS)
def test_equal_specifications_share_a_buffer(group: EPGroup) -> None:
    buffer = group.open_buffer("CollectiveBuffer", SPEC)
    assert group.open_buffer("CollectiveBuffer", replace(SPEC)) is buffer
    assert group.open_buffer("CollectiveBuffer", replace(SPEC, top_k=1)) is not buffer
    assert group.open_buffer("AllGatherBuffer", SPEC) is not buffer


@pytest.mark.ranks(NUM_RANKS)
def test_ranks_that_ask_for_different_buffers_all_hear_of_it(group: EPGroup) -> None:
    spec = replace(SPEC, hidden_size=32) if group.rank == 2 else SPEC
    with pytest.raises(ConfigError, match="hidden_size: 16 on ranks 0, 1, 3, 32 on rank 2"):
        group.open_buffer("CollectiveBuffer", spec)
    with pytest.raises(ConfigError, match="buffer is 'Pigeon'"):
        group.open_buffer("Pigeon", SPEC)
    assert group.open_buffer("CollectiveBuffer", SPEC)


@pytest.mark.ranks(NUM_RANKS)
def test_close_ends_all_later_calls_and_may_be_called_twice() -> None:
    group = EPGroup()
    spec = MoESpec(hidden_size=16, num_experts=8, top_k=2, dtype=torch.float32)
    DeepEPNormalDispatcher(group, spec)
    group.close()
    group.close()
    assert group.is_closed
    with pytest.raises(HandleError, match=rf"the EPGroup is closed \({group.where}\)"):
        group.open_buffer("CollectiveBuffer", SPEC)
    with EPGroup() as another:
        assert another.open_buffer("CollectiveBuffer", SPEC)
    assert another.is_closed


@pytest.mark.ranks(2)
def test_two_threads_compute_with_two_groups() -> None:
    process_groups = [dist.new_group() for _ in range(2)]
    ids = torch.tensor([[0, 7], [3, 4]])
    topk = TopKOutput(topk_ids=ids, topk_weights=torch.ones(2, 2))

    def compute(process_group: dist.ProcessGroup, factor: float) -> Tensor:
        with EPGroup(process_group) as group, torch.no_grad():
            dispatcher = DeepEPNormalDispatcher(group, MOE, EPConfig())
            y = torch.empty(0)
            for _ in range(20):
                out = dispatcher.dispatch(torch.full((2, 16), factor), topk)
                rows = torch.full((out.num_slots, 16), factor)
                y = dispatcher.combine(out.combine_input(rows))
            return y

    with ThreadPoolExecutor(2) as threads:
        found = threads.map(compute, process_groups, (1.0, 3.0))
        for y, factor in zip(found, (1.0, 3.0), strict=True):
            assert y.eq(2 * factor).all()
