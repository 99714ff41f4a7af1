"""Collectives for tensors on a device that the transport of the group does not move.

Programs that launch ranks on GPUs make a group of gloo for what hosts say to one another. Memory of
peers is mapped with the help of such a group as well as of any other, and what little travels over
the collectives then goes through memory of the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from epcomm.collectives.base import Collectives, check_sendable, receiving


class StagedCollectives(Collectives):
    """The operations of other collectives, for tensors on `device`, through memory of the host."""

    def __init__(self, over: Collectives, device: torch.device) -> None:
        """Wrap `over`, which keeps its process group and its waits. Local."""
        self._over = over
        self.rank, self.world_size = over.rank, over.world_size
        # Its number, by which kernels and streams are found.
        is_numbered = device.type != "cuda" or device.index is not None
        self.device = device if is_numbered else torch.device("cuda", torch.cuda.current_device())
        self.process_group = over.process_group

    def close(self) -> None:
        """Close what is wrapped. Local, idempotent."""
        super().close()
        self._over.close()
        self.process_group = None

    def limit_waits(self, timeout_s: float) -> None:
        super().limit_waits(timeout_s)
        # The host waits there.
        self._over.limit_waits(timeout_s)

    def split(self, parts: Sequence[Sequence[int]], *, scope: str) -> Collectives:
        found = super().split(parts, scope=scope)
        assert isinstance(found, StagedCollectives), "_make_part made it"
        # Messages about a wait that timed out are written there.
        found._over.names, found._over.scope = found.names, scope
        return found

    def _make_part(self, ranks: Sequence[int]) -> Collectives:
        return StagedCollectives(self._over._make_part(ranks), self.device)

    def all_to_all(
        self,
        send: Tensor,
        *,
        send_splits: Sequence[int] | None = None,
        recv_splits: Sequence[int] | None = None,
        out: Tensor | None = None,
        phase: str = "all_to_all",
    ) -> Tensor:
        check_sendable(send, self.device)
        received = self._over.all_to_all(
            send.to(self._over.device),
            send_splits=send_splits,
            recv_splits=recv_splits,
            phase=phase,
        )
        return receiving(out, send, received.shape[0], self.device).copy_(received)

    def all_gather(self, tensor: Tensor, *, phase: str = "all_gather") -> Tensor:
        check_sendable(tensor, self.device)
        return self._over.all_gather(tensor.to(self._over.device), phase=phase).to(self.device)
