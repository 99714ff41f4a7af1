"""The memory of all ranks and the loaded kernels, which the launchers of normal mode share."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from typing import Self, TypeVar

import torch
from torch import Tensor

from epcomm.kernels.nvlink.common.exchange import PeerBlocks
from epcomm.kernels.nvlink.common.layout import MemoryLayout, NormalLayout
from epcomm.kernels.nvlink.normal import program
from epcomm.kernels.nvlink.normal.program import LoadedKernel, Program
from epcomm.platforms.cuda import num_sms_of

FormT = TypeVar("FormT", bound=Hashable)


class State(IntEnum):
    """Positions in the state of a rank.

    Kernels count the epochs themselves, so that a graph may be replayed.
    """

    DISPATCH_EPOCH = 0
    COMBINE_EPOCH = 1
    # Blocks that have left each.
    DISPATCH_LEFT = 2
    COMBINE_LEFT = 3
    # Tokens that reducers have taken.
    COMBINE_TOKENS = 4
    # Whether a block of the dispatch timed out.
    DISPATCH_LOST = 5
    # From here on, the mark of the dispatch that each receive buffer holds, see mark_of().
    BUFFER_MARKS = 6


def scratch_words(layout: MemoryLayout) -> int:
    """Return the words that a block releases to later blocks: counts, and whether ids are bad."""
    return layout.world_size * layout.num_local_experts + layout.world_size + 1


def constants_of(layout: NormalLayout) -> dict[str, int]:
    """Return the constants of the kernels: numbers of a layout, and positions in the state."""
    return {
        "WORLD": layout.world_size,
        "LOCAL": layout.num_local_experts,
        "TOP_K": layout.top_k,
        "K_LANES": layout.metadata_words,
        "MAX_TOKENS": layout.max_tokens,
        "GROUPS": layout.groups,
        "ITEM_ROWS": layout.item_rows,
        "ITEMS": layout.num_items,
        "SCRATCH_WORDS": scratch_words(layout),
        "BUFFERS_AT": layout.buffers_at,
        "BUFFER_BYTES": layout.buffer_bytes,
        "HEADER_BYTES": layout.header_bytes,
        "METADATA_BYTES": layout.metadata_bytes,
        "DATA_BYTES": layout.data_bytes,
        "SCALE_BYTES": layout.scale_bytes,
        "RETURN_BYTES": layout.return_bytes,
        **{f"{name.upper()}_AT": offset for name, offset in layout.offsets.items()},
        **{each.name: int(each) for each in State},
    }


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedKernel:
    """A loaded kernel, its blocks, and the arguments that are those of every call."""

    kernel: LoadedKernel
    num_blocks: int
    arguments: ctypes.Structure

    def blocks(self, num_sms: int | None) -> int:
        """Return the blocks of a call that may take num_sms SMs; None: no limit for this call."""
        return min(num_sms or self.num_blocks, self.num_blocks)


@dataclass(frozen=True, kw_only=True, eq=False)
class NormalExchange:
    """The memory of all ranks in normal mode.

    peers: with the counters [8]: headers, rows of dispatches and of cached dispatches, sums, sums
        with scalars, quantised sums, quantised gradients with scalars, other quantised gradients.
    state: [BUFFER_MARKS + N], int32, see State.
    scratch: [P, scratch_words()], int32, in which blocks report counts to later blocks.
    counted: [P], int32: the dispatch of which a block has reported.
    launches: prepared, by all that the constants of a kernel depend on besides the layout.
    """

    peers: PeerBlocks[NormalLayout]
    state: Tensor
    scratch: Tensor
    counted: Tensor
    launches: dict[Hashable, PreparedKernel] = field(default_factory=dict)

    @classmethod
    def of(cls, peers: PeerBlocks[NormalLayout]) -> Self:
        """Return an exchange in its first state."""
        num_blocks = peers.num_programs

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=peers.table.device)

        return cls(
            peers=peers,
            state=zeros(State.BUFFER_MARKS + peers.layout.num_buffers),
            scratch=zeros(num_blocks, scratch_words(peers.layout)),
            counted=zeros(num_blocks),
        )

    def prepare(
        self,
        program_of: Callable[[NormalLayout, FormT], Program],
        form: FormT,
        arguments: type[ctypes.Structure],
    ) -> PreparedKernel:
        """Load a kernel and keep it in `launches` by its form.

        Fields of its arguments that have the names below are the same in every call.

        Raises:
            CudaError: the compiler or the driver refuses.
        """
        peers, device = self.peers, self.peers.table.device
        num_blocks = num_sms_of(device) if device.type == "cuda" else peers.num_programs
        if program_of(peers.layout, form).is_cooperative:
            num_blocks = min(num_blocks, peers.num_programs)
        fixed = {
            "table": peers.table.data_ptr(),
            "excluded": peers.excluded.data_ptr(),
            "state": self.state.data_ptr(),
            "counters": peers.counters.data_ptr(),
            "faults": peers.faults.data_ptr(),
            "report": peers.report.data_ptr(),
            "scratch": self.scratch.data_ptr(),
            "counted": self.counted.data_ptr(),
            "own": peers.own_address,
            "rank": peers.rank,
            "num_senders": peers.num_programs,
            "max_polls": peers.max_polls,
        }
        names = [field[0] for field in arguments._fields_]
        self.launches[form] = launch = PreparedKernel(
            kernel=kernel_of(program_of, peers.layout, form, device),
            num_blocks=num_blocks,
            arguments=arguments(**{name: fixed[name] for name in names if name in fixed}),
        )
        return launch


@cache
def kernel_of(
    program_of: Callable[[NormalLayout, FormT], Program],
    layout: NormalLayout,
    form: FormT,
    device: torch.device,
) -> LoadedKernel:
    """Return the kernel for one layout and form of rows, which is compiled and loaded once."""
    return program.load_kernel(program_of(layout, form), device)
