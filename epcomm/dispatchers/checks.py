"""What a rank checks of its own call before it sends anything."""

from __future__ import annotations

import torch
from torch import Tensor

from epcomm.buffers.base import BufferSpec
from epcomm.errors import CapacityError, EPError, HandleError, ShapeError
from epcomm.records import RowsCombineInput, TopKOutput
from epcomm.types import RowsPer


def find_call_error(
    hidden_states: Tensor,
    topk: TopKOutput,
    spec: BufferSpec,
    dtype: torch.dtype,
    device: torch.device,
    where: str,
) -> EPError | None:
    """The first fault of a dispatch call, from shapes and dtypes alone: no host sync.

    where: `rank 3 of 8`, for the message.
    """
    num_tokens = hidden_states.shape[0] if hidden_states.dim() else 0
    pair = [num_tokens, spec.top_k]
    expected = (
        ("hidden_states", hidden_states, [num_tokens, spec.hidden_size], dtype),
        ("topk_ids", topk.topk_ids, pair, torch.int64),
        ("topk_weights", topk.topk_weights, pair, torch.float32),
    )
    for name, tensor, shape, wanted in expected:
        fault = _mismatch(name, tensor, shape, wanted, device)
        if fault is not None:
            return ShapeError(f"dispatch: {fault[0]} ({where}); {fault[1]}")
    limit = spec.max_tokens_per_rank
    if limit is not None and num_tokens > limit:
        return CapacityError(
            f"dispatch: hidden_states has {num_tokens} tokens, expected at most "
            f"max_tokens_per_rank = {limit} ({where}); raise the limit or split the batch"
        )
    return None


def find_combine_error(
    combine_input: RowsCombineInput,
    owner: object,
    spec: BufferSpec,
    dtype: torch.dtype,
    device: torch.device,
    where: str,
) -> EPError | None:
    """The first fault of a combine call: its kind, its handle, its rows. No host sync.

    owner: the dispatcher that was called.
    """
    if not isinstance(combine_input, RowsCombineInput):
        return ShapeError(
            f"combine: the input is a {type(combine_input).__name__}, expected RowsCombineInput "
            f"({where}); make it with combine_input() of the record that dispatch returned"
        )
    handle = combine_input.handle
    try:
        handle.check(owner)
    except HandleError as error:
        return error
    num_rows = handle.route.num_rows
    row_of_slot = handle.route.index.row_of_slot
    if combine_input.rows_per is RowsPer.SLOT and row_of_slot is not None:
        num_rows = row_of_slot.shape[0]
    rows = combine_input.hidden_states
    fault = _mismatch("hidden_states", rows, [num_rows, spec.hidden_size], dtype, device)
    return None if fault is None else ShapeError(f"combine: {fault[0]} ({where}); {fault[1]}")


def _mismatch(
    name: str, tensor: Tensor, shape: list[int], dtype: torch.dtype, device: torch.device
) -> tuple[str, str] | None:
    """What is wrong with a tensor, and the remedy; None if nothing is."""
    if list(tensor.shape) != shape:
        return f"{name} is {list(tensor.shape)}, expected {shape}", "pass tensors of one batch"
    if tensor.dtype != dtype:
        return f"{name} is {tensor.dtype}, expected {dtype}", f"call {name}.to({dtype})"
    if tensor.device != device:
        return (
            f"{name} is on {tensor.device}, expected {device}",
            f"call {name}.to({str(device)!r})",
        )
    return None
