"""Prepare the launches of the kernels of low latency, which share the order of their parameters."""

from __future__ import annotations

from collections.abc import Sequence

from epcomm.kernels.nvlink.common.constexprs import Layout
from epcomm.kernels.nvlink.common.exchange import LowLatencyExchange, Memory
from epcomm.kernels.prepared import CHANGES, PreparedLaunch


def prepare(
    exchange: LowLatencyExchange,
    kernel: object,
    arguments: Sequence[object],
    num_numbers: int,
    **constants: object,
) -> PreparedLaunch:
    """Return the launch of a kernel, with the layout as the constant `c`.

    Args:
        exchange: the receive buffer, whose memory and numbers follow the arguments.
        kernel: decorated by triton.jit.
        arguments: the first ones, as of PreparedLaunch.
        num_numbers: the last ones, integers that every call gives.
        constants: others of the kernel, and options of the compiler.
    """
    peers = exchange.peers
    c = Layout.of(peers.layout, peers.table.device)
    memory = Memory(
        table=peers.table,
        bases=exchange.bases,
        state=exchange.state,
        counters=peers.counters,
        faults=peers.faults,
        excluded=peers.excluded,
        report=peers.report,
    )
    numbers = (peers.own_address, exchange.buffer_address, peers.rank, peers.max_polls)
    everything = (*arguments, memory, *numbers, *[CHANGES] * num_numbers)
    return PreparedLaunch(kernel, everything, {"c": c, **constants})
