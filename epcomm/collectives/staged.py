"""Collectives for tensors on a device that the transport of the group does not support.

Programs with GPU ranks may have only a gloo group, for communication between hosts. Such a group
suffices to map the memory of peers, and the few tensors that are sent over the collectives are
copied through host memory.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from epcomm.collectives.base import Collectives, Splits


class StagedCollectives(Collectives):
    """The operations of other collectives for tensors on `device`, staged in host memory."""

    def __init__(self, over: Collectives, device: torch.device) -> None:
        """Wrap `over`, which still owns the process group and the timeouts. Local."""
        self._over = over
        self.rank, self.world_size = over.rank, over.world_size
        # Kernels and streams need a device with an index.
        is_numbered = device.type != "cuda" or device.index is not None
        self.device = device if is_numbered else torch.device("cuda", torch.cuda.current_device())
        self.process_group = over.process_group

    def close(self) -> None:
        """Close the wrapped collectives. Local, idempotent."""
        super().close()
        self._over.close()
        self.process_group = None

    def limit_waits(self, timeout_s: float) -> None:
        super().limit_waits(timeout_s)
        # The host waits in the wrapped collectives.
        self._over.limit_waits(timeout_s)

    def separate(self) -> str:
        return self._over.separate()

    def split(self, parts: Sequence[Sequence[int]], *, scope: str) -> Collectives:
        found = super().split(parts, scope=scope)
        assert isinstance(found, StagedCollectives), "_make_part made it"
        # The wrapped collectives write the messages about timeouts.
        found._over.names = found.names
        return found

    def _make_part(self, ranks: Sequence[int]) -> Collectives:
        return StagedCollectives(self._over._make_part(ranks), self.device)

    def _all_to_all(
        self, recv: Tensor, send: Tensor, recv_splits: Splits, send_splits: Splits, phase: str
    ) -> None:
        staged = torch.empty_like(recv, device=self._over.device)
        self._over._all_to_all(staged, send.to(staged.device), recv_splits, send_splits, phase)
        recv.copy_(staged)

    def _all_gather(self, recv: Tensor, tensor: Tensor, phase: str) -> None:
        staged = torch.empty_like(recv, device=self._over.device)
        self._over._all_gather(staged, tensor.to(staged.device), phase)
        recv.copy_(staged)
