"""Normal mode on epcomm's buffers, as both kinds of deep_ep buffers translate to it.

Rows are in the order of (source rank, token), once for each rank that owns an expert of the token,
and belong to the caller. What deep_ep calls a handle is here a `RowWay`: it lives as long as it is
held, and rows travel along it any number of times, in both directions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from epcomm.buffers.base import Buffer, DispatchCall
from epcomm.config import Mode
from epcomm.errors import EPError, ShapeError
from epcomm.integrations.deep_ep.ranks import Ranks
from epcomm.ops.slots import row_topk
from epcomm.protocol import BatchFlags
from epcomm.records import ExchangePlan, SlotIndex
from epcomm.spec import BufferSpec
from epcomm.types import RowsPer, WireDtype, WireFormat, WireTensor

# Rows and sums of combine, and rows along a way that exists, whose dispatch was quantised.
_SUM_FORMAT = WireFormat.of(torch.bfloat16)
# Bytes of one scale, float32 or four exponents in an int32: what it means is the caller's.
_SCALE_BYTES = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Rows that travel: x [N, H], and scales [N, S], float32 or int32, where x is quantised."""

    x: Tensor
    scales: Tensor | None = None

    @classmethod
    def of(cls, x: Tensor | tuple[Tensor, Tensor]) -> Rows:
        """Read the argument `x` of deep_ep."""
        return cls(x=x[0], scales=x[1]) if isinstance(x, tuple) else cls(x=x)

    def as_given(self) -> Tensor | tuple[Tensor, Tensor]:
        """Return them in the form of deep_ep."""
        return self.x if self.scales is None else (self.x, self.scales)


@dataclass(frozen=True, kw_only=True, eq=False)
class RowWay:
    """The way of the rows of one dispatch: what a handle of deep_ep stands for.

    rank: this rank.   num_tokens: T of this rank.   num_rows: R, rows that this rank received.
    top_k: K.
    """

    buffer: Buffer
    exchange_plan: ExchangePlan
    rank: int
    num_tokens: int
    num_rows: int
    top_k: int


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a dispatch; other sizes are another buffer, with memory of its own.

    expert_alignment: the slots of each expert start at a multiple of it.
    max_tokens: M, where sizes are static and the host reads nothing; None: sizes are exact.
    num_sms: SMs of a GPU that the kernels may take, None for the buffer's choice.
    """

    expert_alignment: int = 1
    max_tokens: int | None = None
    num_sms: int | None = None


EXACT = Sizes()


@dataclass(frozen=True, kw_only=True, eq=False)
class Received:
    """The result of one dispatch.

    topk_ids: [R, K], int64, experts of this rank, -1 for those of others.
    topk_weights: [R, K], float32, 0 beside -1.
    num_tokens_per_expert: [L], on the host; empty where sizes are static. Then rows whose ids are
        all -1 are undefined, and lie anywhere among the others.
    index, slot_weights: the slots over the rows, and the weight of each.
    """

    rows: Rows
    topk_ids: Tensor
    topk_weights: Tensor
    num_tokens_per_expert: tuple[int, ...]
    index: SlotIndex
    slot_weights: Tensor
    way: RowWay

    def tensors(self) -> list[Tensor | None]:
        """Return the tensors that a caller gets."""
        return [self.rows.x, self.rows.scales, self.topk_ids, self.topk_weights]


def spec_of(
    rows: Rows, top_k: int, num_experts: int, num_ranks: int, sizes: Sizes = EXACT
) -> BufferSpec:
    """Return the specification of the epcomm buffer that carries such rows."""
    hidden_size = rows.x.shape[1]
    if rows.scales is None:
        wire = hidden = WireFormat.of(rows.x.dtype)
    else:
        wire, hidden = _quantized_format(rows, hidden_size), _SUM_FORMAT
    return BufferSpec(
        hidden_size=hidden_size,
        top_k=top_k,
        num_local_experts=num_experts // num_ranks,
        dispatch_format=wire,
        hidden_format=hidden,
        max_tokens_per_rank=sizes.max_tokens,
        expert_alignment=sizes.expert_alignment,
        num_sms=sizes.num_sms,
    )


def dispatch_rows(
    ranks: Ranks,
    rows: Rows,
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    *,
    sizes: Sizes = EXACT,
    error: EPError | None = None,
) -> Received:
    """Send each token once to every rank that owns one of its experts.

    Args:
        ranks: who takes part.
        rows: [T, H]; quantised rows come with their scales.
        topk_ids: [T, K], int64, -1 for none.
        topk_weights: [T, K], float32.
        num_experts: E, equal on all ranks and a multiple of W.
        sizes: exact, or static.
        error: why this rank takes part without rows, if it does; every rank raises, or has NaN for
            its sums where sizes are static.

    Collective: yes.   Host sync: one, none where sizes are static.
    Lifetime: the caller owns all tensors.
    Raises:
        ShapeError: the call of some rank cannot be; on every rank.
    """
    top_k = topk_ids.shape[1]
    spec = spec_of(rows, top_k, num_experts, ranks.size, sizes)
    buffer = ranks.open(Mode.NORMAL, spec)
    call = DispatchCall(
        hidden_states=_as_sent(rows, spec.dispatch_format),
        topk_ids=topk_ids,
        topk_weights=topk_weights,
        # Rows of batches with gradients are in memory of their own.
        flags=BatchFlags.GRAD_ENABLED,
        error=error,
    )
    out = buffer.dispatch(call)
    way = RowWay(
        buffer=buffer,
        exchange_plan=out.exchange_plan,
        rank=ranks.rank,
        num_tokens=topk_ids.shape[0],
        num_rows=out.rows.data.shape[0],
        top_k=top_k,
    )
    assert out.slot_weights is not None, "weights travel in normal mode"
    ids, weights = row_topk(out.index, out.slot_weights)
    counts = out.index.host_num_tokens_per_expert
    assert counts is not None or sizes.max_tokens is not None, "sizes are exact"
    return Received(
        rows=_received_rows(out.rows, rows),
        topk_ids=ids,
        topk_weights=weights,
        num_tokens_per_expert=counts or (),
        index=out.index,
        slot_weights=out.slot_weights,
        way=way,
    )


def send_along(way: RowWay, rows: Rows) -> Rows:
    """Send other rows [T, H] of the same tokens along a way; return [R, H].

    Collective: yes.   Host sync: none.   Lifetime: the caller owns the result.
    """
    if rows.scales is None:
        return Rows(x=_dense(send_columns(way, rows.x)))
    # Side by side as bytes: a cached dispatch carries one tensor.
    x, scales = rows.x.view(torch.uint8), rows.scales.contiguous().view(torch.uint8)
    received = send_columns(way, torch.cat([x, scales], dim=1))
    width = x.shape[1]
    return Rows(
        x=received[:, :width].contiguous().view(rows.x.dtype),
        scales=received[:, width:].contiguous().view(rows.scales.dtype),
    )


def send_columns(way: RowWay, columns: Tensor) -> Tensor:
    """Send [T, N] of any dtype along a way; return [R, N], which the caller owns."""
    return way.buffer.cached_dispatch(columns, way.exchange_plan)[: way.num_rows]


def return_rows(
    way: RowWay, x: Tensor, topk_weights: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Sum rows [R, H] over the ranks of each token, unweighted, and bring weights [R, K] along.

    Returns: [T, H], and [T, K] or None.
    Collective: yes.   Host sync: none.   Lifetime: the caller owns the result.
    """
    combined = way.buffer.combine(
        x[: way.num_rows],
        way.exchange_plan,
        rows_per=RowsPer.ROW,
        row_scalars=None if topk_weights is None else topk_weights[: way.num_rows],
    )
    scalars = combined.scalars
    return _dense(combined.y), None if scalars is None else _dense(scalars)


