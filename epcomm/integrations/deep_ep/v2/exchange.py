"""One dispatch of V2 on new routes, and the words that travel along it, on epcomm's buffers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from epcomm.errors import CapacityError, EPError
from epcomm.integrations.deep_ep.checks import SCALES, Check
from epcomm.integrations.deep_ep.normal import (
    ReceivedRows,
    RowExchange,
    Rows,
    detached,
    dispatch_rows,
    return_rows,
    send_columns,
    spec_of,
)
from epcomm.integrations.deep_ep.ranks import Options, Ranks

# 16 B, in words of an int32.
_VECTOR_WORDS = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class DispatchRequest:
    """One dispatch of T tokens on new routes; see ElasticBuffer.dispatch.

    max_tokens: M.   do_cpu_sync: sizes are exact, and the host waits for them.
    num_sms: that the handle has.   asked_sms: that the caller asks for, None for any number.
    """

    rows: Rows
    topk_idx: Tensor
    topk_weights: Tensor | None
    recv_stats: Tensor | None
    num_experts: int
    max_tokens: int
    expert_alignment: int
    num_sms: int
    asked_sms: int | None
    do_handle_copy: bool
    do_cpu_sync: bool
    do_expand: bool

    def check(self, check: Check) -> None:
        """Raise why this rank must take part without its tokens, whose sizes are known."""
        num_tokens, num_ranks = self.rows.x.shape[0], check.ranks.size
        if num_tokens > self.max_tokens:
            fault = f"x has {num_tokens} tokens, expected at most num_max_tokens_per_rank"
            remedy = "make it larger on all ranks"
            raise check.error(CapacityError, f"{fault} = {self.max_tokens}", remedy)
        if self.rows.scales is not None:
            check.tensor("x[1]", self.rows.scales, (num_tokens, None), SCALES)
        check.tensor("topk_idx", self.topk_idx, (num_tokens, None), (torch.int64,))
        check.ids(self.topk_idx, self.num_experts)
        if self.topk_weights is not None:
            check.tensor("topk_weights", self.topk_weights, self.topk_idx.shape, (torch.float32,))
        if self.recv_stats is not None:
            name, shape = "cumulative_local_expert_recv_stats", (self.num_experts // num_ranks,)
            check.tensor(name, self.recv_stats, shape, (torch.int32,))


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrived:
    """What one dispatch brought to this rank.

    weights: [R, K], float32, those of experts of other ranks too, or [C] by slot if rows expand;
        None where none were given.
    sources: source rank * M + token of each row, [R], int32, where the dispatch brought them.
    """

    received: ReceivedRows
    weights: Tensor | None
    sources: Tensor | None


def send_request(
    ranks: Ranks, request: DispatchRequest, error: EPError | None, *, num_combines: int
) -> Arrived:
    """Send the tokens of a request.

    Weights of experts of other ranks, which rows that do not expand are returned with, come in an
    exchange of their own, and sources with them; else sources come when they are read.

    error: why this rank takes part without tokens, if it does.   num_combines: of the buffer, by
        which the other ranks return the results of this dispatch, if they do nothing else.

    Collective: yes.   Host sync: one with do_cpu_sync, else none.
    Raises:
        ShapeError, CapacityError: the call of some rank cannot be; on every rank with do_cpu_sync
            and on CPUs, else there alone, and the other ranks get NaN from combine.
    """
    rows, topk_idx, weights = request.rows, request.topk_idx, request.topk_weights
    if error is not None:
        scales = None if rows.scales is None else rows.scales[:0]
        rows, topk_idx, weights = Rows(x=rows.x[:0], scales=scales), topk_idx[:0].long(), None
    is_static = not request.do_cpu_sync
    spec = spec_of(
        rows.form,
        topk_idx.shape[1],
        request.num_experts // ranks.size,
        expert_alignment=request.expert_alignment,
        max_tokens=request.max_tokens if is_static else None,
        num_sms=request.asked_sms,
    )
    options = Options(
        num_max_tokens_per_rank=request.max_tokens,
        has_topk_weights=request.topk_weights is not None,
        do_expand=request.do_expand,
    )
    sent = topk_idx.new_zeros(topk_idx.shape, dtype=torch.float32) if weights is None else weights
    received = dispatch_rows(ranks, rows, topk_idx, sent, spec, options=options, error=error)
    exchange, brings_weights = received.exchange, options.has_topk_weights and not request.do_expand
    if is_static and ranks.reads_faults:
        exchange.buffer.check()
    elif is_static and error is not None:
        # No host of the others learns of it: they go on, to sums of NaN, and wait for this rank.
        if brings_weights:
            _send_words(exchange, torch.zeros(0, 1, dtype=torch.int32, device=ranks.device))
        shape = (exchange.num_rows, spec.hidden_size)
        zeros = received.rows.x.new_zeros(shape, dtype=torch.bfloat16)
        for _ in range(num_combines):
            return_rows(exchange, zeros)
    if error is not None:
        raise error
    if weights is None or not brings_weights:
        returned = None if weights is None else received.dispatched.slot_weights
        return Arrived(received=received, weights=returned, sources=None)
    words = [_own_sources(exchange, request.max_tokens), weights.contiguous().view(torch.int32)]
    columns = _send_words(exchange, torch.cat(words, dim=1))
    return Arrived(
        received=received,
        weights=columns[:, 1 : 1 + weights.shape[1]].contiguous().view(torch.float32),
        sources=columns[:, 0].contiguous(),
    )


def send_weights(exchange: RowExchange, topk_weights: Tensor) -> Tensor:
    """Send weights [T, K], float32, along an exchange; [R, K], those of experts of other ranks too.

    Collective: yes.   Host sync: none.
    """
    words = _send_words(exchange, detached(topk_weights).contiguous().view(torch.int32))
    return words[:, : exchange.spec.top_k].contiguous().view(torch.float32)


def send_sources(exchange: RowExchange, max_tokens: int) -> Tensor:
    """Send source rank * M + token of each row; [R], int32. Collective: yes.   Host sync: none."""
    return _send_words(exchange, _own_sources(exchange, max_tokens))[:, 0].contiguous()


def _own_sources(exchange: RowExchange, max_tokens: int) -> Tensor:
    """Return this rank * M + token of its tokens, [T, 1], int32."""
    tokens = torch.arange(exchange.num_tokens, dtype=torch.int32, device=exchange.device)
    return (tokens + exchange.rank * max_tokens).unsqueeze(1)


def _send_words(exchange: RowExchange, words: Tensor) -> Tensor:
    """Send [T, N], int32, in whole vectors, which every buffer carries; [R, N + gap]."""
    return send_columns(exchange, F.pad(words, (0, -words.shape[1] % _VECTOR_WORDS)))
