import errno
import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from epcomm import (
    BackendUnavailable,
    DeepEPNormalDispatcher,
    EPConfig,
    EPGroup,
    HandleError,
    MoESpec,
    TopKOutput,
    plan,
)
from epcomm.buffers.base import Buffer
from epcomm.buffers.shared_memory import buffer as shared_memory
from epcomm.buffers.shared_memory import memory as host_memory
from epcomm.buffers.shared_memory.buffer import HostMover
from epcomm.buffers.shared_memory.memory import HostMemory, HostRegion
from epcomm.collectives.torch_dist import TorchDistCollectives
from epcomm.config import Mode
from epcomm.planning import candidates
from epcomm.platforms import machine
from epcomm.testing.buffer_suite import BATCH_SPECS, BufferEnv, check_batch, make_call, run_scenario
from epcomm.testing.data import BatchSpec, random_ids
from epcomm.types import RowsPer

NUM_RANKS = 2
pytestmark = pytest.mark.ranks(NUM_RANKS)
SPEC = MoESpec(hidden_size=16, num_experts=8, top_k=2, dtype=torch.float32)


def env_of(group: EPGroup) -> BufferEnv:
    return BufferEnv(group=group, backend="SharedMemoryBuffer", mode=Mode.NORMAL)


def test_a_block_of_each_rank_is_seen_by_all_and_has_no_name(group: EPGroup) -> None:
    memory = HostMemory(group.calls, 100, phase="test")
    links = [os.fstat(file).st_nlink for file in memory._files]
    assert links == [0] * NUM_RANKS, "names that a process which is killed would leave"
    assert [int(block.sum()) for block in memory.blocks] == [0, 0], "zero at first"
    group.calls.gather_records({})
    memory.blocks[1 - group.rank][5] = 7 + group.rank
    group.calls.gather_records({})
    assert int(memory.blocks[group.rank][5]) == 7 + (1 - group.rank)


def test_closed_group_leaves_the_headers_to_another_over_the_same_collectives() -> None:
    process_group = dist.new_group()
    collectives = TorchDistCollectives(process_group)
    collectives.bounded.timeout_s = 5.0
    closed, used = EPGroup(collectives), EPGroup(collectives)
    for group in (closed, used):
        check_batch(env_of(group), BATCH_SPECS["uneven"])
    if collectives.rank == 0:
        closed.close()
    check_batch(env_of(used), BATCH_SPECS["uneven"])
    for group in (closed, used, collectives):
        group.close()


