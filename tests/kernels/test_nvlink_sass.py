"""The NVLink kernels compiled for sm_90 without a GPU: wide stores, fences, acquires, no spills."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("triton")

# What each kernel does: store rows to peers, publish, wait.
STORES = {
    "send dispatch bf16": 16,
    "send dispatch fp8": 8,
    "send dispatch int8": 8,
    "send dispatch odd": 3,
    "send combine": 2,
    "receive combine": 2,
    "pack rows": 16,
}
PUBLISHERS = [name for name in STORES if name.startswith("send")] + ["release slot", "meet"]
WAITERS = [
    *(name for name in STORES if name not in ("send combine", "pack rows")),
    "receive dispatch",
    "receive dispatch masked",
    "meet",
]
VARIANTS = {*STORES, *PUBLISHERS, *WAITERS}
REPOSITORY = Path(__file__).parents[2]

ADD_TO_PEERS = "REDG.E.ADD.STRONG.SYS"
ACQUIRE = "ATOMG.E.ADD.STRONG.SYS"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, str]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "PYTHONPATH": str(REPOSITORY),
    }
    program = Path(__file__).with_name("nvlink_sass_of.py")
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def operations(sass: str) -> list[str]:
    """Of memory and barriers, in the order of the code."""
    return re.findall(
        r"\b((?:STG|LDG|REDG|ATOMG|MEMBAR|CCTL|BAR|STL|LDL)\.[A-Z0-9_.]+|STL|LDL)\b", sass
    )


def test_all_variants_are_looked_at(compiled: Mapping[str, Mapping[str, str]]) -> None:
    assert set(compiled) == VARIANTS


@pytest.mark.parametrize("variant", STORES)
def test_rows_are_stored_16_bytes_at_a_time(
    variant: str, compiled: Mapping[str, Mapping[str, str]]
) -> None:
    found = operations(compiled[variant]["sass"])
    assert found.count("STG.E.128") == STORES[variant]
    # What the byte by byte stores of an address without alignment would be.
    assert not {"STG.E.U16", "STG.E.64"} & (set(found) - _report_stores(variant))
    assert any(name.startswith("LDG.E.128") for name in found)


def _report_stores(variant: str) -> set[str]:
    """Two faults of 32 bits, widened, are one store of 64."""
    return {"STG.E.64"} if variant == "receive combine" else set()


@pytest.mark.parametrize("variant", PUBLISHERS)
def test_words_are_added_after_a_barrier_and_a_fence(
    variant: str, compiled: Mapping[str, Mapping[str, str]]
) -> None:
    found = operations(compiled[variant]["sass"])
    # One instruction for all peers.
    assert found.count(ADD_TO_PEERS) == 1
    before = found[: found.index(ADD_TO_PEERS)]
    barrier = len(before) - before[::-1].index("BAR.SYNC.DEFER_BLOCKING")
    assert "MEMBAR.ALL.SYS" in before[barrier:]
    fence = len(before) - before[::-1].index("MEMBAR.ALL.SYS")
    # No row is stored between the barrier and the word.
    assert not [name for name in before[barrier:] if name.startswith("STG")]
    assert before[fence:] == []


@pytest.mark.parametrize("variant", WAITERS)
def test_waits_acquire_before_anything_is_read(
    variant: str, compiled: Mapping[str, Mapping[str, str]]
) -> None:
    found = operations(compiled[variant]["sass"])
    assert found.count(ACQUIRE) == 1, "its value is used, or it would be deleted"
    acquire = found.index(ACQUIRE)
    assert found[acquire + 1] == "CCTL.IVALL"
    # The poll comes first, and all other threads wait before they load.
    assert "LDG.E.STRONG.SYS" in found[:acquire]
    after = found[acquire + 2 :]
    loads = [place for place, name in enumerate(after) if name.startswith("LDG")]
    assert after.index("BAR.SYNC.DEFER_BLOCKING") < loads[0]


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_nothing_is_spilled(variant: str, compiled: Mapping[str, Mapping[str, str]]) -> None:
    assert "0 bytes spill stores, 0 bytes spill loads" in compiled[variant]["ptxas"]
    assert not {"STL", "LDL"} & {name[:3] for name in operations(compiled[variant]["sass"])}
