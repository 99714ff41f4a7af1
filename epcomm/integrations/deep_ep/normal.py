"""Normal mode on epcomm's buffers, as both kinds of deep_ep buffers translate to it.

Rows are in the order of (source rank, token), once for each rank that owns an expert of the token,
and belong to the caller. What deep_ep calls a handle is here a `RowExchange`: it lives as long as
it is held, and rows are sent along it any number of times, in both directions.

A rank refuses a call so that the others, which make it, learn of the error. On CPUs, and where
buffers open, every rank raises the error, whichever call it makes. Over NVLink no host reads what
other ranks report. There a rank that refuses takes part in the kernels of the call without rows,
and the others receive NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import NoReturn, cast

import torch
from torch import Tensor

from epcomm.buffers.base import AddsBias, Buffer, Dispatched, ReturnsSlots, RowTopkDispatched
from epcomm.calls.call import DispatchCall, RowTopkCall
from epcomm.errors import EPError
from epcomm.integrations.deep_ep.ranks import OpenBuffer, Ranks, Record, Service
from epcomm.ops.slots import row_topk
from epcomm.protocol import BatchFlags
from epcomm.records import ExchangePlan
from epcomm.spec import BufferSpec
from epcomm.types import RowsPer, WireDtype, WireFormat, WireTensor, align_up

XTensors = Tensor | tuple[Tensor, Tensor]

NO_OPTIONS: Record = MappingProxyType({})
# The copy engine of a GPU moves multiples of it.
_VECTOR_BYTES = 16


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Rows that are sent: x [N, H], and scales [N, S] of four bytes where x is quantised."""

    x: Tensor
    scales: Tensor | None = None

    @property
    def row_bytes(self) -> int:
        """The bytes of a row with its scales."""
        scale_bytes = 0 if self.scales is None else self.scales.shape[1] * self.scales.itemsize
        return align_up(self.x.shape[1] * self.x.itemsize + scale_bytes, _VECTOR_BYTES)

    @classmethod
    def of(cls, x: XTensors) -> Rows:
        """Read the argument `x` of deep_ep."""
        if isinstance(x, tuple) and len(x) == len(("rows", "scales")):
            return cls(x=x[0], scales=x[1])
        # The checks of the call report other types.
        return cls(x=cast("Tensor", x))

    @property
    def form(self) -> tuple[torch.dtype, int, int | None]:
        """Dtype, H, and the number of scales of a row."""
        num_scales = None if self.scales is None else self.scales.shape[1]
        return self.x.dtype, self.x.shape[1], num_scales

    def as_given(self) -> XTensors:
        """Return them in the form of deep_ep."""
        return self.x if self.scales is None else (self.x, self.scales)


