"""Arguments of the launchers of the kernels of normal mode over NVLink."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from epcomm.kernels.cuda_jit import CudaKernel
from epcomm.kernels.nvlink.common.epochs import STATE_WORDS
from epcomm.kernels.nvlink.common.exchange import PeerBlocks
from epcomm.kernels.nvlink.common.layout import MemoryLayout, NormalLayout
from epcomm.kernels.nvlink.normal_plan import GROUP_TOKENS, GROUP_WORDS
from epcomm.kernels.prepared import PreparedLaunch
from epcomm.platforms.cuda import num_sms_of


def scratch_words(layout: MemoryLayout) -> int:
    """Return what a program tells later ones: counts of experts and ranks, and of bad ids."""
    return layout.expert_lanes + layout.world_lanes + 1


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
            scratch=zeros(scratch_words(layout)),
            bits=zeros(num_groups, experts + ranks, GROUP_WORDS),
            counted=zeros(),
            bases=zeros(ranks * layout.local_lanes),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedCuda:
    """A kernel in CUDA C++, with the arguments that are those of every call."""

    kernel: CudaKernel
    num_blocks: int
    arguments: ctypes.Structure


@dataclass(frozen=True, kw_only=True, eq=False)
class NormalExchange:
    """The memory of all ranks in normal mode.

    peers: with the counters [5]: headers, rows of dispatches and of cached dispatches, sums, sums
        with scalars.
    state: [STATE_WORDS + N], int32, see common/epochs.py.
    is_cpp: dispatch is that of dispatch_cuda, on all ranks.
    num_copiers: programs that copy rows out of a receive buffer. Where dispatch has waited for the
        rows, no copier waits for anything, and there is one for each SM.
    launches: prepared, by kernel and by all that its constants depend on.   cpp_launches: those in
        CUDA C++, by kind of rows.
    """

    peers: PeerBlocks[NormalLayout]
    state: Tensor
    plan: PlanMemory
    is_cpp: bool
    num_copiers: int
    launches: dict[Hashable, PreparedLaunch] = field(default_factory=dict)
    cpp_launches: dict[Hashable, PreparedCuda] = field(default_factory=dict)

    @classmethod
    def of(cls, peers: PeerBlocks[NormalLayout], *, is_cpp: bool = False) -> NormalExchange:
        """Return an exchange in its first state."""
        device = peers.table.device
        return cls(
            peers=peers,
            state=torch.zeros(
                STATE_WORDS + peers.layout.num_buffers, dtype=torch.int32, device=device
            ),
            plan=PlanMemory.of(peers.layout, peers.num_programs, device),
            is_cpp=is_cpp,
            num_copiers=num_sms_of(device) if is_cpp else peers.num_programs,
        )
