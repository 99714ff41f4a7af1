"""The calls of a Buffer of V1 share its ranks, its stream and its attributes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from epcomm.errors import ConfigError
from epcomm.integrations.deep_ep.events import AsyncCall, CommStream, EventOverlap
from epcomm.integrations.deep_ep.ranks import Ranks
from epcomm.integrations.deep_ep.v1.handle import SavedHandles

if TYPE_CHECKING:
    from mpi4py import MPI

XTensors = Tensor | tuple[Tensor, Tensor]

_ON_CURRENT_STREAM = nullcontext(AsyncCall(None, is_async=False))


class Opened:
    """The state of a Buffer; sizes in bytes are kept and mean nothing."""

    # For all buffers of the process, as V1 has it.
    num_sms: int = 20

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        comm: MPI.Comm | None,
        *,
        low_latency_mode: bool,
        enable_shrink: bool,
    ) -> None:
        """Wrap the ranks. Local; no rank is waited for."""
        ranks = comm if group is None else group
        if ranks is None:
            raise ConfigError(
                "Buffer: group and comm are None, expected one of them; pass a process group or a "
                "communicator of mpi4py"
            )
        self._ranks = Ranks(ranks, has_row_budget=True)
        self._comm_stream = CommStream()
        self._saved_handles = SavedHandles()
        self.group = group
        self.rank, self.group_size = self._ranks.rank, self._ranks.size
        self.low_latency_mode, self.enable_shrink = low_latency_mode, enable_shrink

    def _begin(self, function: str, like: object = None, *, low_latency: bool = False) -> Ranks:
        """Begin a call whose tensors are where `like` is."""
        self._ranks.check_open(function)
        if isinstance(like, Tensor):
            self._ranks.follow(like.device)
        if low_latency and not self.low_latency_mode:
            raise ConfigError(
                f"{function}: the Buffer was made without low_latency_mode ({self._ranks.where}), "
                "expected low_latency_mode=True; pass it to Buffer()"
            )
        return self._ranks

    def _call(
        self,
        like: Tensor,
        previous: EventOverlap | None,
        is_async: bool,
        allocates_here: bool = False,
    ) -> AbstractContextManager[AsyncCall]:
        if previous is None and not is_async and not allocates_here:
            return _ON_CURRENT_STREAM
        return self._comm_stream.call(
            like.device, previous, is_async=is_async, allocates_here=allocates_here
        )