@dataclass(frozen=True, kw_only=True, eq=False)
class RowExchange:
    """The exchange plan of one dispatch, and its buffer, for which a handle of deep_ep stands.

    spec: of the buffer.   num_tokens: T of this rank.
    num_rows: R, rows that this rank received; max_rows: the length of the tensors of the caller.
    """

    buffer: Buffer
    spec: BufferSpec
    exchange_plan: ExchangePlan
    rank: int
    num_tokens: int
    num_rows: int
    max_rows: int
    device: torch.device

    @property
    def opened(self) -> OpenBuffer:
        """The buffer and its specification."""
        return OpenBuffer(self.buffer, self.spec)

    @property
    def row_bytes(self) -> int:
        """The most bytes of a row, for which there is memory."""
        return align_up(self.spec.hidden_format.data_bytes(self.spec.hidden_size), _VECTOR_BYTES)

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype of the rows that combine takes."""
        return self.spec.hidden_format.dtype.torch_dtype


@dataclass(frozen=True, kw_only=True, eq=False)
class ReceivedRows:
    """The result of one dispatch.

    topk_ids: [R, K], int64, experts of this rank, -1 for those of others.
    topk_weights: [R, K], float32, 0 where the id is -1.
    dispatched: what the buffer returned, with the slots over the rows, and the weight of each.
    num_tokens_per_expert: [L], on the host; empty where sizes are static. Then rows whose ids are
        all -1 are undefined, and are anywhere among the others.
    """

    rows: Rows
    topk_ids: Tensor
    topk_weights: Tensor
    dispatched: Dispatched
    num_tokens_per_expert: tuple[int, ...]
    exchange: RowExchange


@lru_cache(maxsize=64)
def spec_of(
    form: tuple[torch.dtype, int, int | None],
    top_k: int,
    num_local_experts: int,
    *,
    max_tokens: int | None = None,
    expert_alignment: int = 1,
) -> BufferSpec:
    """Return the specification of the buffer for rows of Rows.form; one object for one shape.

    max_tokens: M, where sizes are static and the host reads nothing; None: sizes are exact.
    """
    dtype, hidden_size, num_scales = form
    if num_scales is None:
        wire = hidden = WireFormat.of(dtype)
    else:
        block = scale_block(hidden_size, num_scales)
        assert block is not None, "rows were checked"
        kind = WireDtype.INT8 if dtype == torch.int8 else WireDtype.FP8_E4M3
        # Rows and sums of combine, and rows along a handle, are bfloat16.
        wire = WireFormat(dtype=kind, scale_block=block, scale_dtype=torch.float32)
        hidden = WireFormat.of(torch.bfloat16)
    return BufferSpec(
        hidden_size=hidden_size,
        top_k=top_k,
        num_local_experts=num_local_experts,
        dispatch_format=wire,
        hidden_format=hidden,
        max_tokens_per_rank=max_tokens,
        expert_alignment=expert_alignment,
    )


def scale_block(hidden_size: int, num_scales: int) -> int | None:
    """Return the columns of a scale, where all scales but the last have as many; else None."""
    block = -(-hidden_size // max(num_scales, 1))
    return block if -(-hidden_size // max(block, 1)) == num_scales else None


def detached(tensor: Tensor) -> Tensor:
    """Return a tensor in the same memory without its history: autograd belongs to the callers.

    torch.no_grad() takes 3 us of the host even if no tensor has a history.
    """
    return tensor.detach() if tensor.requires_grad else tensor


def dispatch_rows(
    ranks: Ranks,
    service: Service,
    rows: Rows,
    topk: tuple[Tensor, Tensor],
    spec: BufferSpec,
    *,
    num_sms: int | None = None,
    options: Record = NO_OPTIONS,
) -> ReceivedRows:
    """Send each token once to every rank that owns one of its experts.

    Args:
        ranks: of the buffer.   service: normal mode, or low latency of single pairs.
        rows: [T, H]; quantised rows have their scales.
        topk: ids [T, K], int64, -1 for none, and weights [T, K], float32.
        spec: of the buffer, see spec_of(); exact sizes, or static.
        num_sms: SMs of a GPU that kernels which wait for peers may take, at most those of the
            buffer's choice; None for that.
        options: arguments that hosts compare on CPUs in addition to the specification.

    Collective: yes.   Host sync: one, none where sizes are static.
    Lifetime: the caller owns all tensors.
    Raises:
        EPError: some rank refuses its call; on every rank.
    """
    over_nvlink = ranks.is_over_nvlink(service)
    shape = {} if over_nvlink else spec.as_record()
    ranks.announce("dispatch", {"service": service, **shape, **options}, over_nvlink=over_nvlink)
    buffer, sent = ranks.open(service, spec), detached(rows.x)
    if rows.scales is not None:
        # Four bytes of scale are sent as a float32, whatever they are.
        scales = _as_dtype(detached(rows.scales), torch.float32)
        sent = WireTensor(data=sent, format=spec.dispatch_format, scales=scales)
    topk_ids, topk_weights = topk
    call = RowTopkCall(
        hidden_states=sent,
        topk_ids=topk_ids,
        topk_weights=detached(topk_weights),
        # Rows of batches with gradients are in separate memory.
        flags=BatchFlags.GRAD_ENABLED,
        num_sms=num_sms,
    )
    out = buffer.dispatch(call)
    if isinstance(out, RowTopkDispatched):
        received_topk = out.row_topk
    else:
        assert out.slot_weights is not None, "weights travel in normal mode"
        received_topk = row_topk(out.index, out.slot_weights)
    data, scales = _dense(out.rows.data), out.rows.scales
    if scales is not None and rows.scales is not None:
        scales = _as_dtype(_dense(scales), rows.scales.dtype)
    counts = out.index.host_num_tokens_per_expert
    assert counts is not None or spec.max_tokens_per_rank is not None, "sizes are exact"
    return ReceivedRows(
        rows=Rows(x=data, scales=scales),
        topk_ids=received_topk[0],
        topk_weights=received_topk[1],
        dispatched=out,
        num_tokens_per_expert=counts or (),
        exchange=RowExchange(
            buffer=buffer,
            spec=spec,
            exchange_plan=out.exchange_plan,
            rank=ranks.rank,
            num_tokens=topk_ids.shape[0],
            num_rows=data.shape[0],
            max_rows=data.shape[0],
            device=ranks.device,
        ),
    )


def announce_along(
    ranks: Ranks, exchange: RowExchange, function: str, x: Tensor, *, has_weights: bool = False
) -> None:
    """Compare a call along an exchange on all ranks, on CPUs: x, and whether weights are sent.

    A program may replace its Buffer between forward and backward. Then all ranks pass handles of
    the previous Buffer.

    Collective: on CPU ranks.   Host sync: likewise.
    """
    if exchange.buffer.needs_nvlink:
        return
    if not ranks.owns(exchange.buffer):
        function = f"{function}, with a handle of another Buffer"
    arguments = {"x": f"[rows, {x.shape[1]}] {x.dtype}", "has_topk_weights": has_weights}
    ranks.announce(function, arguments, over_nvlink=False)


def send_along(exchange: RowExchange, rows: Rows) -> Rows:
    """Send other rows [T, H] of the same tokens along an exchange; return [R, H].

    Collective: yes.   Host sync: none.   Lifetime: the caller owns the result.
    """
    if rows.scales is None:
        return Rows(x=_dense(send_columns(exchange, rows.x)))
    # Data and scales are joined as bytes, because a cached dispatch carries one tensor.
    x, scales = rows.x.view(torch.uint8), rows.scales.contiguous().view(torch.uint8)
    width, end = x.shape[1], x.shape[1] + scales.shape[1]
    gap = x.new_empty(x.shape[0], -end % _VECTOR_BYTES)
    received = send_columns(exchange, torch.cat([x, scales, gap], dim=1))
    return Rows(
        x=received[:, :width].contiguous().view(rows.x.dtype),
        scales=received[:, width:end].contiguous().view(rows.scales.dtype),
    )


def send_columns(exchange: RowExchange, columns: Tensor) -> Tensor:
    """Send [T, N] of any dtype along an exchange; return [R, N], which the caller owns.

    A row takes a multiple of 16 bytes, and at most exchange.row_bytes.

    Collective: yes.   Host sync: none.
    """
    received = exchange.buffer.cached_dispatch(detached(columns), exchange.exchange_plan)
    return received[: exchange.num_rows]


def return_rows(
    exchange: RowExchange,
    x: Tensor,
    topk_weights: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    rows_per: RowsPer = RowsPer.ROW,
) -> tuple[Tensor, Tensor | None]:
    """Sum rows [R, H] over the ranks of each token, unweighted, and weights [R, K] too.

    bias: [T, H], float32, with which the sums begin, or None.   rows_per: SLOT: x is [C, H], by
        slot, and a rank sums and rounds those of a row first.

    Returns: [T, H], and [T, K] or None.
    Collective: yes.   Host sync: none.   Lifetime: the caller owns the result.
    """
    x = detached(x)
    if rows_per is RowsPer.ROW:
        x = x[: exchange.num_rows]
    weights = None if topk_weights is None else detached(topk_weights)[: exchange.num_rows]
    plan, buffer = exchange.exchange_plan, exchange.buffer
    if bias is None:
        y, scalars = buffer.combine(x, plan, rows_per=rows_per, row_scalars=weights)
    else:
        assert isinstance(buffer, AddsBias), "those of normal mode do"
        y, scalars = buffer.combine(x, plan, rows_per=rows_per, row_scalars=weights, bias=bias)
    return _dense(y), None if scalars is None else _dense(scalars)


def biases_of(bias: XTensors | None) -> tuple[Tensor, ...]:
    """Read the argument `bias` of combine: none, one or two tensors."""
    if bias is None:
        return ()
    return bias if isinstance(bias, tuple) else (bias,)


def sum_of_biases(biases: Sequence[Tensor]) -> Tensor | None:
    """Return the sum of biases [T, H] of combine in float32, contiguous; None where there are none.

    Combine of deep_ep adds up biases first, then the rows of ranks, and rounds once.
    """
    if not biases:
        return None
    first, *others = (detached(each) for each in biases)
    return sum(others, first.float()).contiguous()


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
        spec: of the call, if its tensors determine it: the others may open such a buffer now.
            None: that of the last call.
        has_words, num_combines: with static sizes, whether the others send words along the
            dispatch, and the combines that they make.

    Collective: in place of a dispatch, and of what follows it.
    Raises:
        error: always.
    """
    ranks.announce("", {}, error, over_nvlink=ranks.is_over_nvlink(service))
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
        # next batch may have to precede it.
        hidden_dtype = spec.hidden_format.dtype.torch_dtype
        no_rows = torch.zeros(1, spec.hidden_size, dtype=hidden_dtype, device=ranks.device)
        buffer.combine_slots_async(no_rows, out.exchange_plan, call.topk_weights)
    elif service.is_static and ranks.reads_faults:
        buffer.check()
    elif service.is_static:
        if has_words:
            words = torch.zeros(0, _VECTOR_BYTES, dtype=torch.uint8, device=ranks.device)
            buffer.cached_dispatch(words, out.exchange_plan)
        for _ in range(num_combines):
            combine_error(ranks.last[service], ranks.device, error)
    raise error


