"""Normal mode on epcomm's buffers, to which the buffers of deep_ep V1 and V2 translate their calls.

Rows are in the order of (source rank, token), once for each rank that owns an expert of the token,
and belong to the caller. A handle of deep_ep corresponds to a `RowExchange`: it may be kept for any
time, and rows are sent along it any number of times, in both directions.

A rank refuses a call so that the others, which make it, learn of the error. On CPUs, and when
buffers are opened, every rank raises the error, whichever call it makes. Over NVLink no host reads
what other ranks report. There a rank that refuses takes part in the kernels of the call without
rows, and the others receive NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from epcomm.buffers.base import AddsBias, Buffer, Dispatched, ReturnsSlots, RowTopkDispatched
from epcomm.calls.call import DispatchCall, RowTopkCall
from epcomm.errors import EPError, HandleError
from epcomm.integrations.deep_ep.ranks import OpenBuffer, Ranks, Record, Service
from epcomm.ops.slots import row_topk
from epcomm.protocol import BatchFlags
from epcomm.records import ExchangePlan
from epcomm.spec import BufferSpec
from epcomm.types import RowsPer, WireDtype, WireFormat, WireTensor, align_up

XTensors = Tensor | tuple[Tensor, Tensor]

# The copy engine of a GPU moves multiples of 16 bytes.
_VECTOR_BYTES = 16
_VECTOR_WORDS = _VECTOR_BYTES // 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Rows that are sent: x [N, H], and scales [N, S] of four bytes where x is quantised."""

    x: Tensor
    scales: Tensor | None = None

    @property
    def row_bytes(self) -> int:
        scale_bytes = 0 if self.scales is None else self.scales.shape[1] * self.scales.itemsize
        return align_up(self.x.shape[1] * self.x.itemsize + scale_bytes, _VECTOR_BYTES)

    @classmethod
    def of(cls, x: XTensors) -> Self:
        """Read the argument `x` of deep_ep."""
        # If x has another type, the checks of the call report it.
        x, scales = x if isinstance(x, tuple) and len(x) == 2 else (cast("Tensor", x), None)
        return cls(x=x, scales=scales)

    @property
    def form(self) -> tuple[torch.dtype, int, int | None]:
        """The dtype, H, and the number of scales of a row."""
        num_scales = None if self.scales is None else self.scales.shape[1]
        return self.x.dtype, self.x.shape[1], num_scales

    def as_given(self) -> XTensors:
        """Return the rows in the form of deep_ep."""
        return self.x if self.scales is None else (self.x, self.scales)


@dataclass(frozen=True, kw_only=True, eq=False)
class RowExchange:
    """The exchange plan of one dispatch and its buffer; a handle of deep_ep stands for them.

    ranks: of the Buffer that made it.   spec: of the buffer.   num_tokens: T of this rank.
    num_rows: R, rows that this rank received; max_rows: the length of the tensors of the caller.
    """

    ranks: Ranks
    buffer: Buffer
    spec: BufferSpec
    exchange_plan: ExchangePlan
    num_tokens: int
    num_rows: int
    max_rows: int

    @property
    def row_bytes(self) -> int:
        """The most bytes of a row that the memory of the buffer allows."""
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
    """Return a tensor in the same memory without its history: autograd belongs to the callers."""
    # torch.no_grad() takes 3 us of the host even if no tensor has a history.
    return tensor.detach() if tensor.requires_grad else tensor


