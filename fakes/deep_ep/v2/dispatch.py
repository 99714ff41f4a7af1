"""Imitate dispatch(): slots at the destination, the exchange, and the handle.

A message is a token for one rank, however many experts of it were chosen. Its slot orders the rows
of one source rank at the destination; the package draws it with an atomic counter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fakes.deep_ep.v2.exchange import agree, exchange_counts, exchange_rows
from fakes.deep_ep.v2.layout import make_handle
from fakes.deep_ep.v2.limits import check_dispatch, check_received_routes
from fakes.deep_ep.v2.placement import place
from fakes.deep_ep.v2.records import Arrived, Dispatched, DispatchRequest, Domain


def run_dispatch(request: DispatchRequest, domain: Domain) -> Dispatched:
    """Send each token once to each rank that holds one of its experts."""
    check_dispatch(request, domain)
    handle = request.handle
    slots = _draw_slots(request, domain) if handle is None else handle.dst_buffer_slot_idx
    arrived = _send(request, domain, slots)
    check_received_routes(arrived.local_idx)
    if handle is None:
        handle = make_handle(request, domain, arrived, slots)
        if request.recv_stats is not None:
            request.recv_stats.add_(handle.num_unaligned_recv_tokens_per_expert)
    return place(request, arrived, handle)


def destinations(topk_idx: Tensor, num_local_experts: int) -> Tensor:
    """Return the rank of each chosen expert, [T, K]; -1 where none was chosen."""
    ranks = topk_idx.div(num_local_experts, rounding_mode="floor")
    return torch.where(topk_idx >= 0, ranks, -1)


def _draw_slots(request: DispatchRequest, domain: Domain) -> Tensor:
    """Draw dst_buffer_slot_idx of a new handle, [T, K], int32."""
    topk_idx, K = request.topk_idx, request.num_topk
    ranks = destinations(topk_idx, request.num_experts // domain.num_ranks)
    slots = torch.full(topk_idx.shape, -1, dtype=torch.int32)
    # Sorted later, expanded rows alone: the order of messages stays open there.
    is_ordered = domain.deterministic and not request.do_expand
    for rank in range(domain.num_ranks):
        is_chosen = ranks == rank
        tokens = is_chosen.any(dim=1).nonzero().flatten()
        first_k = is_chosen[tokens].int().argmax(dim=1) if K else tokens
        order = (
            torch.arange(len(tokens))
            if is_ordered
            else torch.randperm(len(tokens), generator=domain.generator)
        )
        slots[tokens, first_k] = (domain.rank * request.max_tokens + order).int()
    return slots


def _send(request: DispatchRequest, domain: Domain, slots: Tensor) -> Arrived:
    num_local_experts = request.num_experts // domain.num_ranks
    row_bytes = request.x.shape[1] * request.x.element_size()
    num_scale_words = 0 if request.sf is None else request.sf.shape[1]
    has_weights, is_cached = request.topk_weights is not None, request.handle is not None
    shape = [request.max_tokens, request.num_experts, request.num_topk, row_bytes, num_scale_words]
    agree(
        domain.group,
        [*shape, int(has_weights), int(is_cached)],
        "num_max_tokens_per_rank, num_experts, top-k, row size, scales, weights and caching",
    )
    ranks = destinations(request.topk_idx, num_local_experts)
    tokens, ks = (slots >= 0).nonzero(as_tuple=True)
    dst_ranks = ranks[tokens, ks]
    order = (dst_ranks * request.max_tokens * domain.num_ranks + slots[tokens, ks]).argsort()
    tokens = tokens[order]
    send_counts = dst_ranks.bincount(minlength=domain.num_ranks)
    recv_counts = exchange_counts(domain.group, send_counts)
    src_idx = (domain.rank * request.max_tokens + tokens).unsqueeze(1)
    # Scales have any strides and are opaque words; codes have no indexing of their own.
    x = request.x.view(torch.uint8)[tokens]
    optional = [request.sf, request.topk_weights]
    sent = [x, src_idx, request.topk_idx[tokens]] + [
        tensor[tokens] for tensor in optional if tensor is not None
    ]
    received = iter(exchange_rows(domain.group, sent, send_counts, recv_counts))
    recv_x, recv_src, recv_topk = next(received), next(received), next(received)
    sf, weights = (next(received) if tensor is not None else None for tensor in optional)
    local_idx = recv_topk - domain.rank * num_local_experts
    is_local = (local_idx >= 0) & (local_idx < num_local_experts) & (recv_topk >= 0)
    return Arrived(
        x=recv_x.view(request.x.dtype),
        sf=sf,
        topk_weights=weights,
        src_idx=recv_src.flatten(),
        counts=recv_counts,
        local_idx=torch.where(is_local, local_idx, -1),
    )
