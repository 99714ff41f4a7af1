"""Run the kernels of normal mode under ThreadSanitizer; see test_normal_races.py.

LD_PRELOAD names its library, which must be loaded before Python's threads begin.
"""

from __future__ import annotations

import sys

import torch

from epcomm.kernels.nvlink.normal import program
from epcomm.kernels.nvlink.normal.program import LoadedKernel, Program
from tests.kernels.nvlink import test_normal_protocol as protocol
from tests.kernels.nvlink.host_cuda import HostKernel, build, source_of

NUM_ROUNDS = 6


def main(old: str = "", new: str = "") -> str | None:
    """Run rounds with `new` in place of `old` in each source; return the errors."""

    def load(made: Program, device: torch.device) -> LoadedKernel:
        source = source_of(made)
        changed = source.replace(old, new) if old else source
        path = build(changed, "-fsanitize=thread", "-g", "-Wno-tsan")
        return HostKernel(made, path, options=("-DHOST_CUDA_WATCHED",))

    program.load_kernel = load
    for spec in (protocol.SPEC, protocol.QUANTIZED, protocol.SCALED_ROWS):
        if (wrong := protocol.first_wrong_round(protocol.NOTHING, NUM_ROUNDS, spec)) is not None:
            return f"round {wrong} is wrong"
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(*sys.argv[1:]))
