"""Ranks that call V1 with different shapes learn in what they differ, and the buffer serves on."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from epcomm.errors import ConfigError
from epcomm.integrations.deep_ep import Buffer
from tests.integrations.deep_ep.test_v1_calls import Batch, there_and_back
from tests.integrations.deep_ep.v1_ranks import world

Shape = tuple[int, int, int]
Call = Callable[[Buffer, Shape, torch.dtype], object]

# H, K and E.
USUAL = (64, 2, 4)
# Seconds from the call to the error.
LIMIT_S = 1.0


def dispatch(buffer: Buffer, shape: Shape, dtype: torch.dtype) -> object:
    batch = Batch(buffer.rank, shape)
    return batch.dispatch(buffer, batch.x.to(dtype))


def dispatch_low_latency(buffer: Buffer, shape: Shape, dtype: torch.dtype) -> object:
    batch = Batch(buffer.rank, shape)
    is_quantized = dtype is torch.float8_e4m3fn
    return buffer.low_latency_dispatch(
        batch.x, batch.ids, 16, batch.num_experts, use_fp8=is_quantized
    )


def check_serves(buffer: Buffer) -> None:
    batch = Batch(buffer.rank, USUAL)
    rows, _, handle, num_ranks = batch.dispatch(buffer)
    y, _, _ = buffer.combine(rows, handle)
    assert torch.equal(y, batch.x * num_ranks)
    assert torch.equal(there_and_back(buffer, batch, batch.x, batch.weights), batch.x)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("was_seen", [False, True])
@pytest.mark.parametrize(
    ("call", "shape", "dtype", "words"),
    [
        (dispatch, (32, 2, 4), torch.bfloat16, "hidden_size: 64 on rank 0, 32 on rank 1"),
        (dispatch, (64, 3, 4), torch.bfloat16, "top_k: 2 on rank 0, 3 on rank 1"),
        (dispatch, (64, 2, 8), torch.bfloat16, "num_local_experts: 2 on rank 0, 4 on rank 1"),
        (dispatch, USUAL, torch.float32, "dispatch_format: .*bf16.* rank 0, .*fp32.* rank 1"),
        (
            dispatch_low_latency,
            (32, 2, 4),
            torch.bfloat16,
            "hidden_size: 64 on rank 0, 32 on rank 1",
        ),
        (
            dispatch_low_latency,
            (64, 2, 8),
            torch.bfloat16,
            "num_local_experts: 2 on rank 0, 4 on rank 1",
        ),
        (
            dispatch_low_latency,
            USUAL,
            torch.float8_e4m3fn,
            "dispatch_format: .*bf16.* rank 0, .*fp8.* rank 1",
        ),
    ],
)
def test_ranks_that_disagree_on_a_later_shape(
    call: Call, shape: Shape, dtype: torch.dtype, words: str, was_seen: bool
) -> None:
    buffer = Buffer(world(), low_latency_mode=True)
    check_serves(buffer)
    if was_seen:
        call(buffer, shape, dtype)
        check_serves(buffer)
    given = (shape, dtype) if buffer.rank == 1 else (USUAL, torch.bfloat16)
    dist.barrier()
    began = time.perf_counter()
    with pytest.raises(ConfigError, match=f"ranks disagree on {words}"):
        call(buffer, *given)
    assert time.perf_counter() - began < LIMIT_S
    check_serves(buffer)
