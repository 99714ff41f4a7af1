"""Collectives over a torch.distributed process group: gloo, nccl, hccl."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from epcomm.collectives.base import Collectives
from epcomm.errors import ConfigError, ShapeError

# The device whose tensors a backend moves.
_DEVICE_OF_BACKEND = {"gloo": "cpu", "mpi": "cpu", "fake": "cpu", "nccl": "cuda", "hccl": "npu"}

# torch 2.13 renamed all_gather_into_tensor; 2.11 knows the old name only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchDistCollectives(Collectives):
    """The three verbs on a process group that the caller owns and destroys."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        """Wrap `process_group`, of which this rank is a member.

        Raises:
            ConfigError: its backend is unknown here.
        """
        self._process_group = process_group
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        self.device = _device_of(process_group)

    def all_to_all(
        self,
        send: Tensor,
        *,
        send_splits: Sequence[int] | None = None,
        recv_splits: Sequence[int] | None = None,
    ) -> Tensor:
        _check_sendable(send, self.device)
        num_rows = send.shape[0] if recv_splits is None else sum(recv_splits)
        recv = send.new_empty((num_rows, *send.shape[1:]))
        dist.all_to_all_single(
            _as_bytes(recv),
            _as_bytes(send),
            None if recv_splits is None else list(recv_splits),
            None if send_splits is None else list(send_splits),
            group=self._process_group,
        )
        return recv

    def all_gather(self, tensor: Tensor) -> Tensor:
        _check_sendable(tensor, self.device)
        gathered = tensor.new_empty((self.world_size, *tensor.shape))
        _all_gather(
            _as_bytes(gathered.flatten()), _as_bytes(tensor.flatten()), group=self._process_group
        )
        return gathered


def _device_of(process_group: dist.ProcessGroup) -> torch.device:
    backend = str(dist.get_backend(process_group))
    if backend not in _DEVICE_OF_BACKEND:
        raise ConfigError(
            f"EPGroup: backend {backend!r} of the process group is not supported, expected one of "
            f"{sorted(_DEVICE_OF_BACKEND)}; create the group with one of them"
        )
    kind = _DEVICE_OF_BACKEND[backend]
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _check_sendable(tensor: Tensor, device: torch.device) -> None:
    if not tensor.is_contiguous() or tensor.device != device:
        raise ShapeError(
            f"collective: tensor {list(tensor.shape)} with strides {tensor.stride()} on "
            f"{tensor.device}, expected contiguous on {device}; call .contiguous() or .to()"
        )


def _as_bytes(tensor: Tensor) -> Tensor:
    # gloo refuses float8 and every backend moves bytes alike. The first dimension stays, so that
    # splits keep counting rows.
    if tensor.numel() == 0:
        return tensor.new_empty(tensor.shape, dtype=torch.uint8)
    if tensor.dim() > 1:
        tensor = tensor.flatten(1)
    return tensor.view(torch.uint8)