def _dense(rows: Tensor) -> Tensor:
    """Return rows [N, C] with strides (C, 1), which one row or column may lack and not show."""
    if rows.stride() == (rows.shape[1], 1):
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


def _quantized_format(rows: Rows, hidden_size: int) -> WireFormat:
    assert rows.scales is not None, "quantised rows have scales"
    num_scales = rows.scales.shape[1]
    block = -(-hidden_size // max(num_scales, 1))
    if rows.scales.dtype.itemsize != _SCALE_BYTES or -(-hidden_size // block) != num_scales:
        raise ShapeError(
            f"dispatch: scales are {list(rows.scales.shape)} {rows.scales.dtype} beside x "
            f"{list(rows.x.shape)}, expected float32 or int32 of blocks of one length; pass a "
            "scale for each 128 columns"
        )
    kind = WireDtype.INT8 if rows.x.dtype == torch.int8 else WireDtype.FP8_E4M3
    return WireFormat(dtype=kind, scale_block=block, scale_dtype=torch.float32)


def _as_sent(rows: Rows, wire: WireFormat) -> Tensor | WireTensor:
    """Return rows as a call takes them: four bytes of scale travel as a float32, whatever it is."""
    if rows.scales is None:
        return rows.x
    return WireTensor(data=rows.x, format=wire, scales=rows.scales.view(torch.float32))


def _received_rows(wire: WireTensor, sent: Rows) -> Rows:
    """Return what arrived with rows one behind the other, as a caller expects them."""
    data = _dense(wire.data)
    if sent.scales is None or wire.scales is None:
        return Rows(x=data)
    return Rows(x=data, scales=_dense(wire.scales).view(sent.scales.dtype))
