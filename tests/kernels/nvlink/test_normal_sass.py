"""The kernels of normal mode over NVLink compiled for sm_90 without a GPU.

Wide stores, fences, acquires, copies that no thread waits for, and no spills.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

pytest.importorskip("triton")
from tests.kernels.nvlink.sass import (
    ADD_TO_PEERS,
    BARRIER,
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


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Operations of a variant.

    stores: of 16 bytes of a row, each thread, for all peers.   adds: to a word of every rank.
    exchanges: to give up, and of an item.   acquires: of words that other ranks write.
    local: words that this rank's own programs release.
    """

    stores: int = 0
    adds: int = 0
    exchanges: int = 1
    acquires: int = 1
    local: int = 0


# A row of [2, 4096] words is four stores of a thread, to each of eight ranks; it is begun, headed
# and pushed; three waits may give up, one of them for its own programs. Planning and the end have a
# word of this rank each.
VARIANTS = {
    "push bf16": Expected(stores=8 * 4, adds=3, exchanges=3, acquires=2, local=2),
    "push fp8": Expected(stores=2 * 2, adds=3, exchanges=3, acquires=2, local=2),
    "push odd": Expected(stores=3 * 2, adds=3, exchanges=3, acquires=2, local=2),
    "push again": Expected(stores=2 * 4, adds=3, local=1),
    "index": Expected(),
    "index budget": Expected(),
    "collect": Expected(stores=8),
    # Senders and reducers store two each; both ends of what a reducer waits for are acquired.
    "combine": Expected(stores=2 + 2, adds=1, exchanges=3, acquires=3, local=1),
    "combine odd": Expected(stores=2 + 2, adds=1, exchanges=3, acquires=3, local=1),
    "combine backward": Expected(stores=2 + 2, adds=1, exchanges=3, acquires=3, local=1),
}
MOVERS = [name for name, expected in VARIANTS.items() if expected.stores]
PUSHES = [name for name in VARIANTS if name.startswith("push")]
COMBINES = [name for name in VARIANTS if name.startswith("combine")]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return compiled_by("normal_sass_of.py", tmp_path_factory.mktemp("triton"))


def test_all_variants_are_looked_at(compiled: Compiled) -> None:
    assert set(compiled) == set(VARIANTS)


@pytest.mark.parametrize("variant", MOVERS)
def test_rows_are_moved_16_bytes_at_a_time(variant: str, compiled: Compiled) -> None:
    found = operations(compiled[variant]["sass"])
    assert found.count("STG.E.128") == VARIANTS[variant].stores
    # What the byte by byte stores of an address without alignment would be.
    assert not {"STG.E.U8", "STG.E.U16"} & set(found)
    assert not {"LDG.E.U8", "LDG.E.U16"} & set(found)
    assert "LDG.E.128" in found


@pytest.mark.parametrize("variant", VARIANTS)
def test_words_are_added_after_a_barrier_and_a_fence(variant: str, compiled: Compiled) -> None:
    found = operations(compiled[variant]["sass"])
    adds = places_of(ADD_TO_PEERS, found)
    # One instruction for all peers.
    assert len(adds) == VARIANTS[variant].adds
    for place in adds:
        check_release(found, place)


@pytest.mark.parametrize("variant", VARIANTS)
def test_words_are_exchanged_after_a_barrier_and_a_fence(variant: str, compiled: Compiled) -> None:
    found = operations(compiled[variant]["sass"])
    exchanges = places_of(EXCHANGE, found)
    assert len(exchanges) == VARIANTS[variant].exchanges
    for place in exchanges:
        check_release(found, place)
    # No other fence of the system: a release of every word would take as many.
    assert found.count("MEMBAR.ALL.SYS") == len(exchanges) + VARIANTS[variant].adds


@pytest.mark.parametrize("variant", VARIANTS)
def test_waits_acquire_before_anything_is_read(variant: str, compiled: Compiled) -> None:
    found = operations(compiled[variant]["sass"])
    acquires = acquires_of(found)
    # Who is missing is looked up once more.
    assert len(acquires) == 2 * VARIANTS[variant].acquires
    for place in acquires:
        check_acquire(found, place)


@pytest.mark.parametrize("variant", PUSHES + COMBINES)
def test_programs_of_a_rank_hear_of_one_another(variant: str, compiled: Compiled) -> None:
    found = operations(compiled[variant]["sass"])
    places = places_of("MEMBAR.ALL.GPU", found)
    assert len(places) == VARIANTS[variant].local
    for place in places:
        check_release(found, place + 1, scope="GPU")
    # Who leaves last has acquired what all have left.
    adds = places_of("ATOMG.E.ADD.STRONG.GPU", found)
    assert adds[-1] == places[-1] + 1
    for place in adds:
        check_acquire(found, place)


@pytest.mark.parametrize("variant", COMBINES)
def test_sums_are_announced_item_by_item(variant: str, compiled: Compiled) -> None:
    found = operations(compiled[variant]["sass"])
    # An item tells one rank, whose address is known; to give up, addresses of all are loaded.
    items = [
        place
        for place in places_of(EXCHANGE, found)
        if found[place - 2 : place] == [BARRIER, "MEMBAR.ALL.SYS"]
    ]
    assert len(items) == 1
    # The sums of a sender come before it, those of a reducer behind it.
    assert found[: items[0]].count("STG.E.128") == 2


@pytest.mark.parametrize("variant", COMBINES)
def test_senders_load_behind_the_backs_of_their_threads(variant: str, compiled: Compiled) -> None:
    found = operations(compiled[variant]["sass"])
    copies = [name for name in found if name.startswith("LDGSTS")]
    # Three slots, two copies each, two stages ahead and one in the loop.
    assert copies == ["LDGSTS.E.BYPASS.128"] * (3 * 2 * 3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_is_spilled(variant: str, compiled: Compiled) -> None:
    check_no_spills(compiled[variant])
