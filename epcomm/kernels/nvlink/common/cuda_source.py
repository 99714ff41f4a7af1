"""The source of kernels in CUDA C++: constants, then files, peers.cu first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from epcomm import protocol
from epcomm.kernels.nvlink.common.signals import LOOKS_PER_TICK, POLL_BITS

_PEERS = Path(__file__).with_name("peers.cu")
_NUMBERS_OF_PEERS = {
    "REPORT_WAIT": protocol.REPORT_WAIT,
    "REPORT_EPOCH": protocol.REPORT_EPOCH,
    "REPORT_ABORTED": protocol.REPORT_ABORTED,
    "REPORT_MISSING": protocol.REPORT_MISSING,
    "MISSING_SHIFT": protocol.MISSING_SHIFT,
    "MAX_MISSING": protocol.MAX_MISSING,
    "LOOKS_PER_TICK": LOOKS_PER_TICK,
    "POLL_BITS": POLL_BITS,
}


def source_of(constants: Mapping[str, int], files: Sequence[Path]) -> str:
    """Return the source of a program: its constants, those of peers.cu, peers.cu and its files."""
    lines = [
        f"#define {name} {value}LL" if value >= 2**31 else f"#define {name} {value}"
        for name, value in {**constants, **_NUMBERS_OF_PEERS}.items()
    ]
    return "\n".join([*lines, *(each.read_text(encoding="utf-8") for each in (_PEERS, *files))])
