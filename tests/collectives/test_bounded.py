from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch

from epcomm import ConfigError, DeepEPNormalDispatcher, EPConfig, EPGroup, EPTimeout, MoESpec
from epcomm.collectives import bounded
from epcomm.collectives.base import DEFAULT_TIMEOUT_S
from epcomm.collectives.bounded import BoundedWait, FailureBoard, Step

TIMEOUT_S = 0.5
LONG_S = 30.0
# Seconds by which threads of a busy machine may exceed a limit.
SLACK_S = 1.0


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "SLICE_S", 0.05)
    monkeypatch.setattr(bounded, "GRACE_S", 0.4)
    monkeypatch.setattr(bounded, "POLL_S", 0.01)


@dataclass
class Wall:
    """The reports of all ranks, in this process.

    silent: it does not answer.   slow_rank: this rank reads the report of rank 1 and then stops.
    """

    texts: dict[int, str] = field(default_factory=dict)
    silent: bool = False
    slow_rank: int | None = None
    num_reads: int = 0


class WallFailureBoard(FailureBoard):
    """The failure board of one rank, over the wall that all ranks share."""

    def __init__(self, wall: Wall, rank: int, host_rank: int | None = None) -> None:
        self.wall, self.rank, self.host_rank = wall, rank, host_rank

    def post(self, text: str) -> None:
        if not self.wall.silent:
            self.wall.texts[self.rank] = text

    def read(self) -> Mapping[int, str] | None:
        self.wall.num_reads += 1
        if self.wall.silent or self.rank == self.wall.slow_rank:
            return None
        return dict(self.wall.texts)

    def last_known(self) -> Mapping[int, str]:
        if self.rank != self.wall.slow_rank:
            return {}
        # Read so slowly that rank 1 gives up in the meantime.
        while "null" in (text := self.wall.texts.get(1, "null")):
            time.sleep(bounded.POLL_S)
        return {1: text}


