"""Copy the rows of a dispatch out of a receive buffer, which later dispatches overwrite.

A caller that keeps rows for a backward has them copied once. Other rows are used where they are.
"""

from typing import NamedTuple

from torch import Tensor

from epcomm.kernels.nvlink.common.layout import NormalLayout
from epcomm.kernels.nvlink.common.plan_parts import NVLinkNormalExchangePlan
from epcomm.kernels.nvlink.normal.dispatch import unit_of
from epcomm.kernels.nvlink.normal.exchange import NormalExchange, constants_of
from epcomm.kernels.nvlink.normal.program import Program, arguments_of
from epcomm.platforms.cuda import on_device

# Warps of a block: with 4 units of 16 bytes a lane in flight they hide the latency of memory.
WARPS = 16
_Arguments = arguments_of("collect.cu")


class CopyForm(NamedTuple):
    """The bytes of a row and of its scales, 0 for none, as a compiled kernel copies them."""

    row_bytes: int
    scale_bytes: int


def program_of(layout: NormalLayout, form: CopyForm) -> Program:
    """Return the kernel for one layout and form of rows."""
    return Program(
        entry="collect_rows",
        files=("peers.cu", "collect.cu"),
        constants={
            **constants_of(layout),
            "WARPS": WARPS,
            "OUT_BYTES": form.row_bytes,
            "OUT_SCALE_BYTES": form.scale_bytes,
            "UNIT": unit_of(form.row_bytes),
            "SCALE_UNIT": unit_of(form.scale_bytes),
        },
        threads=32 * WARPS,
        # Blocks do not wait for one another, so the grid has one for each SM.
        is_cooperative=False,
    )


def collect_rows(
    exchange: NormalExchange,
    plan: NVLinkNormalExchangePlan,
    *,
    buffer_index: int,
    out: Tensor,
    scales: Tensor | None = None,
) -> None:
    """Copy the rows of all ranks, which have arrived; rows of excluded ranks are 0.

    Args:
        exchange: the memory of all ranks.
        plan: that of the dispatch.
        buffer_index: the receive buffer of the rows.
        out: [R, columns] of any dtype, contiguous.
        scales: [R, columns] of any dtype, contiguous, to which scales are copied, or None.

    Collective: no.   Allocates nothing.   Host sync: none.
    """
    peers, layout = exchange.peers, exchange.peers.layout
    sizes = [0 if each is None else each.shape[1] * each.itemsize for each in (out, scales)]
    form = CopyForm(*sizes)
    launch = exchange.launches.get(form) or exchange.prepare(program_of, form, _Arguments)
    arguments = _Arguments.from_buffer_copy(launch.arguments)
    begin = peers.own_address + layout.buffer_offset(buffer_index)
    arguments.data = begin + layout.offsets["data"]
    arguments.out = out.data_ptr()
    if scales is not None:
        arguments.scales = begin + layout.offsets["scales"]
        arguments.out_scales = scales.data_ptr()
    arguments.rows_from = plan.rows_from.data_ptr()
    arguments.row_base = plan.row_base.data_ptr()
    with on_device(out.device):
        launch.kernel.launch(launch.num_blocks, arguments)
