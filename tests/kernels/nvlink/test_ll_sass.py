"""The NVLink kernels compiled for sm_90 without a GPU: wide stores, fences, acquires, no spills."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")
from tests.kernels.nvlink.sass import (
    ADD_TO_PEERS,
    EXCHANGE,
    Compiled,
    acquires_of,
    check_acquire,
    check_no_spills,
    check_release,
    compiled_by,
    operations,
    places_of,
)

pytestmark = pytest.mark.slow

# What each kernel does: store rows to peers, publish, wait.
STORES = {
    "send dispatch bf16": 32,
    "send dispatch fp8": 16,
    "send dispatch int8": 16,
    "send dispatch odd": 6,
    # One of them is a sum in lines.
    "send combine": 5,
    "send dispatch words": 16,
    # Of eight slots, in two parts, and in lines.
    "send combine slots": 24,
    "receive combine": 2,
    "receive combine slots": 2,
}
# Stores of two lines to peers, or to the place of the row, and how many loads wait for two lines.
LINES = {
    "send lines bf16": (16, 0),
    "send lines fp8": (8, 0),
    "send lines int8": (8, 0),
    "send lines words": (8, 0),
    # A line from each of eight ranks, or of each of eight slots.
    "receive combine lines": (0, 8),
    "receive combine lines slots": (0, 8),
}
PUBLISHERS = [name for name in STORES if name.startswith("send")]
WAITERS = [
    "receive combine",
    "receive combine slots",
    "receive dispatch",
    "receive dispatch masked",
    "barrier",
]
VARIANTS = {*STORES, *LINES, *PUBLISHERS, *WAITERS, "release buffer"}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return compiled_by("ll_sass_of.py", tmp_path_factory.mktemp("triton"))


def test_all_variants_are_looked_at(compiled: Compiled) -> None:
    assert set(compiled) == VARIANTS


@pytest.mark.parametrize("variant", STORES)
def test_rows_are_stored_16_bytes_at_a_time(variant: str, compiled: Compiled) -> None:
    found = operations(compiled[variant]["sass"])
    assert found.count("STG.E.128") == STORES[variant]
    # What the byte by byte stores of an address without alignment would be.
    assert "STG.E.U16" not in found
    # A header, its counts, or two faults of 32 bits, widened; of dispatch, the credit of a replay.
    assert found.count("STG.E.64") <= (3 if "dispatch" in variant else 2)
    assert any(name.startswith("LDG.E.128") for name in found)


@pytest.mark.parametrize("variant", LINES)
def test_lines_travel_two_at_a_time_without_a_fence(variant: str, compiled: Compiled) -> None:
    found = operations(compiled[variant]["sass"])
    stores, loads = LINES[variant]
    assert found.count("STG.E.128") == stores
    assert found.count("LDG.E.128.STRONG.SYS") == loads
    # Whoever gives up tells all, and that is all that is released; nothing is acquired.
    assert sum(name.startswith("MEMBAR") for name in found) == found.count(EXCHANGE) == 1
    assert "CCTL.IVALL" not in found


def test_release_of_a_buffer_needs_no_fence(compiled: Compiled) -> None:
    found = operations(compiled["release buffer"]["sass"])
    assert found.count("STG.E.64") == 1
    assert not any(name.startswith("MEMBAR") for name in found)


def test_rows_in_lines_are_polled_and_unpacked_at_once(compiled: Compiled) -> None:
    found = operations(compiled["receive dispatch"]["sass"])
    # Once, and stored as loaded: not loaded again.
    polled = found.index("LDG.E.128.STRONG.SYS")
    assert "LDG.E" not in found[polled : found.index("STG.E.64", polled)]


@pytest.mark.parametrize("variant", ["receive dispatch", "receive dispatch masked"])
def test_a_look_at_a_row_loads_each_line_once(variant: str, compiled: Compiled) -> None:
    """A line that is loaded twice, for its flag and for its word, may come between the loads."""
    loads = re.findall(r"%([a-z_]+?)_?\d* = tt\.load .*isVolatile", compiled[variant]["ttgir"])
    begin = loads.index("experts")
    look = loads[begin : loads.index("aborted", begin)]
    # What is loaded behind the look, when nothing changes any more, has other names.
    look = [name for name in look if name not in ("local_ids", "places")]
    assert look == ["experts", "lines", "positions"][: 2 + (variant == "receive dispatch masked")]


@pytest.mark.parametrize("variant", PUBLISHERS)
def test_signals_are_set_after_a_barrier_and_a_fence(variant: str, compiled: Compiled) -> None:
    found = operations(compiled[variant]["sass"])
    released = places_of(EXCHANGE, found)
    # One instruction for all peers: of metadata, of rows, and when senders of dispatch give up.
    assert len(released) == (1 if variant.startswith("send combine") else 3)
    # No row is stored between the barrier and the word.
    for word in released:
        check_release(found, word)


def test_barrier_adds_after_a_fence(compiled: Compiled) -> None:
    found = operations(compiled["barrier"]["sass"])
    assert found.count(ADD_TO_PEERS) == 1
    check_release(found, found.index(ADD_TO_PEERS))


@pytest.mark.parametrize("variant", WAITERS)
def test_waits_acquire_before_anything_is_read(variant: str, compiled: Compiled) -> None:
    found = operations(compiled[variant]["sass"])
    acquires = acquires_of(found)
    # A receiver of dispatch awaits metadata, then rows; before that, those that it copies to slabs.
    # Who is missing is looked up once more.
    num_waits = {"receive dispatch": 2, "receive dispatch masked": 3}.get(variant, 1)
    assert len(acquires) == 2 * num_waits
    for acquire in acquires:
        check_acquire(found, acquire)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_nothing_is_spilled(variant: str, compiled: Compiled) -> None:
    check_no_spills(compiled[variant])