class Transport:
    """An exchange is complete when all ranks have started it; break_off() fails all exchanges."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.num_started: dict[int, int] = {}
        self.fault = ""
        self.changed = threading.Condition()

    def start(self, number: int) -> Step:
        with self.changed:
            self.num_started[number] = self.num_started.get(number, 0) + 1
            self.changed.notify_all()

        def step(seconds: float) -> bool:
            with self.changed:
                self.changed.wait_for(lambda: self.fault or self.is_complete(number), seconds)
                if self.fault:
                    raise RuntimeError(self.fault)
                return self.is_complete(number)

        return step

    def is_complete(self, number: int) -> bool:
        return self.num_started[number] == self.world_size

    def break_off(self) -> None:
        with self.changed:
            self.fault = "[/src/pair.cc:5] Connection closed by peer [::1]:7. This is a pity. GLHF"
            self.changed.notify_all()


class Rank:
    """A rank in its own thread."""

    def __init__(self, world: World, rank: int, timeout_s: float, host_rank: int | None) -> None:
        self.world, self.rank = world, rank
        board, world_size = (
            WallFailureBoard(world.wall, rank, host_rank),
            world.transport.world_size,
        )
        self.wait = BoundedWait(board, rank=rank, world_size=world_size)
        self.wait.timeout_s = timeout_s
        self.num_started = 0

    def run(self, phase: str = "dispatch") -> None:
        self.wait.run(self.start, phase)

    def start(self) -> Step:
        self.num_started += 1
        return self.world.transport.start(self.num_started)


class Ending(NamedTuple):
    """The result of a rank.

    message: the text of the EPTimeout, or ''.   elapsed_s: time since all ranks started.
    """

    message: str
    elapsed_s: float


class World:
    """All ranks of a group, with transport and failure board."""

    def __init__(
        self, world_size: int = 4, *, timeout_s: float = TIMEOUT_S, host_rank: int | None = None
    ) -> None:
        self.wall, self.transport = Wall(), Transport(world_size)
        self.ranks = [Rank(self, rank, timeout_s, host_rank) for rank in range(world_size)]

    def play(self, *parts: Callable[[Rank], None] | None) -> list[Ending | None]:
        """Run one function per rank (None for a lost rank); return the ending of each."""
        endings: list[Ending | None] = [None] * len(parts)
        start_s = time.monotonic()

        def run(rank: int, part: Callable[[Rank], None]) -> None:
            message = ""
            try:
                part(self.ranks[rank])
            except EPTimeout as error:
                message = str(error)
            endings[rank] = Ending(message, time.monotonic() - start_s)

        threads = [
            threading.Thread(target=run, args=(rank, part))
            for rank, part in enumerate(parts)
            if part is not None
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return endings


def once(rank: Rank) -> None:
    rank.run()


def after(seconds: float) -> Callable[[Rank], None]:
    def part(rank: Rank) -> None:
        time.sleep(seconds)
        rank.run()

    return part


def messages(endings: list[Ending | None]) -> list[str]:
    return [ending.message for ending in endings if ending is not None]


def test_exchanges_in_time_hardly_read_the_failure_board() -> None:
    world = World()

    def part(rank: Rank) -> None:
        for _ in range(50):
            rank.run()

    assert messages(world.play(part, part, part, part)) == ["", "", "", ""]
    slow_slices = 10
    assert world.wall.num_reads <= 4 + slow_slices
    assert not world.wall.texts


def test_lost_rank_is_named_with_phase_call_and_exchange() -> None:
    world = World()

    def part(rank: Rank) -> None:
        rank.run("plan")
        rank.run("dispatch")
        rank.run("dispatch")

    def lost(rank: Rank) -> None:
        rank.run("plan")
        rank.run("dispatch")

    endings = world.play(part, part, lost, part)
    for rank in (0, 1, 3):
        ending = endings[rank]
        assert ending.message.startswith(
            "dispatch: rank 2 did not arrive (call 2, exchange 3, waited 0."
        )
        assert f"; this is rank {rank} of 4); check whether it is alive" in ending.message
        assert ending.elapsed_s < TIMEOUT_S + bounded.GRACE_S + SLACK_S


def test_a_timeout_of_one_rank_ends_the_waits_of_the_others() -> None:
    world = World(timeout_s=LONG_S)
    world.ranks[0].wait.timeout_s = TIMEOUT_S
    endings = world.play(once, after(0.3), None, once)
    for ending in endings:
        if ending is not None:
            assert ending.message.startswith("dispatch: rank 2 did not arrive")
            assert ending.elapsed_s < TIMEOUT_S + bounded.GRACE_S + SLACK_S


def test_late_rank_names_the_ranks_that_gave_up_on_it() -> None:
    world = World()
    late = after(TIMEOUT_S + bounded.GRACE_S + SLACK_S)
    endings = world.play(once, once, late, None)
    texts = messages(endings)
    for message in texts[:2]:
        assert message.startswith("dispatch: ranks 2, 3 did not arrive")
    assert texts[2].startswith(
        "dispatch: this rank came too late: ranks 0, 1 had given up on ranks 2, 3 (call 1,"
    )


def test_after_a_timeout_every_call_repeats_the_message_and_starts_nothing() -> None:
    world = World(2)
    first = messages(world.play(once, None))
    for _ in range(2):
        again = world.play(lambda rank: rank.run("combine"), None)[0]
        assert [again.message] == first
        assert again.elapsed_s < 0.2
    assert world.ranks[0].num_started == 1


def test_broken_transport_waits_for_a_rank_that_still_computes() -> None:
    world = World(timeout_s=LONG_S)
    world.transport.break_off()
    busy_s = 1.0
    assert busy_s > 2 * bounded.GRACE_S
    for ending in world.play(once, once, None, after(busy_s)):
        if ending is not None:
            assert ending.message.startswith("dispatch: rank 2 did not arrive")
            reason = "; the transport says: Connection closed by peer [::1]:7; check"
            assert reason in ending.message
            assert ending.elapsed_s < busy_s + bounded.GRACE_S + SLACK_S


def test_ranks_in_different_exchanges_are_described() -> None:
    world = World(2)

    def ahead(rank: Rank) -> None:
        rank.run("plan")
        rank.run("dispatch")

    def astray(rank: Rank) -> None:
        rank.run("plan")
        # The transport matches exchanges by their number alone, as gloo does.
        rank.num_started += 1
        rank.run("combine")

    texts = messages(world.play(ahead, astray))
    assert texts[0].startswith("dispatch: no rank is missing, but the exchange did not end in time")
    assert "; rank 1 was in combine, call 1, exchange 2; call in the same order" in texts[0]
    assert "; rank 0 was in dispatch, call 1, exchange 2; call in the same order" in texts[1]


def test_silent_failure_board_names_the_rank_that_serves_it() -> None:
    world = World(host_rank=0)
    world.wall.silent = True
    for message in messages(world.play(None, once, once, once)):
        assert message.startswith(
            "dispatch: rank 0 did not arrive, and the store in its process does not answer (call 1"
        )


def test_silent_failure_board_without_a_host_names_no_rank() -> None:
    world = World()
    world.wall.silent = True
    for message in messages(world.play(once, once, None, once)):
        assert "the missing ranks are unknown because the failure board does not answer" in message


def test_reports_outlive_a_failure_board_whose_host_has_reported_and_ended() -> None:
    world = World(3, host_rank=0)

    def host(rank: Rank) -> None:
        try:
            rank.run()
        finally:
            world.wall.silent = True

    texts = messages(world.play(host, once, None))
    assert len(texts) == 2
    for message in texts:
        assert message.startswith("dispatch: rank 2 did not arrive (call 1")


def test_a_rank_that_reads_slowly_names_the_ranks_that_others_gave_up_on() -> None:
    world = World(6, host_rank=0)
    world.wall.slow_rank = 5
    for message in messages(world.play(None, once, once, None, once, once)):
        assert message.startswith("dispatch: ranks 0, 3 did not arrive (call 1")


def test_own_errors_of_an_exchange_pass_through() -> None:
    world = World(1)

    def broken_start() -> Step:
        raise RuntimeError("splits do not add up")

    def broken_step() -> Step:
        def step(_: float) -> bool:
            raise KeyboardInterrupt

        return step

    wait = world.ranks[0].wait
    with pytest.raises(RuntimeError, match="splits do not add up"):
        wait.run(broken_start, "dispatch")
    with pytest.raises(KeyboardInterrupt):
        wait.run(broken_step, "dispatch")
    assert not world.wall.texts


SPEC = MoESpec(hidden_size=16, num_experts=4, top_k=2, dtype=torch.float32)


def timeout_of(group: EPGroup) -> float:
    return group.collectives.bounded.timeout_s


@pytest.mark.ranks(2)
def test_group_waits_as_long_as_its_most_patient_layer(group: EPGroup) -> None:
    assert timeout_of(group) == DEFAULT_TIMEOUT_S
    for own_s, group_s in ((20.0, 20.0), (30.0, 30.0), (10.0, 30.0)):
        DeepEPNormalDispatcher(group, SPEC, EPConfig(timeout_s=own_s))
        assert timeout_of(group) == group_s


@pytest.mark.ranks(2)
def test_different_timeouts_of_ranks_are_an_error(group: EPGroup) -> None:
    config = EPConfig(timeout_s=20.0 + group.rank)
    with pytest.raises(ConfigError, match=r"timeout_s: 20.0 on rank 0, 21.0 on rank 1"):
        DeepEPNormalDispatcher(group, SPEC, config)
