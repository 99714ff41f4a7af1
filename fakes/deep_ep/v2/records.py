"""Hold the records that pass between the steps of dispatch() and combine()."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fakes.deep_ep.v2.handle import EPHandle


@dataclass(frozen=True, kw_only=True)
class Domain:
    """The properties that the ranks of a buffer share.

    generator: draws the orders that the package leaves open, and garbage.
    """

    group: dist.ProcessGroup
    rank: int
    num_ranks: int
    num_bytes: int
    allow_multiple_reduction: bool
    deterministic: bool
    generator: torch.Generator


@dataclass(frozen=True, kw_only=True)
class DispatchRequest:
    """One dispatch of T tokens; see ElasticBuffer.dispatch. handle: of the cached routes."""

    x: Tensor
    sf: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor | None
    recv_stats: Tensor | None
    num_experts: int
    max_tokens: int
    expert_alignment: int
    num_sms: int
    handle: EPHandle | None
    do_handle_copy: bool
    do_cpu_sync: bool
    do_expand: bool
    do_zero_padding: bool
    is_sf_col_major: bool

    @property
    def num_topk(self) -> int:
        """K."""
        return self.topk_idx.shape[1]


@dataclass(frozen=True, kw_only=True)
class CombineRequest:
    """One combine; see ElasticBuffer.combine. biases: none to two, [T, H]."""

    x: Tensor
    topk_weights: Tensor | None
    biases: tuple[Tensor, ...]
    handle: EPHandle
    num_sms: int


@dataclass(frozen=True, kw_only=True)
class Arrived:
    """Messages as they lie in this rank's memory: by source rank, then by slot.

    x: [N, H], sf: [N, S] or None, topk_weights: [N, K] or None.
    src_idx: [N], int64, source rank * M + token.   counts: [R], int64, from each rank.
    local_idx: [N, K], int64, experts of this rank; -1 for others.
    """

    x: Tensor
    sf: Tensor | None
    topk_weights: Tensor | None
    src_idx: Tensor
    counts: Tensor
    local_idx: Tensor


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """The results of dispatch(); see ElasticBuffer.dispatch."""

    recv_x: Tensor
    recv_sf: Tensor | None
    recv_topk_idx: Tensor | None
    recv_topk_weights: Tensor | None
    handle: EPHandle


@dataclass(frozen=True, kw_only=True)
class Combined:
    """The results of combine(): [T, H] and [T, K]."""

    x: Tensor
    topk_weights: Tensor | None
