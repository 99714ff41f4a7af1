"""Imitate the handle of dispatch(), for combine() and for a cached dispatch()."""

from __future__ import annotations

import torch
from torch import Tensor

topk_idx_t = torch.int64


class EPHandle:
    """The routes of one dispatch. R ranks of M tokens at most, T of them here; L local experts.

    do_expand: rows are one for each (token, expert), else one for each (token, rank).
    topk_idx: [T, K] of this rank's tokens, a copy unless do_handle_copy was False.
    num_recv_tokens: received tokens N, each counted once; without CPU sync R * M.
    num_expanded_tokens: sum of the aligned counts of experts; without CPU sync the worst case.
    num_recv_tokens_per_expert_list: the aligned counts, on the host; empty without CPU sync.
    psum_num_recv_tokens_per_scaleup_rank: [R], int32, inclusive sums over source ranks, exact.
    psum_num_recv_tokens_per_expert: [L], int32. Rows: inclusive sums of the aligned counts.
        Expanded: the aligned counts of earlier experts plus the real count of this one.
    num_unaligned_recv_tokens_per_expert: [L], int32, the real counts.
    recv_src_metadata: [N, K + 2], int32: source rank * M + token; source rank * K + first k that
        chose this rank; then, expanded, the row of each k or -1 (rows: garbage).
    dst_buffer_slot_idx: [T, K], int32: this rank * M + slot at the destination, given to the
        first k of a rank; -1 at others.
    token_metadata_at_forward, channel_linked_list: None, they belong to the hybrid mode.
    """

    def __init__(
        self,
        do_expand: bool,
        num_experts: int,
        expert_alignment: int,
        num_max_tokens_per_rank: int,
        num_sms: int,
        topk_idx: Tensor,
        num_recv_tokens: int,
        num_expanded_tokens: int,
        num_recv_tokens_per_expert_list: list[int],
        psum_num_recv_tokens_per_scaleup_rank: Tensor,
        psum_num_recv_tokens_per_expert: Tensor,
        num_unaligned_recv_tokens_per_expert: Tensor,
        recv_src_metadata: Tensor,
        dst_buffer_slot_idx: Tensor,
        token_metadata_at_forward: Tensor | None,
        channel_linked_list: Tensor | None,
    ) -> None:
        self.do_expand = do_expand
        self.num_experts = num_experts
        self.expert_alignment = expert_alignment
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_sms = num_sms
        self.topk_idx = topk_idx
        self.num_recv_tokens = num_recv_tokens
        self.num_expanded_tokens = num_expanded_tokens
        self.num_recv_tokens_per_expert_list = num_recv_tokens_per_expert_list
        self.psum_num_recv_tokens_per_scaleup_rank = psum_num_recv_tokens_per_scaleup_rank
        self.psum_num_recv_tokens_per_expert = psum_num_recv_tokens_per_expert
        self.num_unaligned_recv_tokens_per_expert = num_unaligned_recv_tokens_per_expert
        self.recv_src_metadata = recv_src_metadata
        self.dst_buffer_slot_idx = dst_buffer_slot_idx
        self.token_metadata_at_forward = token_metadata_at_forward
        self.channel_linked_list = channel_linked_list