def dispatch_rows(
    ranks: Ranks,
    service: Service,
    rows: Rows,
    topk: tuple[Tensor, Tensor],
    spec: BufferSpec,
    *,
    options: Record,
    num_sms: int | None = None,
) -> ReceivedRows:
    """Send each token once to every rank that owns one of its experts.

    Args:
        ranks: of the buffer.   service: a kind of normal mode.
        rows: [T, H].   topk: ids [T, K], int64, -1 for none, and weights [T, K], float32.
        spec: of the buffer, see spec_of().
        options: arguments that hosts compare on CPUs in addition to the specification.
        num_sms: most SMs of a GPU for kernels that wait for peers; None: the buffer chooses.

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
        # A scale of four bytes of any dtype is sent as a float32.
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
    if service.is_static and ranks.reads_faults:
        buffer.check()
    counts = out.index.host_num_tokens_per_expert
    assert counts is not None or spec.max_tokens_per_rank is not None, "sizes are exact"
    return ReceivedRows(
        rows=Rows(x=data, scales=scales),
        topk_ids=received_topk[0],
        topk_weights=received_topk[1],
        dispatched=out,
        num_tokens_per_expert=counts or (),
        exchange=RowExchange(
            ranks=ranks,
            buffer=buffer,
            spec=spec,
            exchange_plan=out.exchange_plan,
            num_tokens=topk_ids.shape[0],
            num_rows=data.shape[0],
            max_rows=data.shape[0],
        ),
    )


class Uncopied:
    """A handle, which cannot be pickled or copied."""

    def __reduce__(self) -> NoReturn:
        raise HandleError(
            f"{type(self).__name__} cannot be pickled or copied: it belongs to the memory of one "
            "Buffer; pass the handle itself"
        )


def announce_along(
    ranks: Ranks, exchange: RowExchange, function: str, x: Tensor, *, has_weights: bool = False
) -> None:
    """Compare a call along an exchange on all ranks, on CPUs: x, and whether weights are sent.

    Collective: on CPU ranks.   Host sync: on CPU ranks.
    """
    if exchange.buffer.needs_nvlink:
        return
    # A program may replace its Buffer between forward and backward, on all ranks.
    if exchange.ranks is not ranks:
        function = f"{function}, with a handle of another Buffer"
    arguments = {"x": f"[rows, {x.shape[1]}] {x.dtype}", "has_topk_weights": has_weights}
    ranks.announce(function, arguments, over_nvlink=False)


def send_along(
    ranks: Ranks, exchange: RowExchange, rows: Rows, topk_weights: Tensor | None = None
) -> tuple[Rows, Tensor | None]:
    """Send other rows [T, H], and weights [T, K], of the same tokens along an exchange.

    Returns: [R, H], and [R, K] or None; weights of experts of other ranks too.
    Collective: yes; with weights or without them on all ranks.   Host sync: on CPU ranks.
    Lifetime: the caller owns the result.
    """
    has_weights = topk_weights is not None
    announce_along(ranks, exchange, "dispatch along a handle", rows.x, has_weights=has_weights)
    weights = None if topk_weights is None else send_words(exchange, topk_weights)
    if rows.scales is None:
        return Rows(x=_dense(_send_columns(exchange, rows.x))), weights
    # Elements and scales are sent as bytes of one tensor, because a cached dispatch carries only
    # one.
    x, scales = rows.x.view(torch.uint8), rows.scales.contiguous().view(torch.uint8)
    width, end = x.shape[1], x.shape[1] + scales.shape[1]
    gap = x.new_empty(x.shape[0], -end % _VECTOR_BYTES)
    received = _send_columns(exchange, torch.cat([x, scales, gap], dim=1))
    x = received[:, :width].contiguous().view(rows.x.dtype)
    scales = received[:, width:end].contiguous().view(rows.scales.dtype)
    return Rows(x=x, scales=scales), weights


def send_words(exchange: RowExchange, words: Tensor) -> Tensor:
    """Send words [T, N] of four bytes, such as weights, along an exchange.

    Returns: [R, N], contiguous, which the caller owns.
    Collective: yes.   Host sync: none.
    """
    num_words = words.shape[1]
    # Every buffer carries whole vectors.
    vectors = F.pad(detached(words), (0, -num_words % _VECTOR_WORDS))
    return _send_columns(exchange, vectors)[:, :num_words].contiguous()


def _send_columns(exchange: RowExchange, columns: Tensor) -> Tensor:
    """Send [T, N] of any dtype, N * itemsize a multiple of 16 and at most exchange.row_bytes."""
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

    bias: [T, H], float32, with which the sums begin.
    rows_per: SLOT: x is [C, H], by slot, and a rank sums and rounds those of a row first.

    Returns: [T, H], and [T, K] or None.
    Collective: yes.   Host sync: none.   Lifetime: the caller owns the result.
    """
    x = detached(x)
    if rows_per is RowsPer.ROW:
        x = x[: exchange.num_rows]
    weights = None if topk_weights is None else detached(topk_weights)[: exchange.num_rows]
    # All buffers of normal mode implement AddsBias.
    buffer, plan = cast("AddsBias", exchange.buffer), exchange.exchange_plan
    y, scalars = buffer.combine(x, plan, rows_per=rows_per, row_scalars=weights, bias=bias)
    return _dense(y), None if scalars is None else _dense(scalars)


