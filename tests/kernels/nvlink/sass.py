"""Read from machine code what kernels compiled for a GPU that is not here do with memory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from tests.kernels import compiling

# Of each variant: "ptx", "ptxas" (what it says of registers and spills) and "sass".
Compiled = Mapping[str, Mapping[str, str]]

ADD_TO_PEERS = "REDG.E.ADD.STRONG.SYS"
EXCHANGE = "ATOMG.E.EXCH.STRONG.SYS"
# A load that acquires is one of these before this.
ACQUIRED, DROP_L1 = "LDG.E.STRONG", "CCTL.IVALL"
BARRIER = "BAR.SYNC.DEFER_BLOCKING"


def compiled_by(program: str, cache: Path) -> Compiled:
    """Return what a program of this folder prints."""
    return compiling.compiled_by(Path(__file__).with_name(program), cache)


def operations(sass: str) -> list[str]:
    """Of memory and barriers, in the order of the code."""
    return re.findall(
        r"\b((?:STG|LDGSTS|LDG|REDG|ATOMG|MEMBAR|CCTL|BAR|STL|LDL)\.[A-Z0-9_.]+|STL|LDL)\b", sass
    )


def places_of(name: str, found: Sequence[str]) -> list[int]:
    return [place for place, each in enumerate(found) if each == name]


def check_release(found: Sequence[str], word: int, *, scope: str = "SYS") -> None:
    """A word follows a barrier and its fence, and nothing is stored in between."""
    before = found[:word]
    since_barrier = before[len(before) - before[::-1].index(BARRIER) :]
    # Addresses of peers may be loaded before the fence.
    assert since_barrier[-1] == f"MEMBAR.ALL.{scope}"
    assert all(name.startswith("LDG.") for name in since_barrier[:-1])


def acquires_of(found: Sequence[str], *, scope: str = "SYS") -> list[int]:
    """The loads that acquire, each where the L1 cache is dropped behind it."""
    wanted = (f"{ACQUIRED}.{scope}", DROP_L1)
    return [place for place, pair in enumerate(pairwise(found)) if pair == wanted]


def check_acquire(found: Sequence[str], place: int) -> None:
    """The L1 cache is dropped, and all threads wait before any loads but of signals."""
    assert found[place + 1] == DROP_L1
    after = found[place + 2 :]
    loads = [n for n, name in enumerate(after) if name.startswith("LDG") and "STRONG" not in name]
    assert after.index(BARRIER) < min(loads, default=len(after))


def check_no_spills(variant: Mapping[str, str]) -> None:
    assert "0 bytes spill stores, 0 bytes spill loads" in variant["ptxas"]
    assert not {"STL", "LDL"} & {name[:3] for name in operations(variant["sass"])}