def refuse_along(
    ranks: Ranks, exchange: RowExchange, error: EPError, *, has_weights: bool = False
) -> NoReturn:
    """Refuse a dispatch along an exchange.

    has_weights: weights [T, K], float32, are sent before the rows.

    Collective: in place of the dispatch.
    Raises:
        error: always.
    """
    ranks.announce("", {}, error, over_nvlink=exchange.buffer.needs_nvlink)
    weight_bytes = [align_up(4 * exchange.spec.top_k, _VECTOR_BYTES)] if has_weights else []
    # Rows are as wide as those of other ranks. All bits set are NaN, in codes and scales too.
    for num_bytes in (*weight_bytes, exchange.row_bytes):
        shape = (exchange.num_tokens, num_bytes)
        send_columns(exchange, torch.full(shape, 0xFF, dtype=torch.uint8, device=exchange.device))
    raise error


def refuse_combine(
    ranks: Ranks,
    service: Service,
    error: EPError,
    opened: OpenBuffer | None = None,
    exchange_plan: ExchangePlan | None = None,
    *,
    num_combines: int = 1,
) -> NoReturn:
    """Refuse a combine, or a dispatch along an exchange that this rank does not know.

    opened: the buffer of the exchange. If it is None, the exchange is not known: over NVLink the
        others are assumed to combine the oldest batch in low latency, and their sums are NaN; in
        normal mode they wait until the timeout.
    num_combines: number of combines of the buffer in the call.

    Collective: in place of these calls.
    Raises:
        error: always.
    """
    over_nvlink = ranks.is_over_nvlink(service) if opened is None else opened.buffer.needs_nvlink
    ranks.announce("", {}, error, over_nvlink=over_nvlink)
    if opened is None and service is Service.LOW_LATENCY:
        opened = ranks.last.get(service)
    if opened is not None:
        for _ in range(num_combines):
            combine_error(opened, ranks.device, error, exchange_plan)
    raise error


