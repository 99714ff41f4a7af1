"""One dispatch of V2 on new routes, and its handle.

An element is the content of a position of a received tensor: a slot if rows are expanded, else a
row. V2 packs elements without gaps between ranks, and after the last one its tensors are undefined.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from epcomm.errors import ConfigError
from epcomm.integrations.deep_ep import normal
from epcomm.integrations.deep_ep.checks import FLOAT32, Check, Dtypes
from epcomm.integrations.deep_ep.layout import layout_of
from epcomm.integrations.deep_ep.ranks import Ranks, Service
from epcomm.quantization.scale_layout import to_column_major
from epcomm.spec import BufferSpec
from epcomm.types import align_up

# The dtypes of x without scales, and with scales.
PLAIN: Dtypes = (torch.bfloat16,)
QUANTIZED: Dtypes = (torch.float8_e4m3fn,)
# 16 B of scale words: the bulk copies of a GEMM start at such a column.
_SCALE_COLUMN_ALIGNMENT_WORDS = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrived:
    """The rows, weights and sources that this rank received in one dispatch.

    weights: [R, K], float32, those of experts of other ranks too, or [C] by slot if rows expand.
    sources: source rank * M + token of each row, [R], int32.
    """

    received: normal.ReceivedRows
    weights: Tensor | None
    sources: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class DispatchRequest:
    """One dispatch of T tokens on new routes; see ElasticBuffer.dispatch.

    topk_idx, num_experts: of these types once check() has passed.
    max_tokens: M.   num_sms: the number that the caller asks for, 0 for any.
    """

    rows: normal.Rows
    topk_idx: Tensor
    topk_weights: Tensor | None
    recv_stats: Tensor | None
    num_experts: int
    max_tokens: int
    expert_alignment: int
    num_sms: int
    do_handle_copy: bool
    do_cpu_sync: bool
    do_expand: bool

    @property
    def service(self) -> Service:
        """NORMAL if sizes are exact and the host waits for them, else STATIC."""
        return Service.NORMAL if self.do_cpu_sync else Service.STATIC

    def check(self, check: Check) -> None:
        """Check the arguments, and set check.spec."""
        check.rows(self.rows, (None, None), PLAIN, QUANTIZED)
        num_tokens, topk_idx, weights = self.rows.x.shape[0], self.topk_idx, self.topk_weights
        num_local = check.num_local_experts(self.num_experts, ConfigError)
        check.size("num_max_tokens_per_rank", self.max_tokens)
        check.size("expert_alignment", self.expert_alignment)
        check.spec = normal.spec_of(
            self.rows.form,
            check.top_k(num_tokens, topk_idx, weights),
            num_local,
            expert_alignment=self.expert_alignment,
            max_tokens=None if self.do_cpu_sync else self.max_tokens,
        )
        check.tensor("topk_idx", topk_idx, (num_tokens, None), (torch.int64,))
        check.num_tokens(num_tokens, "num_max_tokens_per_rank", self.max_tokens)
        check.ids(topk_idx, num_local * check.ranks.size)
        if weights is not None:
            check.tensor("topk_weights", weights, topk_idx.shape, FLOAT32)
        check.recv_stats(self.recv_stats, num_local)

    def send(self, ranks: Ranks, spec: BufferSpec) -> Arrived:
        """Send the tokens, and the number of each, which the handle reports.

        A message of a buffer has one word for each k. The number takes it, and the weights follow
        in a second exchange, because programs read those of other ranks' experts too. Expanded rows
        have no such weights: theirs take the words, and the number follows.

        Collective: yes.   Host sync: one with do_cpu_sync, else none.
        """
        topk_idx, weights = self.topk_idx, self.topk_weights
        options = {
            "num_max_tokens_per_rank": self.max_tokens,
            "has_topk_weights": weights is not None,
            "do_expand": self.do_expand,
        }
        first, num_tokens = ranks.rank * self.max_tokens, topk_idx.shape[0]
        end, device = first + num_tokens, topk_idx.device
        sources = torch.arange(first, end, dtype=torch.int32, device=device).unsqueeze(1)
        # Buffers move the four bytes of a weight unchanged.
        words, has_slot_weights = sources.view(torch.float32).expand_as(topk_idx), False
        if weights is not None and self.do_expand:
            words, has_slot_weights = weights, True
        received = normal.dispatch_rows(
            *(ranks, self.service, self.rows, (topk_idx, words), spec),
            num_sms=self.num_sms or None,
            options=options,
        )
        if has_slot_weights:
            weights = received.dispatched.slot_weights
            sources = normal.send_words(received.exchange, sources).squeeze(1)
        else:
            weights = None if weights is None else normal.send_words(received.exchange, weights)
            # Weights are 0 where the expert is on another rank.
            sources = received.topk_weights.view(torch.int32).amax(1)
        return Arrived(received=received, weights=weights, sources=sources)


@dataclass(frozen=True, kw_only=True, eq=False)
class Positions:
    """The positions of elements in the tensors of the caller. Host sync: none.

    num_elements: the elements that a combine takes.
    element_of_position: [N], int64; None: position p holds element p. Undefined after the last.
    row_of_message: [N'], int64, the row of each received token, which is counted once; None: all
        rows in their order.
    is_used: [N], bool; None: all positions are.
    """

    num_elements: int
    element_of_position: Tensor | None
    row_of_message: Tensor | None
    is_used: Tensor | None

    def to_elements(self, placed: Tensor) -> Tensor:
        if self.element_of_position is None:
            return placed[: self.num_elements]
        elements = placed.new_zeros(self.num_elements, *placed.shape[1:])
        return elements.index_copy_(0, self.element_of_position, placed)

    def from_elements(self, elements: Tensor) -> Tensor:
        order = self.element_of_position
        return elements if order is None else _select(elements, order)

    def fill_padding(self, tensor: Tensor | None) -> None:
        """Write zeros to the positions, [N, ...], that hold no element."""
        if tensor is None or self.is_used is None:
            return
        tensor = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
        tensor.masked_fill_((~self.is_used).view(-1, *[1] * (tensor.dim() - 1)), 0)


class EPHandle(normal.Uncopied):
    """The routes of one dispatch: W ranks of M tokens at most, T of them here; L local experts.

    Reading, printing and comparing a handle are local. It lives as long as it is held, and any
    number of combines and dispatches go along it. Programs may set its fields of counts, which no
    call reads.

    do_expand: rows are one for each (token, expert), else one for each (token, rank).
    topk_idx: [T, K] of this rank's tokens, a copy unless do_handle_copy was False.
    num_recv_tokens: received tokens N, each counted once; without CPU sync W * M.
    num_expanded_tokens: sum of the aligned counts of experts; without CPU sync the worst case.
    num_recv_tokens_per_expert_list: the aligned counts, on the host; empty without CPU sync.
    psum_num_recv_tokens_per_scaleup_rank: [W], int32, inclusive sums over source ranks, exact.
    psum_num_recv_tokens_per_expert: [L], int32. Rows: inclusive sums of the aligned counts.
        Expanded: the aligned counts of earlier experts plus the real count of this one.
    num_unaligned_recv_tokens_per_expert: [L], int32, the real counts.
    token_metadata_at_forward, channel_linked_list: None, because they are for several hosts.

    These fields are not in the package:
    exchange: of the rows.   index: of the slots over the rows.
    sources: source rank * M + token of each row, [R], int32.
    local_ids: [R, K], int64, experts of this rank or -1.   is_row: [R], bool, received rows; None:
        all rows were received.
    positions: those of the received rows.
    """

    def __init__(self, request: DispatchRequest, arrived: Arrived, num_sms: int) -> None:
        """Describe what arrived. Host sync: none."""
        received = arrived.received
        num_ranks = received.exchange.ranks.size
        self.exchange, self.index = received.exchange, received.dispatched.index
        self.local_ids, self.sources = received.topk_ids, arrived.sources
        self.is_row = None if request.do_cpu_sync else (received.topk_ids >= 0).any(1)
        self.do_expand = request.do_expand
        self.num_experts = self.exchange.spec.num_local_experts * num_ranks
        self.expert_alignment = request.expert_alignment
        self.num_max_tokens_per_rank = request.max_tokens
        self.num_sms = num_sms
        self.topk_idx = request.topk_idx.clone() if request.do_handle_copy else request.topk_idx
        # With static sizes this is the largest number of rows that can arrive.
        most = num_ranks * request.max_tokens
        self.num_recv_tokens = self.exchange.num_rows if self.is_row is None else most
        self.num_expanded_tokens = self.row_of_slot.shape[0]
        self.num_recv_tokens_per_expert_list = [
            align_up(count, request.expert_alignment) for count in received.num_tokens_per_expert
        ]
        counts, starts = self.index.num_tokens_per_expert, self.index.first_slot
        if self.is_row is None:
            rows_from = self.exchange.exchange_plan.rows_from_ranks()
        else:
            # Each rank has the same number of rows.
            rows_from = self.is_row.view(num_ranks, -1).sum(1)
        self.psum_num_recv_tokens_per_scaleup_rank = rows_from.cumsum(0).to(torch.int32)
        ends = starts[:-1] + counts if self.do_expand else starts[1:].clone()
        self.psum_num_recv_tokens_per_expert = ends
        self.num_unaligned_recv_tokens_per_expert = counts
        self.token_metadata_at_forward: Tensor | None = None
        self.channel_linked_list: Tensor | None = None
        self.positions = self.positions_of(do_expand=self.do_expand)

    def positions_of(self, *, do_expand: bool) -> Positions:
        """Return the positions of received elements, in the order of (source rank, token)."""
        messages, is_used, most = None, None, self.num_recv_tokens
        if self.is_row is not None:
            messages = torch.argsort(~self.is_row, stable=True)[:most]
            is_used = torch.arange(most, device=messages.device) < self.is_row.sum()
        if do_expand:
            return Positions(
                num_elements=self.row_of_slot.shape[0],
                element_of_position=None,
                row_of_message=messages,
                is_used=self.row_of_slot >= 0,
            )
        return Positions(
            num_elements=self.exchange.num_rows,
            element_of_position=messages,
            row_of_message=messages,
            is_used=is_used,
        )

    @property
    def row_of_slot(self) -> Tensor:
        """The row of each slot, [C], int32, -1 for padding."""
        assert self.index.row_of_slot is not None, "rows have an index over them"
        return self.index.row_of_slot

    @property
    def slots_of_row(self) -> Tensor:
        """The slots of each row, [R, K], int32, -1 for none."""
        assert self.index.slots_of_row is not None, "rows have an index over them"
        return self.index.slots_of_row

    @cached_property
    def recv_src_metadata(self) -> Tensor:
        """The source of each received token, [N, K + 2], int32.

        Source rank * M + token; source rank * K + first k that chose this rank; then, expanded, the
        row of each k or -1. After the received tokens, and in the K columns of rows that are not
        expanded, it is undefined.

        A program may set it, or write into it, to name other rows of the tensor that combine takes:
        N' <= N lines, in the order of the received tokens; tokens without a line add nothing.

        Computed at the first read. Local.   Host sync: none.
        """
        sources, is_here = self.sources.unsqueeze(1), self.local_ids >= 0
        first_k = is_here.to(torch.int32).argmax(1, keepdim=True)
        choice = sources // self.num_max_tokens_per_rank * is_here.shape[1] + first_k
        table = torch.cat([sources, choice.to(torch.int32), self.slots_of_row], dim=1)
        rows = self.positions.row_of_message
        return table if rows is None else table[rows]

    def named_slots(self) -> Tensor | None:
        """Return the rows that recv_src_metadata names for each received row, [R, K], int32.

        -1 for none. None: no program has read or set it. Host sync: none.
        """
        table = vars(self).get("recv_src_metadata")
        if table is None:
            return None
        rows = self.positions.row_of_message
        # The first two columns, which name the source, do not change.
        slots = table[:, 2:]
        named = slots.new_full(self.local_ids.shape, -1)
        named[slice(len(slots)) if rows is None else rows[: len(slots)]] = slots
        # Lines after those of the received tokens are undefined.
        return named if self.is_row is None else named.masked_fill_(~self.is_row[:, None], -1)

    @cached_property
    def dst_buffer_slot_idx(self) -> Tensor:
        """The position of each token among those for the rank of k, [T, K], int32.

        Rank * M + the number of the token; -1 at all k of a rank but the first.
        """
        topk_idx, num_ranks = self.topk_idx, self.exchange.ranks.size
        _, _, is_in_rank = layout_of(topk_idx, self.num_experts, num_ranks)
        numbers = is_in_rank.cumsum(0) - 1 + self.exchange.ranks.rank * self.num_max_tokens_per_rank
        ranks = topk_idx.div(self.num_experts // num_ranks, rounding_mode="floor")
        is_again = (ranks.unsqueeze(2) == ranks.unsqueeze(1)).tril(-1).any(2)
        found = numbers.gather(1, ranks.clamp(min=0))
        return torch.where(is_again | (topk_idx < 0), -1, found).to(torch.int32)

    def place_rows(
        self, rows: normal.Rows, positions: Positions, *, do_expand: bool, is_sf_col_major: bool
    ) -> normal.Rows:
        """Return received rows [R, H] and their scales at positions, [N, H]."""
        order = positions.element_of_position
        if do_expand:
            order = positions.from_elements(self.row_of_slot).clamp(min=0)
        if order is not None:
            scales = None if rows.scales is None else _select(rows.scales, order)
            rows = normal.Rows(x=_select(rows.x, order), scales=scales)
        if not is_sf_col_major or rows.scales is None:
            return rows
        scales = to_column_major(rows.scales, _SCALE_COLUMN_ALIGNMENT_WORDS)
        return normal.Rows(x=rows.x, scales=scales)


def _select(rows: Tensor, index: Tensor) -> Tensor:
    """Select rows; torch cannot index eight-bit floats, which are viewed as bytes."""
    if rows.shape[0] == 0:
        # No row arrived, and the positions hold only padding.
        return rows.new_zeros(index.shape[0], *rows.shape[1:])
    movable = rows.view(torch.uint8) if rows.itemsize == 1 else rows
    return movable.index_select(0, index).view(rows.dtype)
