"""Properties of a Buffer of V1 on CPU ranks only: MPI, and its files."""

import gc
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from epcomm.integrations.deep_ep import Buffer
from tests.integrations.deep_ep.test_v1_calls import Batch
from tests.integrations.deep_ep.v1_ranks import world

if TYPE_CHECKING:
    from mpi4py import MPI


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
