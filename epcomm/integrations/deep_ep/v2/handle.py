"""The handle of a dispatch of an ElasticBuffer: for its combine, and for dispatches along it."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from epcomm.integrations.deep_ep.layout import layout_of
from epcomm.integrations.deep_ep.v2.exchange import Arrived, DispatchRequest
from epcomm.integrations.deep_ep.v2.places import Places
from epcomm.types import align_up


class EPHandle:
    """The routes of one dispatch: W ranks of M tokens at most, T of them here; L local experts.

    It lives as long as it is held, needs no close, and any number of combines and dispatches go
    along it. Programs may set its fields of counts; no call reads those. The columns of rows of
    recv_src_metadata, which a program may read, write and set, are what combine reads.

    do_expand: rows are one for each (token, expert), else one for each (token, rank).
    topk_idx: [T, K] of this rank's tokens, a copy unless do_handle_copy was False.
    num_recv_tokens: received tokens N, each counted once; without CPU sync W * M.
    num_expanded_tokens: sum of the aligned counts of experts; without CPU sync the worst case.
    num_recv_tokens_per_expert_list: the aligned counts, on the host; empty without CPU sync.
    psum_num_recv_tokens_per_scaleup_rank: [W], int32, inclusive sums over source ranks, exact.
    psum_num_recv_tokens_per_expert: [L], int32. Rows: inclusive sums of the aligned counts.
        Expanded: the aligned counts of earlier experts plus the real count of this one.
    num_unaligned_recv_tokens_per_expert: [L], int32, the real counts.
    token_metadata_at_forward, channel_linked_list: None, they belong to several hosts.
    arrived, places: what came, and where it lies; they are not of the package.
    """

    def __init__(
        self,
        request: DispatchRequest,
        arrived: Arrived,
        places: Places,
        num_tokens_per_expert: tuple[int, ...],
    ) -> None:
        """Describe what arrived, and where it lies. Host sync: none.

        num_tokens_per_expert: the real counts, on the host; empty without CPU sync.
        """
        self.arrived, self.places = arrived, places
        self.do_expand = request.do_expand
        self.num_experts = request.num_experts
        self.expert_alignment = request.expert_alignment
        self.num_max_tokens_per_rank = request.max_tokens
        self.num_sms = request.num_sms
        self.topk_idx = request.topk_idx.clone() if request.do_handle_copy else request.topk_idx
        self.num_recv_tokens = arrived.most_messages
        self.num_expanded_tokens = arrived.row_of_slot.shape[0]
        self.num_recv_tokens_per_expert_list = [
            align_up(count, request.expert_alignment) for count in num_tokens_per_expert
        ]
        counts, starts = arrived.index.num_tokens_per_expert, arrived.index.first_slot
        ends = starts[:-1] + counts if self.do_expand else starts[1:].clone()
        self.psum_num_recv_tokens_per_scaleup_rank = arrived.ends_of_ranks()
        self.psum_num_recv_tokens_per_expert = ends
        self.num_unaligned_recv_tokens_per_expert = counts
        self.token_metadata_at_forward: Tensor | None = None
        self.channel_linked_list: Tensor | None = None

    @cached_property
    def recv_src_metadata(self) -> Tensor:
        """The source of each received token, [N, K + 2], int32.

        Source rank * M + token; source rank * K + first k that chose this rank; then, expanded, the
        row of each k or -1. Behind the received tokens, and in the K columns of rows that are not
        expanded, it is undefined.

        A program may set it, or write into it, to name other rows of the tensor that combine takes:
        N' <= N lines, in the order of the received tokens; tokens without a line add nothing.

        Collective: at the first read, for rows that expand or came without weights: all ranks read
        it at the same place. Later reads are local.
        """
        arrived, rows = self.arrived, self.places.row_of_message
        sources, is_here = arrived.sources.unsqueeze(1), arrived.topk_ids >= 0
        top_k = is_here.shape[1]
        first_k = is_here.to(torch.int32).argmax(1, keepdim=True)
        choice = sources // arrived.max_tokens * top_k + first_k
        table = torch.cat([sources, choice.to(torch.int32), self._places_of_entries()], dim=1)
        return table if rows is None else table[rows]

    @property
    def known_metadata(self) -> Tensor | None:
        """Return recv_src_metadata, None where no program has read or set it. Local."""
        return vars(self).get("recv_src_metadata")

    def named_slots(self) -> Tensor | None:
        """Return the combined rows that recv_src_metadata names for each received row, [R, K].

        int32, -1 for none. None: no program has read or set it, and so none has changed it.
        Host sync: none.
        """
        table = self.known_metadata
        if table is None:
            return None
        arrived, rows = self.arrived, self.places.row_of_message
        # The first two columns, which name the source, do not change.
        slots = table[:, 2:]
        named = slots.new_full(arrived.topk_ids.shape, -1)
        if rows is None:
            named[: len(slots)] = slots
        else:
            named[rows[: len(slots)]] = slots
        # Lines behind the tokens that came are undefined.
        return named if arrived.is_row is None else named.masked_fill_(~arrived.is_row[:, None], -1)

    @cached_property
    def dst_buffer_slot_idx(self) -> Tensor:
        """The place of each token among those for a rank, [T, K], int32.

        This rank * M + the number of the token among those for the same rank, given to the first k
        of that rank; -1 at others.
        """
        arrived, topk_idx = self.arrived, self.topk_idx
        is_in_rank = layout_of(topk_idx, self.num_experts, arrived.num_ranks).is_in_rank
        numbers = is_in_rank.cumsum(0) - 1 + arrived.rank * arrived.max_tokens
        ranks = topk_idx.div(self.num_experts // arrived.num_ranks, rounding_mode="floor")
        is_again = (ranks.unsqueeze(2) == ranks.unsqueeze(1)).tril(-1).any(2)
        found = numbers.gather(1, ranks.clamp(min=0))
        return torch.where(is_again | (topk_idx < 0), -1, found).to(torch.int32)

    def _places_of_entries(self) -> Tensor:
        """Return the place of each (row, k), [R, K], int32, -1 for none."""
        slots, order = self.arrived.slots_of_row, self.places.element_of_place
        if not self.do_expand or order is None:
            return slots
        place_of_slot = torch.empty_like(order)
        place_of_slot[order] = torch.arange(order.shape[0], device=order.device)
        if slots.numel() == 0:
            return slots
        found = place_of_slot[slots.clamp(min=0).long()]
        return torch.where(slots >= 0, found, -1).to(torch.int32)
