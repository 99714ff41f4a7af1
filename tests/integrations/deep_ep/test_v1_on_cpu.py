"""Properties of a Buffer of V1 on CPU ranks only: MPI, its files, and the end of a program."""

import gc
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from epcomm.integrations.deep_ep import Buffer
from tests.integrations.deep_ep.test_v1_calls import Batch
from tests.integrations.deep_ep.v1_ranks import world

if TYPE_CHECKING:
    from mpi4py import MPI

# Seconds: ranks import torch on a loaded machine.
LIMIT_S = 120


@pytest.mark.mpi_ranks(2)
def test_ranks_of_mpi(ep_ranks: "MPI.Comm") -> None:
    buffer = Buffer(None, comm=ep_ranks)
    batch = Batch(buffer.rank, (16, 2, 4))
    rows, _, handle, num_ranks = batch.dispatch(buffer)
    y, _, _ = buffer.combine(rows, handle)
    assert torch.equal(y, batch.x * num_ranks)


@pytest.mark.ranks(2)
def test_dropped_buffers_leave_no_files_open() -> None:
    batch = Batch(world().rank(), (32, 2, 4))
    batch.dispatch(Buffer(world()))
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(4):
        batch.dispatch(Buffer(world()))
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


PROGRAM = """
import torch
import torch.distributed as dist
from epcomm.integrations.deep_ep import Buffer

dist.init_process_group("gloo")
buffer = Buffer(dist.group.WORLD, low_latency_mode=True)
x, ids = torch.ones(2, 32).bfloat16(), torch.tensor([[0, 1], [2, 3]])
buffer.low_latency_dispatch(x, ids, 4, 4, use_fp8=False)
"""


@pytest.mark.slow
def test_a_program_that_destroys_nothing_ends(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, "utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(program)], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