def sum_of_biases(biases: Sequence[Tensor]) -> Tensor | None:
    """Return the sum of biases [T, H] in float32, contiguous, as combine adds them up first."""
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
    has_weights: bool = False,
    sums_each_k: bool = False,
) -> NoReturn:
    """Refuse a dispatch on new routes.

    Over NVLink the others make a dispatch of the same shape, and have NaN in its sums in low
    latency and with static sizes; with exact sizes they raise. In any other call they, and this
    rank if the shape of its call is new, wait until the timeout.

    Args:
        ranks: of the buffer.   service: of the dispatch.   error: the reason.
        spec: of the call, see Check.spec: the others may open such a buffer now. None: that of the
            last call.
        has_weights, sums_each_k: with static sizes, whether the others send weights after the rows,
            and make K combines instead of one.

    Collective: in place of a dispatch, and of what follows it.
    Raises:
        error: always.
    """
    ranks.announce("", {}, error, over_nvlink=ranks.is_over_nvlink(service))
    if spec is not None:
        try:
            ranks.open(service, ranks.with_open_top_k(service, spec))
        except EPError as problem:
            raise error from problem
    if service not in ranks.last:
        raise error
    buffer, spec = ranks.last[service]
    hidden_dtype = spec.hidden_format.dtype.torch_dtype
    call = DispatchCall(
        hidden_states=torch.empty(0, spec.hidden_size, dtype=hidden_dtype, device=ranks.device),
        topk_ids=torch.empty(0, spec.top_k, dtype=torch.int64, device=ranks.device),
        topk_weights=torch.empty(0, spec.top_k, dtype=torch.float32, device=ranks.device),
        flags=BatchFlags.GRAD_ENABLED,
        error=error,
    )
    out = buffer.dispatch(call)
    if isinstance(buffer, ReturnsSlots) and service is Service.LOW_LATENCY:
        # The others combine what they received, and wait for every rank. This rank does not: its
        # next batch may have to come first.
        no_rows = torch.zeros(1, spec.hidden_size, dtype=hidden_dtype, device=ranks.device)
        buffer.combine_slots_async(no_rows, out.exchange_plan, call.topk_weights)
    elif service.is_static and ranks.reads_faults:
        buffer.check()
    elif service.is_static:
        if has_weights:
            no_weights = torch.zeros(0, _VECTOR_BYTES, dtype=torch.uint8, device=ranks.device)
            buffer.cached_dispatch(no_weights, out.exchange_plan)
        for _ in range(spec.top_k if sums_each_k else 1):
            _combine_without_rows(ranks, ranks.last[service], error)
    raise error


def refuse_along(
    ranks: Ranks,
    service: Service,
    error: EPError,
    exchange: RowExchange | None = None,
    *,
    num_combines: int = 0,
    has_weights: bool = False,
) -> NoReturn:
    """Refuse a combine, or a dispatch along an exchange.

    Over NVLink the others have NaN in their sums, or in the rows of this rank.

    Args:
        ranks: of the buffer.   service: of the call.   error: the reason.
        exchange: None if this rank does not know it: over NVLink the others are assumed to combine
            the oldest batch in low latency; in normal mode they wait until the timeout.
        num_combines: number of combines of the buffer in the call; 0 in a dispatch.
        has_weights: in a dispatch, whether weights [T, K] are sent before the rows.

    Collective: in place of the call.
    Raises:
        error: always.
    """
    over_nvlink = ranks.is_over_nvlink(service)
    if exchange is not None:
        over_nvlink = exchange.buffer.needs_nvlink
    ranks.announce("", {}, error, over_nvlink=over_nvlink)
    if exchange is None:
        if service is Service.LOW_LATENCY and service in ranks.last:
            _combine_without_rows(ranks, ranks.last[service], error)
        raise error
    opened = OpenBuffer(exchange.buffer, exchange.spec)
    for _ in range(num_combines):
        _combine_without_rows(ranks, opened, error, exchange.exchange_plan)
    if not num_combines:
        weight_bytes = [align_up(4 * exchange.spec.top_k, _VECTOR_BYTES)] if has_weights else []
        # The rows must be as wide as those of any other rank. Bytes of 0xFF are NaN, in codes and
        # scales too.
        for num_bytes in (*weight_bytes, exchange.row_bytes):
            shape = (exchange.num_tokens, num_bytes)
            _send_columns(exchange, torch.full(shape, 0xFF, dtype=torch.uint8, device=ranks.device))
    raise error


def _combine_without_rows(
    ranks: Ranks, opened: OpenBuffer, error: EPError, exchange_plan: ExchangePlan | None = None
) -> None:
    """Take part in a combine without rows, so that the other ranks learn of `error`.

    Collective: in place of combine().
    """
    no_rows = torch.empty(0, opened.spec.hidden_size, dtype=torch.bfloat16, device=ranks.device)
    opened.buffer.combine(no_rows, exchange_plan, rows_per=RowsPer.ROW, error=error)


def _dense(rows: Tensor) -> Tensor:
    """Return rows [N, C] with strides (C, 1); is_contiguous() ignores those of a single row."""
    if rows.stride() == (rows.shape[1], 1):
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


def _as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """View the bytes of a tensor as another dtype; a view of the same takes as long."""
    return tensor if tensor.dtype is dtype else tensor.view(dtype)
