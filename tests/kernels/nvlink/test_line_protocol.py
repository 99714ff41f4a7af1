"""A model of low latency with lines, in random schedules: it fails if any rule is left out.

A line is a word of data and the epoch that wrote it, stored and loaded as one. The way of a token
of a rank that sends in lines: its words go to the rank of its experts as lines, which that rank
polls until each has the epoch of the batch, and stores unpacked; experts read; the sum returns in
lines, which the source polls. Nothing is released and nothing acquired. A rank with more tokens
sends only their metadata in lines, and rows in bulk: plain stores, a release, a signal; its sums
come in bulk too and have a signal for each chunk of tokens, which other programs send than the
header line. What tells the two apart is the header line, which every rank sends to every rank in
both phases; that of combine is also the credit.

Why memory may be written again, with one receive buffer. A stores lines of batch e on B once B's
header line of combine e - 1 (or of a release) has come: B sent it in a kernel after all that read
batch e - 1, except B's own sums, which may read rows in place. Those rows are B's copies if A sent
lines, and B writes them again itself; if A sent in bulk, A has awaited B's signal. B stores sums of
e on A once A's header line of dispatch e has come, which A sent after all that read sums of e - 1.
A later credit may already have arrived when a slow program of A looks, because its rank sent lines
to B without it: so a credit is compared by order, all other lines for equality.

In this model the stores of a rank arrive in any order until a release, except those to one place;
programs of a kernel run in any order; receiving kernels begin beside the sending ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import pytest

# A rank with more tokens sends in bulk.
LINE_TOKENS = 2
# Sums in bulk are signalled by chunks of so many tokens, each by programs of its own.
CHUNK_TOKENS = 2
# A row: parts of it may come apart.
WORDS = 2

# Consecutive unsuccessful looks after which all programs are checked for a deadlock.
_PATIENCE = 50

# The result of each step of a program: whether it found what it waits for.
Program = Generator[bool]
Place = tuple[Hashable, ...]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules of the protocol, each of which a faulty variant leaves out."""

    compares_flags: bool = True
    awaits_credit: bool = True
    credit_may_be_ahead: bool = True
    empty_ranks_send_headers: bool = True
    polls_every_line: bool = True
    releases: bool = True
    bulk_awaits_signals: bool = True
    bulk_awaits_all_chunks: bool = True
    bulk_polls_credits: bool = True


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One batch: `targets[rank][token]` are the ranks that own its experts."""

    number: int
    buffer: int
    epoch: int
    targets: tuple[tuple[frozenset[int], ...], ...]
    is_combined: bool

    def in_lines(self, rank: int) -> bool:
        return len(self.targets[rank]) <= LINE_TOKENS

    def is_silent(self, rank: int, peer: int) -> bool:
        """Return whether neither rank has rows for the other."""
        pairs = ((rank, peer), (peer, rank))
        return not any(to in ranks for source, to in pairs for ranks in self.targets[source])


class BrokenError(Exception):
    """A program read data that was not written for this batch, or no program can continue."""


@dataclass(kw_only=True)
class World:
    """The memory of all ranks, and stores in flight: of each (rank, place), in order."""

    size: int
    rules: Rules
    memory: dict[Place, object] = field(default_factory=dict)
    under_way: dict[tuple[int, Place], list[object]] = field(default_factory=dict)

    def store(self, rank: int, place: Place, value: object) -> None:
        self.under_way.setdefault((rank, place), []).append(value)

    def arrive(self, key: tuple[int, Place]) -> None:
        values = self.under_way[key]
        self.memory[key[1]] = values.pop(0)
        if not values:
            del self.under_way[key]

    def release(self, rank: int) -> None:
        if self.rules.releases:
            for key in [key for key in self.under_way if key[0] == rank]:
                while key in self.under_way:
                    self.arrive(key)

    def line(self, place: Place, epoch: int) -> object:
        """Return the content of a line, None before it has arrived."""
        data, flag = self.memory.get(place, (None, 0))  # pyright: ignore[reportGeneralTypeIssues]
        is_there = flag == epoch if self.rules.compares_flags else flag != 0
        return data if is_there else None


@dataclass(frozen=True)
class Kernel:
    """A kernel of a stream: its programs are made when it begins.

    begins_early: beside the one before it, which ends before the one after it begins.
    """

    programs: Callable[[], list[Program]]
    begins_early: bool = False


def await_that(is_there: Callable[[], bool]) -> Program:
    while not is_there():
        yield False
    yield True


@dataclass(kw_only=True)
class Rank:
    """One rank: kernels of each batch, as lists of programs."""

    world: World
    number: int
    received: dict[int, dict[tuple[int, int], bool]] = field(default_factory=dict)

    @property
    def all_ranks(self) -> range:
        return range(self.world.size)

    def place(self, rank: int, name: str, batch: Batch, *at: int) -> Place:
        """Return a place in a receive buffer of a rank."""
        return (rank, name, batch.buffer, *at)

    def store_line(self, to: int, name: str, batch: Batch, *at: int, data: object) -> None:
        place = self.place(to, name, batch, *at)
        self.world.store(self.number, place, (data, batch.epoch))

    def line(self, name: str, batch: Batch, *at: int) -> object:
        return self.world.line(self.place(self.number, name, batch, *at), batch.epoch)

    def await_line(self, name: str, batch: Batch, *at: int) -> Generator[bool, None, object]:
        """Return the content of a line after its arrival, from the look that found it."""
        while (data := self.line(name, batch, *at)) is None:
            yield False
        yield True
        return data

    def _heard(self, batch: Batch) -> list[int]:
        """The ranks whose header lines come."""
        if self.world.rules.empty_ranks_send_headers:
            return list(self.all_ranks)
        return [rank for rank in self.all_ranks if not batch.is_silent(self.number, rank)]

    # The methods below are the kernels of the model.

    def send_dispatch(self, batch: Batch) -> list[Program]:
        targets, arrivals = batch.targets[self.number], [0]

        def credited() -> Program:
            def has_come() -> bool:
                for rank in self.all_ranks:
                    place = self.place(self.number, "combined", batch, rank)
                    _, flag = self.world.memory.get(place, (None, 0))  # pyright: ignore[reportGeneralTypeIssues]
                    ahead = flag - (batch.epoch - 1)
                    if ahead < 0 or (ahead > 0 and not self.world.rules.credit_may_be_ahead):
                        return False
                return True

            if self.world.rules.awaits_credit:
                yield from await_that(has_come)

        def head(peer: int) -> Program:
            yield from credited()
            data = (batch.in_lines(self.number), len(targets))
            self.store_line(peer, "header", batch, self.number, data=data)
            yield True

        def send(token: int) -> Program:
            yield from credited()
            for rank in self.all_ranks:
                chosen = rank in targets[token]
                at = (self.number, token)
                for word in range(WORDS if chosen else 0):
                    data = (batch.number, *at, word)
                    if batch.in_lines(self.number):
                        self.store_line(rank, "row line", batch, *at, word, data=data)
                    else:
                        place = self.place(rank, "row", batch, *at, word)
                        self.world.store(self.number, place, data)
                    yield True
                self.store_line(rank, "metadata line", batch, *at, data=(chosen,))
                yield True
            if not batch.in_lines(self.number):
                yield from self._publish(batch, "rows", arrivals, len(targets), self.all_ranks)

        heads = [
            head(peer)
            for peer in self.all_ranks
            if targets or self.world.rules.empty_ranks_send_headers
        ]
        return heads + [send(token) for token in range(len(targets))]

    def _publish(
        self,
        batch: Batch,
        name: str,
        arrivals: list[int],
        expected: int,
        ranks: range | list[int],
        *at: int,
    ) -> Program:
        arrivals[0] += 1
        if arrivals[0] == expected:
            self.world.release(self.number)
            for rank in ranks:
                self.store_line(rank, name, batch, self.number, *at, data=True)
                yield True

    def receive_dispatch(self, batch: Batch) -> list[Program]:
        found: dict[tuple[int, int], bool] = {}
        self.received[batch.number] = found

        def receive(source: int) -> Program:
            if source not in self._heard(batch):
                return
            header = yield from self.await_line("header", batch, source)
            in_lines, num_tokens = header  # pyright: ignore[reportGeneralTypeIssues]
            if not in_lines and num_tokens:
                yield from self.await_line("rows", batch, source)
            for token in range(num_tokens):
                at = (source, token)
                (chosen,) = yield from self.await_line("metadata line", batch, *at)  # pyright: ignore[reportGeneralTypeIssues]
                found[at] = bool(chosen)
                if in_lines and chosen:
                    yield from self._unpack(batch, *at)
                yield True

        return [receive(source) for source in self.all_ranks]

    def _unpack(self, batch: Batch, source: int, token: int) -> Program:
        for word in range(WORDS):
            where = (source, token, word)
            data = self.line("row line", batch, *where)
            if self.world.rules.polls_every_line or not word:
                data = yield from self.await_line("row line", batch, *where)
            # Data in its own memory is present immediately.
            self.world.memory[self.place(self.number, "row", batch, *where)] = data
            yield True

    def send_combine(self, batch: Batch) -> list[Program]:
        """Experts read rows where they lie, and their sums go home."""
        found = self.received.pop(batch.number)
        wanted = {
            (source, token): self.number in ranks
            for source in self.all_ranks
            for token, ranks in enumerate(batch.targets[source])
        }
        if found != wanted:
            raise BrokenError(f"batch {batch.number}: {found} came, not {wanted}")

        def send(source: int, token: int) -> Program:
            at = (source, token)
            for word in range(WORDS):
                value = self.world.memory.get(self.place(self.number, "row", batch, *at, word))
                if value != (batch.number, *at, word):
                    raise BrokenError(f"batch {batch.number} reads {value} at {at}, word {word}")
                yield True
            for word in range(WORDS):
                data = (batch.number, self.number, token, word)
                where = (self.number, token, word)
                if batch.in_lines(source):
                    self.store_line(source, "sum line", batch, *where, data=data)
                else:
                    self.world.store(self.number, self.place(source, "sum", batch, *where), data)
                yield True

        def send_of_chunk(chunk: int, arrivals: list[int], items: list[tuple[int, int]]) -> Program:
            for source, token in items:
                if found[source, token]:
                    yield from send(source, token)
            # Whoever has as many tokens awaits the chunk, whether or not it has sums of this rank.
            told = [r for r in bulk if len(batch.targets[r]) > chunk * CHUNK_TOKENS]
            yield from self._publish(batch, "sums", arrivals, 2, told, chunk)

        bulk = [rank for rank in self.all_ranks if not batch.in_lines(rank)]
        most = max((len(batch.targets[rank]) for rank in bulk), default=0)
        programs = [self._credit(batch, rank) for rank in self._heard(batch)]
        programs += [send(*at) for at, chosen in found.items() if chosen and batch.in_lines(at[0])]
        for chunk in range(-(-most // CHUNK_TOKENS)):
            items = [
                (source, token)
                for source, token in found
                if source in bulk and token // CHUNK_TOKENS == chunk
            ]
            arrivals = [0]
            programs += [send_of_chunk(chunk, arrivals, items[half::2]) for half in range(2)]
        return programs

    def _credit(self, batch: Batch, rank: int) -> Program:
        self.store_line(rank, "combined", batch, self.number, data=True)
        yield True

    def release_buffer(self, batch: Batch) -> list[Program]:
        return [self._credit(batch, rank) for rank in self._heard(batch)]

    def receive_combine(self, batch: Batch) -> list[Program]:
        in_lines, rules = batch.in_lines(self.number), self.world.rules

        def receive(token: int) -> Program:
            for rank in self.all_ranks:
                if in_lines or rules.bulk_polls_credits:
                    yield from self.await_line("combined", batch, rank)
                elif self.line("combined", batch, rank) is None:
                    raise BrokenError(f"batch {batch.number}: rank {rank} may have refused")
                if not in_lines and rules.bulk_awaits_signals:
                    chunk = token // CHUNK_TOKENS if rules.bulk_awaits_all_chunks else 0
                    yield from self.await_line("sums", batch, rank, chunk)
                for word in range(WORDS if rank in batch.targets[self.number][token] else 0):
                    where = (rank, token, word)
                    if in_lines:
                        value = yield from self.await_line("sum line", batch, *where)
                    else:
                        value = self.world.memory.get(self.place(self.number, "sum", batch, *where))
                    if value != (batch.number, *where):
                        raise BrokenError(f"batch {batch.number} reads the sum {value}")
                    yield True

        def hear() -> Program:
            for rank in self._heard(batch):
                yield from self.await_line("combined", batch, rank)

        return [hear(), *(receive(token) for token in range(len(batch.targets[self.number])))]

    def kernels(self, batches: list[Batch], num_buffers: int) -> Iterator[Kernel]:
        """The kernels of this rank, in the order of its stream."""
        for batch in batches:
            before = batch.number - num_buffers
            if before >= 0 and not batches[before].is_combined:
                yield Kernel(partial(self.release_buffer, batches[before]))
            yield Kernel(partial(self.send_dispatch, batch))
            yield Kernel(partial(self.receive_dispatch, batch), begins_early=True)
            if batch.is_combined:
                yield Kernel(partial(self.send_combine, batch))
                yield Kernel(partial(self.receive_combine, batch), begins_early=True)


def make_batches(chance: random.Random, size: int, count: int, num_buffers: int) -> list[Batch]:
    """Make batches of ranks with no, few and many tokens, each sent to any ranks."""

    def tokens() -> tuple[frozenset[int], ...]:
        number = chance.choice((0, 0, 1, LINE_TOKENS, LINE_TOKENS + 1, LINE_TOKENS + 2))
        return tuple(
            frozenset(rank for rank in range(size) if chance.random() < 0.5) for _ in range(number)
        )

    return [
        Batch(
            number=number,
            buffer=number % num_buffers,
            epoch=number // num_buffers + 1,
            targets=tuple(tokens() for _ in range(size)),
            is_combined=chance.random() < 0.8,
        )
        for number in range(count)
    ]


def run(seed: int, rules: Rules) -> None:
    """Run batches to the end in one schedule.

    Raises:
        BrokenError: a rank reads data of another batch, or no program can continue.
    """
    chance = random.Random(seed)
    size, num_buffers = chance.choice((2, 2, 3, 4)), chance.choice((1, 1, 2))
    batches = make_batches(chance, size, 4 * num_buffers, num_buffers)
    world = World(size=size, rules=rules)
    streams = [Rank(world=world, number=n).kernels(batches, num_buffers) for n in range(size)]
    following = [next(stream, None) for stream in streams]
    # Running programs of each rank, and the probability that each is chosen: some are very slow.
    running: list[list[tuple[Program, float]]] = [[] for _ in range(size)]
    delay, num_idle = chance.choice((0.05, 0.5, 0.9)), 0
    while any(running) or any(following):
        rank, kernel = (number := chance.randrange(size)), following[number]
        if kernel is not None and (kernel.begins_early or not running[rank]):
            running[rank] += [(each, chance.choice((0.03, 1, 1))) for each in kernel.programs()]
            following[rank] = next(streams[rank], None)
        if world.under_way and chance.random() > delay:
            world.arrive(chance.choice(list(world.under_way)))
            num_idle = 0
        if running[rank]:
            place = chance.randrange(len(running[rank]))
            program, speed = running[rank][place]
            if chance.random() < speed:
                num_idle += advance(running[rank], place, program)
        if num_idle > _PATIENCE:
            num_idle = 0
            look_at_all(world, running, following)


def advance(running: list[tuple[Program, float]], place: int, program: Program) -> bool:
    """Run a program for a step, and return whether its look found nothing."""
    found = next(program, None)
    if found is None:
        running.pop(place)
    return found is False


def look_at_all(
    world: World, running: list[list[tuple[Program, float]]], following: list[Kernel | None]
) -> None:
    """Find out whether any program can continue."""
    can_go_on = bool(world.under_way)
    for programs, kernel in zip(running, following, strict=True):
        can_go_on |= kernel is not None and not programs
        for place in reversed(range(len(programs))):
            can_go_on |= not advance(programs, place, programs[place][0])
    if not can_go_on:
        raise BrokenError("nobody can go on")


RULES = Rules()
# Variants of the protocol that each lack one rule.
FAULTY = {
    "flags of any batch": replace(RULES, compares_flags=False),
    "no credit": replace(RULES, awaits_credit=False),
    "a credit that came early is missed": replace(RULES, credit_may_be_ahead=False),
    "ranks without rows are silent": replace(RULES, empty_ranks_send_headers=False),
    "one line stands for its row": replace(RULES, polls_every_line=False),
    "signals without a release": replace(RULES, releases=False),
    "sums in bulk without a signal": replace(RULES, bulk_awaits_signals=False),
    "the first chunk stands for all": replace(RULES, bulk_awaits_all_chunks=False),
    "a signal of sums stands for the credit": replace(RULES, bulk_polls_credits=False),
}


def run_all(seeds: range, rules: Rules) -> None:
    for seed in seeds:
        run(seed, rules)


def test_every_schedule_ends_and_reads_what_was_sent() -> None:
    run_all(range(40), RULES)


@pytest.mark.parametrize("name", FAULTY)
def test_no_rule_may_be_left_out(name: str) -> None:
    with pytest.raises(BrokenError):
        run_all(range(300), FAULTY[name])
