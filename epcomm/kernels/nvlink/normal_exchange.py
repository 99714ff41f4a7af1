"""Arguments of the launchers of the kernels of normal mode over NVLink."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from epcomm.kernels.nvlink.common.epochs import STATE_WORDS
from epcomm.kernels.nvlink.common.exchange import PeerBlocks
from epcomm.kernels.nvlink.common.layout import MemoryLayout, NormalLayout
from epcomm.kernels.nvlink.normal_plan import GROUP_TOKENS, GROUP_WORDS
from epcomm.kernels.prepared import PreparedLaunch


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanMemory:
    """The workspace of this rank in which its programs plan and index, see plan_tokens().

    num_groups: of tokens that a program plans, at most.
    scratch, bits, counted: of plan_tokens().   bases: [P, W * L], int32, both padded to powers
        of two, of index_rows().
    """

    num_groups: int
    scratch: Tensor
    bits: Tensor
    counted: Tensor
    bases: Tensor

    @classmethod
    def of(cls, layout: MemoryLayout, num_programs: int, device: torch.device) -> PlanMemory:
        """Return zeros for the tokens of a block, a run of them for each program."""
        ranks, experts = layout.world_lanes, layout.expert_lanes
        run = -(-layout.max_tokens // num_programs)
        num_groups = max(1, -(-run // GROUP_TOKENS))

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(num_programs, *shape, dtype=torch.int32, device=device)

        return cls(
            num_groups=num_groups,
            scratch=zeros(experts + ranks + 1),
            bits=zeros(num_groups, experts + ranks, GROUP_WORDS),
            counted=zeros(),
            bases=zeros(ranks * layout.local_lanes),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class NormalExchange:
    """The memory of all ranks in normal mode.

    peers: with the counters [5]: headers, rows of dispatches and of cached dispatches, sums, sums
        with scalars.
    state: [STATE_WORDS], int32, see common/epochs.py.
    launches: prepared, by kernel and by all that its constants depend on.
    """

    peers: PeerBlocks[NormalLayout]
    state: Tensor
    plan: PlanMemory
    launches: dict[Hashable, PreparedLaunch] = field(default_factory=dict)

    @classmethod
    def of(cls, peers: PeerBlocks[NormalLayout]) -> NormalExchange:
        """Return an exchange in its first state."""
        device = peers.table.device
        return cls(
            peers=peers,
            state=torch.zeros(STATE_WORDS, dtype=torch.int32, device=device),
            plan=PlanMemory.of(peers.layout, peers.num_programs, device),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Sends:
    """The places to which the tokens of this rank go, [T, W] and [T, K] in one dimension or two.

    places: [T * W], int32: token t is row places[t * W + d] of this rank on rank d, or -1.
    positions: [T * K], int32: earlier entries of this rank with the same expert.
    owners: [T * K], int32: the rank of the expert, or -1.
    """

    places: Tensor
    positions: Tensor
    owners: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrivals:
    """The rows that came from each rank, on the device.

    rows_from: [W], int32.
    row_base: [W], int32: where the rows of a rank begin in the index.
    has_failed: [1], int32, not 0 if the dispatch was refused.
    """

    rows_from: Tensor
    row_base: Tensor
    has_failed: Tensor