def full(file: int, start: int, num_bytes: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_rank_without_room_is_named_on_all(monkeypatch: pytest.MonkeyPatch, group: EPGroup) -> None:
    if group.rank == 1:
        monkeypatch.setattr(host_memory.os, "posix_fallocate", full)
    wanted = r"rank 1: \d+ B of shared memory: No space left"
    with pytest.raises(BackendUnavailable, match=wanted):
        HostMemory(group.calls, 100, phase="test")
    monkeypatch.undo()
    # Beyond the memory limit of a container the kernel would kill a rank.
    monkeypatch.setattr(host_memory, "memory_left", lambda: 2**25 - group.rank)
    with pytest.raises(BackendUnavailable, match=rf"rank 1: .* memory: {2**25 - 1} B are left"):
        HostMemory(group.calls, 2**24, phase="test")


def test_foreign_memory_is_not_attached(monkeypatch: pytest.MonkeyPatch, group: EPGroup) -> None:
    """Imitate ranks in different PID namespaces."""
    pids = [each["pid"] for each in group.calls.gather_records({"pid": os.getpid()})]
    if group.rank == 1:
        monkeypatch.setattr(host_memory.os, "getpid", lambda: pids[0])
    with pytest.raises(BackendUnavailable, match=rf"rank 0: /proc/{pids[0]}/fd/\d+: "):
        HostMemory(group.calls, 100, phase="test")


def test_what_was_handed_out_survives_growth(group: EPGroup) -> None:
    region = HostRegion(group.calls, "rows", 2)
    region.require(100)
    first = region.rows(group.rank, 0, slice(0, 3), 4, torch.float32)
    first.fill_(3)
    region.require(3 * 2**20)
    second = region.rows(group.rank, 0, slice(0, 3), 4, torch.float32)
    second.fill_(5)
    assert first.eq(3).all()
    region.free()
    assert second.eq(5).all()


def test_calls_of_any_size_follow_one_another(group: EPGroup) -> None:
    """The first call needs 1 MiB, and the second 5000 rows of 256 B from each rank."""
    env = env_of(group)
    few = BatchSpec(tokens_of_rank=lambda *_: 3, choose_ids=random_ids, hidden_size=64)
    many = replace(few, tokens_of_rank=lambda *_: 5000)
    buffer = env.open(few)
    for number, spec in enumerate((few, many, few)):
        batches = env.batches(spec, number)
        out = buffer.dispatch(make_call(batches[group.rank]))
        expected = sum(
            float(batch.x[t].double().sum())
            for batch in batches
            for t in range(len(batch.x))
            if ((batch.topk_ids[t] // few.num_local_experts) == group.rank).any()
        )
        assert float(out.rows.data.double().sum()) == pytest.approx(expected, rel=1e-6)


def test_failed_growth_changes_nothing(monkeypatch: pytest.MonkeyPatch, group: EPGroup) -> None:
    env, few = env_of(group), BATCH_SPECS["uneven"]
    many = replace(few, tokens_of_rank=lambda *_: 5000)
    buffer = env.open(few)
    check_batch(env, few)
    with monkeypatch.context() as patch:
        if group.rank == 1:
            patch.setattr(host_memory.os, "posix_fallocate", full)
        for _ in range(2):
            with pytest.raises(BackendUnavailable, match="grow rows: rank 1: "):
                buffer.dispatch(make_call(env.batches(many)[group.rank]))
            check_batch(env, few)
    assert buffer.dispatch(make_call(env.batches(many)[group.rank])).exchange_plan.num_rows > 5000


@pytest.mark.parametrize("part_bytes", [1, 300], ids=["a row at once", "some rows at once"])
def test_sums_made_in_parts_are_the_same(
    part_bytes: int, monkeypatch: pytest.MonkeyPatch, group: EPGroup
) -> None:
    """Send enough rows of 128 B for several parts; other tests need less than one."""
    monkeypatch.setattr(shared_memory, "_PART_BYTES", part_bytes)
    check_batch(env_of(group), BATCH_SPECS["uneven"])


def test_overwritten_rows_are_refused_on_all_ranks_that_hold_views_and_told_to_the_others() -> None:
    """Rank 1 is in grad mode, but no tensor needs gradients, so its rows are copies."""
    x, y = torch.arange(8 * 16.0).view(8, 16), []
    ids = torch.arange(16).view(8, 2) % 8
    topk = TopKOutput(topk_ids=ids, topk_weights=torch.ones(8, 2))
    with EPGroup() as group, torch.set_grad_enabled(group.rank == 1):
        config = EPConfig(backend="shared_memory", batches_in_flight=3)
        dispatcher = DeepEPNormalDispatcher(group, SPEC, config)
        outs = [dispatcher.dispatch(x + number, topk) for number in range(4)]
        wanted = (
            r"rows of batch 1 of shared_memory were overwritten by batch 4, because at most 3 may "
            r"be in flight \(rank 0 of 2\)"
            if group.rank == 0
            else "a batch combined twice, .* on rank 0"
        )
        with pytest.raises(HandleError, match=wanted):
            dispatcher.combine(
                outs[0].combine_input(outs[0].hidden_states.data, rows_per=RowsPer.ROW)
            )
        for out in outs[1:]:
            rows = out.combine_input(out.hidden_states.data.clone(), rows_per=RowsPer.ROW)
            y.append(dispatcher.combine(rows))
    # Identity experts, on one or two ranks.
    num_ranks_of_token = torch.tensor([len({int(i) // 4 for i in row}) for row in ids])
    for number, found in enumerate(y, start=1):
        assert torch.equal(found, (x + number) * num_ranks_of_token.unsqueeze(1))


def test_the_suite_sees_a_batch_that_is_combined_after_its_rows_are_gone(
    monkeypatch: pytest.MonkeyPatch, group: EPGroup
) -> None:
    monkeypatch.setattr(HostMover, "find_overwritten", lambda mover, exchange_plan: None)
    with pytest.raises(AssertionError, match="expected HandleError with '2 may"):
        run_scenario("stand_alone", env_of(group))


def test_auto_takes_it_where_all_ranks_share_a_host(
    monkeypatch: pytest.MonkeyPatch, group: EPGroup
) -> None:
    assert plan(EPConfig(mode="normal"), SPEC, group).prefill.backend == "shared_memory"
    monkeypatch.setattr(candidates, "host_of_this_process", lambda: f"host {group.rank}")
    chosen = plan(EPConfig(mode="normal"), SPEC, group)
    assert chosen.prefill.backend == "collective"
    assert "rejected shared_memory: ranks are on 2 hosts" in chosen.explain()
    with pytest.raises(BackendUnavailable, match="ranks are on 2 hosts, expected one"):
        plan(EPConfig(mode="normal", backend="shared_memory"), SPEC, group)
    monkeypatch.setattr(candidates, "host_of_this_process", lambda: "")
    assert plan(EPConfig(mode="normal"), SPEC, group).prefill.backend == "collective"


def test_auto_asks_for_room_and_falls_back_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, group: EPGroup
) -> None:
    config = EPConfig(mode="normal", max_tokens_per_rank=1024, batches_in_flight=3)
    chosen = plan(config, SPEC, group).prefill
    assert chosen.backend == "shared_memory"
    assert chosen.limits()["batches in flight"] == "at most 3"
    regions = {region.name: region.max_bytes for region in chosen.regions()}
    # A row of 16 floats with 2 ids and 2 weights is 80 bytes. In the backward of dispatch, a
    # row with 2 gradients of weights is 72 bytes, padded to a multiple of 16.
    assert regions["received rows"] == 3 * NUM_RANKS * 1024 * 80
    assert regions["returned rows"] == 2 * NUM_RANKS * 1024 * 80
    needed = NUM_RANKS * (regions["received rows"] + regions["returned rows"])
    monkeypatch.setattr(machine, "memory_left", lambda: needed)
    chosen = plan(config, SPEC, group).prefill
    assert chosen.backend == "collective"
    said = chosen.explain()
    assert f" B of memory that 2 ranks share, and {needed} B are left" in said
    monkeypatch.setattr(machine, "memory_left", lambda: needed + 2**16)
    assert plan(config, SPEC, group).prefill.backend == "shared_memory"


def test_a_closed_buffer_refuses_and_holds_nothing(group: EPGroup) -> None:
    env, spec = env_of(group), BATCH_SPECS["uneven"]
    buffer: Buffer = env.open(spec)
    batch = env.batches(spec)[group.rank]
    buffer.dispatch(make_call(batch))
    group.close()
    group.close()
    with pytest.raises(HandleError, match="the buffer is closed"):
        buffer.dispatch(make_call(batch))
