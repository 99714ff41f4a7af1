"""Shared memory between ranks: names, growth, lifetimes, hosts, and ranks that are gone."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from epcomm import BackendUnavailable, EPConfig, EPGroup, HandleError, MoESpec, plan, survey
from epcomm.buffers import host_memory, shared_memory
from epcomm.buffers.base import Buffer
from epcomm.buffers.host_memory import HostMemory
from epcomm.buffers.host_region import HostRegion
from epcomm.buffers.shared_memory import SharedMemoryBuffer
from epcomm.config import Mode
from epcomm.testing.buffer_suite import BATCH_SPECS, BufferEnv, check_batch, dispatch
from epcomm.testing.data import BatchSpec, random_ids

NUM_RANKS = 2
FOLDER = Path("/dev/shm")
SPEC = MoESpec(hidden_size=16, num_experts=8, top_k=2, dtype=torch.float32)


# What other processes left, before these tests.
BEFORE = frozenset(path.name for path in FOLDER.iterdir())


def files_left(group: EPGroup) -> set[str]:
    # Every rank removes its own when it has heard that all are attached.
    group.collectives.gather_records({})
    left = {path.name for path in FOLDER.iterdir() if path.name.startswith("epcomm-")} - BEFORE
    # And begins nothing new before all have looked.
    group.collectives.gather_records({})
    return left


def env_of(group: EPGroup) -> BufferEnv:
    return BufferEnv(group=group, backend="shared_memory", mode=Mode.NORMAL)


@pytest.mark.ranks(NUM_RANKS)
def test_a_block_of_each_rank_is_seen_by_all_and_has_no_name_afterwards() -> None:
    with EPGroup() as group:
        memory = HostMemory(group.collectives, 100, phase="test")
        assert files_left(group) == set()
        assert [int(block.sum()) for block in memory.blocks] == [0, 0], "zero at first"
        group.collectives.gather_records({})
        memory.blocks[1 - group.rank][5] = 7 + group.rank
        group.collectives.gather_records({})
        assert int(memory.blocks[group.rank][5]) == 7 + (1 - group.rank)


@pytest.mark.ranks(NUM_RANKS)
def test_names_are_random_and_of_the_owner_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []
    unlink = Path.unlink

    def watched(path: Path) -> None:
        seen.append((path.name, os.stat(path).st_mode & 0o777))
        unlink(path)

    monkeypatch.setattr(Path, "unlink", watched)
    with EPGroup() as group:
        for _ in range(2):
            HostMemory(group.collectives, 100, phase="test")
    assert len({name for name, _ in seen}) == 2
    assert {mode for _, mode in seen} == {0o600}


@pytest.mark.ranks(NUM_RANKS)
def test_a_rank_without_room_is_named_on_all_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(file: int, start: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with EPGroup() as group:
        if group.rank == 1:
            monkeypatch.setattr(host_memory.os, "posix_fallocate", full)
        with pytest.raises(BackendUnavailable, match=r"rank 1: \d+ B in /dev/shm: No space left"):
            HostMemory(group.collectives, 100, phase="test")
        assert files_left(group) == set()


@pytest.mark.ranks(NUM_RANKS)
def test_what_was_handed_out_survives_growth() -> None:
    with EPGroup() as group:
        region = HostRegion(group.collectives, "rows")
        region.require(100)
        first = region.rows(group.rank, 0, slice(0, 3), 4, torch.float32)
        first.fill_(3)
        region.require(3 * 2**20)
        second = region.rows(group.rank, 0, slice(0, 3), 4, torch.float32)
        second.fill_(5)
        assert first.eq(3).all()
        region.free()
        assert second.eq(5).all()


def some_tokens(rank: int, world_size: int) -> int:
    return 3


def many_tokens(rank: int, world_size: int) -> int:
    return 5000


@pytest.mark.ranks(NUM_RANKS)
def test_calls_of_any_size_follow_one_another() -> None:
    """Room for the first is 1 MiB; the second takes 5000 rows of 256 B from each rank."""
    with EPGroup() as group:
        env = env_of(group)
        few = BatchSpec(tokens_of_rank=some_tokens, choose_ids=random_ids, hidden_size=64)
        many = BatchSpec(tokens_of_rank=many_tokens, choose_ids=random_ids, hidden_size=64)
        buffer = env.open(few)
        for number, spec in enumerate((few, many, few)):
            batches = env.batches(spec, number)
            out = dispatch(env, buffer, batches[group.rank], spec)
            assert out.index.row_of_slot is not None
            expected = sum(
                float(batch.x[t].double().sum())
                for batch in batches
                for t in range(len(batch.x))
                if ((batch.topk_ids[t] // few.num_local_experts) == group.rank).any()
            )
            assert float(out.rows.data.double().sum()) == pytest.approx(expected, rel=1e-6)


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.parametrize("part_bytes", [1, 300], ids=["a row at once", "some rows at once"])
def test_sums_made_in_parts_are_the_same(part_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of all buffers have less than one part; rows here take 128 B."""
    monkeypatch.setattr(shared_memory, "_PART_BYTES", part_bytes)
    with EPGroup() as group:
        check_batch(env_of(group), BATCH_SPECS["uneven"])


@pytest.mark.ranks(NUM_RANKS)
def test_rows_live_until_the_second_next_dispatch() -> None:
    with EPGroup() as group:
        env, spec = env_of(group), BATCH_SPECS["uneven"]
        buffer = env.open(spec)

        def rows(number: int) -> torch.Tensor:
            return dispatch(env, buffer, env.batches(spec, number)[group.rank], spec).rows.data

        first = rows(0)
        before = first.clone()
        rows(1)
        # A fast rank may have begun its third dispatch by now; it waits for this one.
        group.collectives.gather_records({})
        assert torch.equal(first, before)


@pytest.mark.ranks(NUM_RANKS)
def test_auto_takes_it_where_all_ranks_share_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    with EPGroup() as group:
        assert plan(EPConfig(mode="normal"), SPEC, group).prefill.backend == "shared_memory"
        monkeypatch.setattr(survey, "host_of_this_process", lambda: f"host {group.rank}")
        chosen = plan(EPConfig(mode="normal"), SPEC, group)
        assert chosen.prefill.backend == "collective"
        assert "rejected shared_memory: ranks are on 2 hosts" in chosen.explain()
        with pytest.raises(BackendUnavailable, match="ranks are on 2 hosts, expected one"):
            plan(EPConfig(mode="normal", backend="shared_memory"), SPEC, group)
        monkeypatch.setattr(survey, "host_of_this_process", lambda: "")
        assert plan(EPConfig(mode="normal"), SPEC, group).prefill.backend == "collective"


def test_a_plan_without_ranks_does_not_take_it() -> None:
    chosen = plan(EPConfig(mode="normal"), SPEC, world_size=4)
    assert chosen.prefill.backend == "collective"
    assert "rejected shared_memory: needs a group" in chosen.explain()


@pytest.mark.ranks(NUM_RANKS)
def test_a_closed_buffer_refuses_and_holds_nothing() -> None:
    with EPGroup() as group:
        env, spec = env_of(group), BATCH_SPECS["uneven"]
        buffer: Buffer = env.open(spec)
        assert isinstance(buffer, SharedMemoryBuffer)
        batch = env.batches(spec)[group.rank]
        dispatch(env, buffer, batch, spec)
        group.close()
        group.close()
        with pytest.raises(HandleError, match="the buffer is closed"):
            dispatch(env, buffer, batch, spec)