def combine_error(
    opened: OpenBuffer,
    device: torch.device,
    error: EPError,
    exchange_plan: ExchangePlan | None = None,
) -> None:
    """Take part in a combine without rows, so that the other ranks learn of `error`.

    Collective: in place of combine().
    """
    no_rows = torch.empty(0, opened.spec.hidden_size, dtype=torch.bfloat16, device=device)
    opened.buffer.combine(no_rows, exchange_plan, rows_per=RowsPer.ROW, error=error)


def _call_without_rows(spec: BufferSpec, device: torch.device, error: EPError) -> DispatchCall:
    hidden_dtype = spec.hidden_format.dtype.torch_dtype
    return DispatchCall(
        hidden_states=torch.empty(0, spec.hidden_size, dtype=hidden_dtype, device=device),
        topk_ids=torch.empty(0, spec.top_k, dtype=torch.int64, device=device),
        topk_weights=torch.empty(0, spec.top_k, dtype=torch.float32, device=device),
        flags=BatchFlags.GRAD_ENABLED,
        error=error,
    )


def _dense(rows: Tensor) -> Tensor:
    """Return rows [N, C] with strides (C, 1); is_contiguous() ignores those of a single row."""
    if rows.stride() == (rows.shape[1], 1):
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


def _as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """View the bytes of a tensor as another dtype; a view of the same takes as long."""
    return tensor if tensor.dtype is dtype else tensor.view(dtype)
