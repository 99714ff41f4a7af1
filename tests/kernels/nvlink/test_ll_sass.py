"""The NVLink kernels compiled for sm_90 without a GPU: wide stores, fences, acquires, no spills."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
from tests.kernels.nvlink.sass import (
    ADD_TO_PEERS,
    Compiled,
    acquires_of,
    check_acquire,
    check_no_spills,
    check_release,
    compiled_by,
    operations,
)

pytestmark = pytest.mark.slow

# What each kernel does: store rows to peers, publish, wait.
STORES = {
    "send dispatch bf16": 32,
    "send dispatch fp8": 16,
    "send dispatch int8": 16,
    "send dispatch odd": 6,
    "send combine": 4,
    "receive combine": 2,
    "pack rows": 16,
}
PUBLISHERS = [name for name in STORES if name.startswith("send")] + ["release buffer", "barrier"]
WAITERS = [
    *(name for name in STORES if name not in ("send combine", "pack rows")),
    "receive dispatch",
    "receive dispatch masked",
    "barrier",
]
VARIANTS = {*STORES, *PUBLISHERS, *WAITERS}


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
    assert not {"STG.E.U16", "STG.E.64"} & (set(found) - _report_stores(variant))
    assert any(name.startswith("LDG.E.128") for name in found)


def _report_stores(variant: str) -> set[str]:
    """Two faults of 32 bits, widened, are one store of 64."""
    return {"STG.E.64"} if variant == "receive combine" else set()


@pytest.mark.parametrize("variant", PUBLISHERS)
def test_words_are_added_after_a_barrier_and_a_fence(variant: str, compiled: Compiled) -> None:
    found = operations(compiled[variant]["sass"])
    # One instruction for all peers.
    assert found.count(ADD_TO_PEERS) == 1
    # No row is stored between the barrier and the word.
    check_release(found, found.index(ADD_TO_PEERS))


@pytest.mark.parametrize("variant", WAITERS)
def test_waits_acquire_before_anything_is_read(variant: str, compiled: Compiled) -> None:
    found = operations(compiled[variant]["sass"])
    acquires = acquires_of(found)
    # A receiver of dispatch awaits metadata, then rows. Who is missing is looked up once more.
    num_waits = 2 if variant.startswith("receive dispatch") else 1
    assert len(acquires) == 2 * num_waits
    for acquire in acquires:
        check_acquire(found, acquire)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_nothing_is_spilled(variant: str, compiled: Compiled) -> None:
    check_no_spills(compiled[variant])
