"""Normal mode over NVLink returns a sum of each group of experts, bit-equal to the definition."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from epcomm import EPGroup, Mode
from epcomm.buffers.nvlink.normal import NVLinkBuffer, NVLinkStaticBuffer
from epcomm.buffers.nvlink.normal_row_budget import NVLinkRowBudgetBuffer
from epcomm.buffers.sizes import CallShape
from epcomm.calls.call import DispatchCall
from epcomm.dispatchers.autograd import Sending, combine_rows, dispatch_rows
from epcomm.kernels.nvlink.common.layout import SUM_FORMATS
from epcomm.ops.slots import dot_rows, gather_rows
from epcomm.protocol import BatchFlags
from epcomm.quantization import dequantize, quantize
from epcomm.records import Handle, RowsCombineInput
from epcomm.spec import BufferSpec
from epcomm.types import RowsPer, WireFormat, WireTensor
from tests.dispatchers.test_sum_groups import TOKENS, Batch, E, H, K, compute, expected

FP8, MXFP8, NVFP4 = SUM_FORMATS
# The format of gradients for each format of sums: another one, so that a mistake shows.
GRADIENTS = {None: None, FP8: MXFP8, MXFP8: FP8, NVFP4: FP8}
TRAINS = BatchFlags.GRAD_ENABLED | BatchFlags.INPUTS_NEED_GRAD | BatchFlags.EXPERTS_NEED_GRAD


def spec_of(world_size: int, groups: int | None, dtype: torch.dtype) -> BufferSpec:
    return BufferSpec(
        hidden_size=H,
        top_k=K,
        num_local_experts=E // world_size,
        dispatch_format=WireFormat.of(dtype),
        hidden_format=WireFormat.of(dtype),
        max_tokens_per_rank=TOKENS,
        # Experts have slots without a row, whose results are NaN.
        expert_alignment=4,
        sum_groups=groups,
    )


def open_with_nan(kind: type[NVLinkBuffer], group: EPGroup, spec: BufferSpec) -> NVLinkBuffer:
    """Open a buffer in which all rows that a rank might read are NaN before they are sent."""
    buffer = cast(Any, kind)(group.calls, spec)
    buffer.prepare()
    layout = buffer._layout
    begin = layout.offsets["returned"]
    buffer._block[begin : begin + layout.regions["returned"]] = 0xFF
    for rows in buffer.received_rows():
        rows.data.fill_(float("nan"))
    buffer._host_barrier()
    return buffer


def run(buffer: Any, batch: Batch, part: slice, rank: int, *, trains: bool) -> list[Tensor]:  # noqa: ANN401
    """Return y of some tokens, and with `trains` the gradients of x and of the router weights."""
    device, local = buffer._device, buffer._spec.num_local_experts
    x = batch.x[part].clone().to(device).requires_grad_(trains)
    weights = batch.weights[part].clone().to(device).requires_grad_(trains)
    call = DispatchCall(
        hidden_states=x,
        topk_ids=batch.ids[part].clone().to(device),
        topk_weights=weights,
        flags=TRAINS if trains else BatchFlags.NONE,
    )
    out = dispatch_rows(buffer, call)
    # Combine does not read the ids of the caller.
    call.topk_ids.fill_(-1)
    rows, slot_weights = out.rows, out.slot_weights
    if trains:
        sending = Sending(buffer=buffer, dtype=x.dtype)
        rows, slot_weights = sending.with_history(call, out, packs=True)
    else:
        rows = WireTensor(data=gather_rows(rows.data, out.index), format=rows.format)
    packed = SimpleNamespace(
        hidden_states=rows,
        index=replace(out.index, row_of_slot=None, slots_of_row=None),
        num_tokens_per_expert=out.index.num_tokens_per_expert,
    )
    handle = Handle(owner=buffer, num_tokens=len(x))
    handle.open(out.exchange_plan, call=1, needs_backward=trains)
    results = RowsCombineInput(
        hidden_states=compute(cast(Any, packed), batch.slope[rank * local :][:local].to(device)),
        rows_per=RowsPer.SLOT,
        slot_weights=slot_weights,
        handle=handle,
    )
    y = combine_rows(buffer, results, x.dtype)
    if not trains:
        return [y.cpu()]
    y.backward(batch.grad_y[part].to(device))
    return [y.detach().cpu(), x.grad.cpu(), weights.grad.cpu()]


def weight_gradients(batch: Batch, gradients: WireFormat | None, device: torch.device) -> Tensor:
    """Return the gradients of the router weights, of all entries of all ranks in one call."""
    results, grad_y = batch.x.unsqueeze(1) * batch.slope[batch.ids].unsqueeze(2), batch.grad_y
    if gradients is not None:
        grad_y = dequantize(quantize(grad_y, gradients), grad_y.dtype)
    of_results = grad_y.unsqueeze(1).expand_as(results)
    pairs = (each.flatten(0, 1).to(device) for each in (of_results, results))
    return dot_rows(*pairs).view_as(batch.weights).cpu().masked_fill(batch.ids < 0, 0.0)


def check_groups(
    kind: type[NVLinkBuffer],
    group: EPGroup,
    groups: int,
    dtype: torch.dtype,
    sums: WireFormat | None,
) -> None:
    """Compare sums and gradients with the oracle, and their bytes with those of a plan."""
    rank, world_size, batch = group.rank, group.world_size, Batch.make(dtype)
    spec, gradients = spec_of(world_size, groups, dtype), GRADIENTS[sums]
    spec = replace(spec, combine_format=sums, backward_format=gradients)
    buffer = open_with_nan(kind, group, spec)
    parts = [batch.part(other, world_size) for other in range(world_size)]
    shape = CallShape.of(
        [batch.ids[part] for part in parts],
        rank,
        num_local_experts=E // world_size,
        group_size=E // groups,
    )
    y, dx, _ = expected(batch, groups, sums and sums.dtype, gradients and gradients.dtype)
    dw = weight_gradients(batch, gradients, group.device)
    wanted = [each[parts[rank]] for each in (y, dx, dw)]
    for trains in (False, True):
        before = buffer.traffic()
        found = run(buffer, batch, parts[rank], rank, trains=trains)
        for name, mine, theirs in zip(("y", "dx", "dw"), found, wanted, strict=False):
            assert torch.equal(mine, theirs), f"{name}, rank {rank}"
        sent = kind.wire_bytes(spec, shape)
        if trains:
            sent += kind.wire_bytes(spec, shape, backward=True)
        assert buffer.traffic() == before + sent
    buffer.check()
    buffer.close()


@pytest.mark.ranks(2, slow=(1, 4))
@pytest.mark.parametrize(
    ("kind", "groups_of_rank", "dtype", "sums"),
    [
        (NVLinkBuffer, 2, torch.bfloat16, None),
        (NVLinkBuffer, 4, torch.float32, None),
        (NVLinkBuffer, 1, torch.bfloat16, FP8),
        (NVLinkBuffer, 2, torch.bfloat16, NVFP4),
        # A host takes many seconds to compile the kernels of each.
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (NVLinkBuffer, 1, torch.bfloat16, None),
                (NVLinkBuffer, 4, torch.bfloat16, None),
                (NVLinkBuffer, 1, torch.float32, None),
                (NVLinkBuffer, 2, torch.float32, None),
                (NVLinkStaticBuffer, 4, torch.bfloat16, None),
                (NVLinkRowBudgetBuffer, 4, torch.bfloat16, None),
                (NVLinkBuffer, 2, torch.bfloat16, MXFP8),
                (NVLinkStaticBuffer, 1, torch.float16, MXFP8),
                (NVLinkStaticBuffer, 4, torch.float32, NVFP4),
                (NVLinkRowBudgetBuffer, 4, torch.float32, FP8),
            )
        ),
    ],
)
def test_sums_and_gradients_are_those_of_groups(
    kind: type[NVLinkBuffer], groups_of_rank: int, dtype: torch.dtype, sums: WireFormat | None
) -> None:
    with EPGroup() as group:
        check_groups(kind, group, groups_of_rank * group.world_size, dtype, sums)


@pytest.mark.parametrize(
    ("groups", "at_source", "reason"),
    [
        (None, False, None),
        (2, False, None),
        (16, False, None),
        (3, False, "no whole groups of 3"),
        (32, False, "no whole groups of 32"),
        (8, True, "needs a row for each slot, as low latency returns"),
    ],
)
def test_groups_that_ranks_cannot_sum_are_refused(
    groups: int | None, at_source: bool, reason: str | None
) -> None:
    spec = replace(spec_of(2, groups, torch.bfloat16), sums_at_source=at_source)
    found = NVLinkBuffer.lacks(Mode.NORMAL, spec, 2)
    assert (reason in found[0]) if reason else not found


def test_memory_of_returned_rows_grows_with_the_groups() -> None:
    sizes = [
        {each.name: each.max_bytes for each in NVLinkBuffer.region_bytes(spec, 2)}
        for spec in (spec_of(2, groups, torch.bfloat16) for groups in (None, 2, 8))
    ]
    assert sizes[0] == sizes[1]
    assert sizes[2] == sizes[0] | {"returned rows": 4 * (sizes[0]["returned rows"] or 0)}
