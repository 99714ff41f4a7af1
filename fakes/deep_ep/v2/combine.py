"""Imitate combine(): the unweighted sum over ranks of the results for a token's rows.

Sums are float32. Expanded rows of one token are summed and rounded to bfloat16 at their rank first,
unless the buffer forbids multiple reductions; then each travels, and there is one rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fakes.deep_ep.v2.dispatch import destinations
from fakes.deep_ep.v2.exchange import exchange_counts, exchange_rows
from fakes.deep_ep.v2.handle import EPHandle
from fakes.deep_ep.v2.layout import NUM_SOURCE_COLUMNS
from fakes.deep_ep.v2.limits import check_combine
from fakes.deep_ep.v2.records import Combined, CombineRequest, Domain


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """Parts of tokens: rows [P, H], the token of each and the k of its expert, [P]; weights."""

    rows: Tensor
    tokens: Tensor
    ks: Tensor
    weights: Tensor | None


def run_combine(request: CombineRequest, domain: Domain) -> Combined:
    """Send rows back to where their tokens came from, and sum them there."""
    check_combine(request, domain)
    handle = request.handle
    num_topk = handle.topk_idx.shape[1]
    # The exact number, also where the host never learned it; rows past it are undefined.
    num_messages = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
    metadata = handle.recv_src_metadata[:num_messages].long()
    parts, messages = _parts_of(request, domain, metadata)
    counts = (metadata[messages, 1] // num_topk).bincount(minlength=domain.num_ranks)
    recv_counts = exchange_counts(domain.group, counts)
    sent = [parts.rows, parts.tokens.unsqueeze(1), parts.ks.unsqueeze(1)]
    sent += [] if parts.weights is None else [parts.weights]
    rows, tokens, ks, *weights = exchange_rows(domain.group, sent, counts, recv_counts)
    received = _Parts(
        rows=rows,
        tokens=tokens.flatten(),
        ks=ks.flatten(),
        weights=weights[0] if weights else None,
    )
    return Combined(
        x=_sum(received, request),
        topk_weights=_weights_of_owners(received, handle, recv_counts, domain),
    )


def _parts_of(request: CombineRequest, domain: Domain, metadata: Tensor) -> tuple[_Parts, Tensor]:
    """Return the parts that travel, and the message of each part, in order of messages."""
    handle, x = request.handle, request.x
    num_topk = handle.topk_idx.shape[1]
    tokens = metadata[:, 0] % handle.num_max_tokens_per_rank
    messages = torch.arange(len(metadata))
    ks = metadata[:, 1] % num_topk
    weights = None if request.topk_weights is None else request.topk_weights[: len(metadata)]
    if not handle.do_expand:
        return _Parts(rows=x[: len(metadata)], tokens=tokens, ks=ks, weights=weights), messages
    row_of = metadata[:, NUM_SOURCE_COLUMNS:]
    if domain.allow_multiple_reduction:
        return _Parts(rows=_local_sums(x, row_of), tokens=tokens, ks=ks, weights=None), messages
    messages, ks = (row_of >= 0).nonzero(as_tuple=True)
    rows = x[row_of[messages, ks]]
    return _Parts(rows=rows, tokens=tokens[messages], ks=ks, weights=None), messages


def _local_sums(x: Tensor, row_of: Tensor) -> Tensor:
    """Return the rows of each message summed in order of k, rounded once: [N, H]."""
    sums = torch.zeros(len(row_of), x.shape[1])
    for rows in row_of.unbind(1):
        is_here = rows >= 0
        sums[is_here] += x[rows[is_here]].float()
    return sums.to(x.dtype)


def _sum(parts: _Parts, request: CombineRequest) -> Tensor:
    """All parts of each token, in order of k, and the biases: [T, H]."""
    num_tokens, num_topk = request.handle.topk_idx.shape
    sums = torch.zeros(num_tokens, request.x.shape[1])
    for bias in request.biases:
        sums += bias.float()
    for k in range(num_topk):
        is_kth = parts.ks == k
        sums[parts.tokens[is_kth]] += parts.rows[is_kth].float()
    return sums.to(request.x.dtype)


def _weights_of_owners(
    parts: _Parts, handle: EPHandle, recv_counts: Tensor, domain: Domain
) -> Tensor | None:
    """Return the weight that each expert's rank sent, [T, K], 0 where it sent none."""
    if parts.weights is None:
        return None
    owners = destinations(handle.topk_idx, handle.num_experts // domain.num_ranks)
    senders = torch.arange(domain.num_ranks).repeat_interleave(recv_counts)
    part_ids, ks = (owners[parts.tokens] == senders.unsqueeze(1)).nonzero(as_tuple=True)
    combined = torch.zeros(handle.topk_idx.shape, dtype=parts.weights.dtype)
    combined[parts.tokens[part_ids], ks] = parts.weights[part_ids, ks]
    return combined
