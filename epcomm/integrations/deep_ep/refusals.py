"""Refuse a call of this rank so that the others, which make it, learn of the error.

Where hosts compare calls, on CPUs and where buffers open, every rank raises the error, whichever
call it makes. Over NVLink no host reads what other ranks report. There a rank that refuses takes
part in the kernels of the call without rows, and the others receive NaN.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from epcomm.buffers.base import ReturnsSlots
from epcomm.calls.call import DispatchCall
from epcomm.errors import EPError
from epcomm.integrations.deep_ep.normal import VECTOR_BYTES, RowExchange, send_columns
from epcomm.integrations.deep_ep.ranks import Ranks, Service
from epcomm.protocol import BatchFlags
from epcomm.spec import BufferSpec
from epcomm.types import align_up


def refuse_dispatch(
    ranks: Ranks,
    service: Service,
    error: EPError,
    spec: BufferSpec | None = None,
    *,
    has_words: bool = False,
    num_combines: int = 1,
) -> NoReturn:
    """Refuse a dispatch on new routes.

    Over NVLink the others make a dispatch of the same shape, and have NaN in its sums in low
    latency and with static sizes; with exact sizes they raise. In any other call they, and this
    rank if the shape of its call is new, wait until the timeout.

    Args:
        ranks: of the buffer.   service: of the dispatch.
        error: the reason.
        spec: of the call, if its tensors tell: the others may open such a buffer now. None: that of
            the last call.
        has_words, num_combines: with static sizes, whether the others send words along the
            dispatch, and the combines that they make.

    Collective: in place of a dispatch, and of what follows it.
    Raises:
        error: always.
    """
    ranks.refuse_on_hosts(service, error)
    if spec is not None:
        try:
            ranks.open(service, spec)
        except EPError as problem:
            raise error from problem
    if service not in ranks.last:
        raise error
    buffer, spec = ranks.last[service]
    call = _call_without_rows(spec, ranks.device, error)
    out = buffer.dispatch(call)
    if isinstance(buffer, ReturnsSlots) and spec.returns_slots:
        # The others combine what they received, and wait for every rank. This rank does not: its
        # next batch may have to come first.
        hidden_dtype = spec.hidden_format.dtype.torch_dtype
        no_rows = torch.zeros(1, spec.hidden_size, dtype=hidden_dtype, device=ranks.device)
        buffer.combine_slots_async(no_rows, out.exchange_plan, call.topk_weights)
    elif service.is_static and ranks.reads_faults:
        buffer.check()
    elif service.is_static:
        if has_words:
            words = torch.zeros(0, VECTOR_BYTES, dtype=torch.uint8, device=ranks.device)
            buffer.cached_dispatch(words, out.exchange_plan)
        for _ in range(num_combines):
            buffer.refuse_combine(error)
    raise error


def refuse_along(
    ranks: Ranks,
    exchange: RowExchange,
    error: EPError,
    *,
    has_weights: bool = False,
    num_combines: int = 0,
) -> NoReturn:
    """Refuse a dispatch along an exchange, or a combine.

    has_weights: weights [T, K], float32, are sent before the rows.
    num_combines: the combines of the buffer that the others make; 0: a dispatch.

    Collective: in place of these calls.
    Raises:
        error: always.
    """
    buffer = exchange.buffer
    if not buffer.needs_nvlink:
        if exchange.spec.max_tokens_per_rank is None:
            # In the group of the handle, which may be of an earlier Buffer.
            buffer.refuse_combine(error)
        ranks.refuse_on_hosts(Service.NORMAL, error)
    for _ in range(num_combines):
        buffer.refuse_combine(error)
    if not num_combines:
        weight_bytes = [align_up(4 * exchange.spec.top_k, VECTOR_BYTES)] if has_weights else []
        # Rows as wide as any of other ranks. All bits set are NaN, in codes and scales too.
        for num_bytes in (*weight_bytes, exchange.row_bytes):
            shape = (exchange.num_tokens, num_bytes)
            nans = torch.full(shape, 0xFF, dtype=torch.uint8, device=exchange.device)
            send_columns(exchange, nans)
    raise error


def refuse_unknown(ranks: Ranks, service: Service, error: EPError) -> NoReturn:
    """Refuse a call along an exchange that this rank does not know.

    Over NVLink the others are assumed to combine the oldest batch in low latency, and their sums
    are NaN; in normal mode they wait until the timeout.

    Collective: in place of a combine, or a dispatch along an exchange.
    Raises:
        error: always.
    """
    ranks.refuse_on_hosts(service, error)
    if service is Service.LOW_LATENCY and service in ranks.last:
        ranks.last[service].buffer.refuse_combine(error)
    raise error


def _call_without_rows(spec: BufferSpec, device: torch.device, error: EPError) -> DispatchCall:
    hidden_dtype = spec.hidden_format.dtype.torch_dtype
    return DispatchCall(
        hidden_states=torch.empty(0, spec.hidden_size, dtype=hidden_dtype, device=device),
        topk_ids=torch.empty(0, spec.top_k, dtype=torch.int64, device=device),
        topk_weights=torch.empty(0, spec.top_k, dtype=torch.float32, device=device),
        flags=BatchFlags.GRAD_ENABLED,
        error=error,
    )
