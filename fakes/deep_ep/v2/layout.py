"""Compute the handle of a dispatch: counts, their sums, and the row of each received token."""

from __future__ import annotations

import torch
from torch import Tensor

from fakes.deep_ep.v2.handle import EPHandle
from fakes.deep_ep.v2.poison import garbage_integers
from fakes.deep_ep.v2.records import Arrived, DispatchRequest, Domain
from fakes.deep_ep.v2.sizes import worst_case_expanded_rows

# Columns of recv_src_metadata before the rows of the K experts.
NUM_SOURCE_COLUMNS = 2


def make_handle(
    request: DispatchRequest, domain: Domain, arrived: Arrived, slots: Tensor
) -> EPHandle:
    """Return the routes that were not cached; slots: dst_buffer_slot_idx."""
    num_local_experts = request.num_experts // domain.num_ranks
    alignment = request.expert_alignment
    local_idx = arrived.local_idx
    counts = local_idx[local_idx >= 0].bincount(minlength=num_local_experts)
    aligned = (counts + alignment - 1) // alignment * alignment
    starts = aligned.cumsum(0) - aligned
    worst_case = worst_case_expanded_rows(
        num_ranks=domain.num_ranks,
        max_tokens=request.max_tokens,
        num_topk=request.num_topk,
        num_local_experts=num_local_experts,
        alignment=alignment,
    )
    is_exact = request.do_cpu_sync
    num_recv_tokens = len(local_idx) if is_exact else domain.num_ranks * request.max_tokens
    return EPHandle(
        do_expand=request.do_expand,
        num_experts=request.num_experts,
        expert_alignment=alignment,
        num_max_tokens_per_rank=request.max_tokens,
        num_sms=request.num_sms,
        topk_idx=request.topk_idx.clone() if request.do_handle_copy else request.topk_idx,
        num_recv_tokens=num_recv_tokens,
        num_expanded_tokens=int(aligned.sum()) if is_exact else worst_case,
        num_recv_tokens_per_expert_list=aligned.tolist() if is_exact else [],
        psum_num_recv_tokens_per_scaleup_rank=arrived.counts.cumsum(0).int(),
        # Expanding, an atomic counter runs from the start of each expert through its rows.
        psum_num_recv_tokens_per_expert=(
            starts + counts if request.do_expand else starts + aligned
        ).int(),
        num_unaligned_recv_tokens_per_expert=counts.int(),
        recv_src_metadata=_source_metadata(request, domain, arrived, starts, num_recv_tokens),
        dst_buffer_slot_idx=slots,
        token_metadata_at_forward=None,
        channel_linked_list=None,
    )


def _source_metadata(
    request: DispatchRequest, domain: Domain, arrived: Arrived, starts: Tensor, num_rows: int
) -> Tensor:
    """recv_src_metadata [num_rows, K + 2]: garbage past the messages that came."""
    N, K = arrived.local_idx.shape
    metadata = garbage_integers((num_rows, K + NUM_SOURCE_COLUMNS), torch.int32, domain.generator)
    src_ranks = torch.arange(domain.num_ranks).repeat_interleave(arrived.counts)
    first_k = (arrived.local_idx >= 0).int().argmax(dim=1) if N else src_ranks
    metadata[:N, 0] = arrived.src_idx.int()
    metadata[:N, 1] = (src_ranks * K + first_k).int()
    if request.do_expand:
        rows = _expanded_rows(arrived, starts, domain)
        metadata[:N, NUM_SOURCE_COLUMNS:] = rows.int()
    return metadata


def _expanded_rows(arrived: Arrived, starts: Tensor, domain: Domain) -> Tensor:
    """Return the row of each (message, k) in the expert-major output, [N, K], or -1."""
    rows = torch.full_like(arrived.local_idx, -1)
    for expert, start in enumerate(starts.tolist()):
        messages, ks = (arrived.local_idx == expert).nonzero(as_tuple=True)
        if domain.deterministic:
            order = arrived.src_idx[messages].argsort().argsort()
        else:
            order = torch.randperm(len(messages), generator=domain.generator)
        rows[messages, ks] = start + order
    return rows
