"""One dispatch of V2 on new routes, and the words that travel along it, on epcomm's buffers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from epcomm.errors import ConfigError
from epcomm.integrations.deep_ep.checks import FLOAT32, Check, Dtypes
from epcomm.integrations.deep_ep.normal import (
    ReceivedRows,
    RowExchange,
    Rows,
    detached,
    dispatch_rows,
    send_columns,
    spec_of,
)
from epcomm.integrations.deep_ep.ranks import Options, Ranks, Service
from epcomm.spec import BufferSpec

# The dtypes of x without scales, and with scales.
PLAIN: Dtypes = (torch.bfloat16,)
QUANTIZED: Dtypes = (torch.float8_e4m3fn,)
# 16 B, in words of an int32.
_VECTOR_WORDS = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class DispatchRequest:
    """One dispatch of T tokens on new routes; see ElasticBuffer.dispatch.

    max_tokens: M.   num_sms: the number that the caller asks for, 0 for any.
    """

    rows: Rows
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    recv_stats: Tensor | None
    num_experts: int | None
    max_tokens: int
    expert_alignment: int
    num_sms: int
    do_handle_copy: bool
    do_cpu_sync: bool
    do_expand: bool

    @property
    def service(self) -> Service:
        """NORMAL where sizes are exact, and the host waits for them."""
        return Service.NORMAL if self.do_cpu_sync else Service.STATIC

    @property
    def has_words(self) -> bool:
        """Whether weights, and sources with them, travel in an exchange of their own.

        These are weights of experts of other ranks, with which rows that do not expand return.
        """
        return self.topk_weights is not None and not self.do_expand

    def checked_spec(self, check: Check) -> BufferSpec:
        """Check the arguments that a buffer depends on."""
        check.rows(self.rows, (None, None), PLAIN, QUANTIZED)
        check.topk_idx(self.topk_idx, self.rows.x.shape[0], (torch.int64,))
        check.experts(self.num_experts, ConfigError)
        check.size("num_max_tokens_per_rank", self.max_tokens)
        check.size("expert_alignment", self.expert_alignment)
        assert self.topk_idx is not None, "just checked"
        assert self.num_experts is not None, "just checked"
        return spec_of(
            self.rows.form,
            self.topk_idx.shape[1],
            self.num_experts // check.ranks.size,
            expert_alignment=self.expert_alignment,
            max_tokens=None if self.do_cpu_sync else self.max_tokens,
            num_sms=self.num_sms or None,
        )

    def check(self, check: Check, spec: BufferSpec) -> None:
        """Check the other arguments."""
        topk_idx = self.routes
        check.num_tokens(self.rows.x.shape[0], "num_max_tokens_per_rank", self.max_tokens)
        check.ids(topk_idx, spec.num_local_experts * check.ranks.size)
        if self.topk_weights is not None:
            check.tensor("topk_weights", self.topk_weights, topk_idx.shape, FLOAT32)
        check.recv_stats(self.recv_stats, spec.num_local_experts)

    @property
    def routes(self) -> Tensor:
        """topk_idx, which was checked."""
        assert self.topk_idx is not None, "it was checked"
        return self.topk_idx


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrived:
    """What one dispatch brought to this rank.

    weights: [R, K], float32, those of experts of other ranks too, or [C] by slot if rows expand;
        None where none were given.
    sources: source rank * M + token of each row, [R], int32; None: they are sent when they are
        read.
    """

    received: ReceivedRows
    weights: Tensor | None
    sources: Tensor | None


def send_request(ranks: Ranks, request: DispatchRequest, spec: BufferSpec) -> Arrived:
    """Send the tokens of a request.

    Collective: yes.   Host sync: one with do_cpu_sync, else none.
    Raises:
        ShapeError, CapacityError: some rank refuses its call; on every rank with do_cpu_sync and on
            CPUs, else there alone, and the other ranks get NaN from combine.
    """
    topk_idx, weights = request.routes, request.topk_weights
    options = Options(
        num_max_tokens_per_rank=request.max_tokens,
        has_topk_weights=weights is not None,
        do_expand=request.do_expand,
    )
    sent = torch.zeros_like(topk_idx, dtype=torch.float32) if weights is None else weights
    topk = topk_idx, sent
    received = dispatch_rows(ranks, request.service, request.rows, topk, spec, options=options)
    exchange = received.exchange
    if request.service.is_static and ranks.reads_faults:
        exchange.buffer.check()
    if weights is None or not request.has_words:
        weights = None if weights is None else received.dispatched.slot_weights
        return Arrived(received=received, weights=weights, sources=None)
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
