"""Buffer of DeepEP V1: its calls and signatures, translated to epcomm's buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from epcomm.integrations.deep_ep.events import EventHandle, EventOverlap
from epcomm.integrations.deep_ep.v1 import config as configs
from epcomm.integrations.deep_ep.v1.config import Config
from epcomm.integrations.deep_ep.v1.low_latency_calls import LowLatencyCalls
from epcomm.integrations.deep_ep.v1.normal_calls import NormalCalls
from epcomm.integrations.deep_ep.v1.slots import memory_bytes

if TYPE_CHECKING:
    from mpi4py import MPI


class Buffer(NormalCalls, LowLatencyCalls):
    """Normal and low-latency dispatch and combine of V1.

    Every call but the statics is collective over the group. Sizes in bytes are kept and mean
    nothing: epcomm's buffers open at the first call of a shape, and grow.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: MPI.Comm | None = None,
        *,
        use_fabric: bool = False,
    ) -> None:
        del use_fabric  # Of older versions: how memory was shared between hosts.
        super().__init__(
            group, comm, low_latency_mode=low_latency_mode, enable_shrink=enable_shrink
        )
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.explicitly_destroy = explicitly_destroy

    def destroy(self) -> None:
        """Close the epcomm buffers, together with all ranks; no call is possible afterwards."""
        assert self.explicitly_destroy, "`explicitly_destroy` flag must be set"
        self._ranks.close()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Return whether FP8 and low latency are there."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set the SMs of the kernels of normal mode, for all buffers of the process."""
        assert new_num_sms % 2 == 0, "The SM count must be even"
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Record an event after all work on the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Return num_rdma_bytes of V1 for low latency; num_ranks does not matter."""
        return configs.low_latency_bytes(num_max_dispatch_tokens_per_rank, hidden, num_experts)

    @staticmethod
    def get_low_latency_memory_bytes(
        num_max_dispatch_tokens_per_rank: int,
        hidden: int,
        num_ranks: int,
        num_experts: int,
        num_topk: int = 8,
        use_fp8: bool = True,
    ) -> int:
        """Return the bytes that low latency really takes on a GPU, which V1 has no call for.

        Beside get_low_latency_rdma_size_hint(), which programs size their buffers of V1 with and
        which means nothing here.   Local.
        """
        sizes = (num_max_dispatch_tokens_per_rank, num_experts, num_ranks)
        return memory_bytes(sizes, hidden, num_topk, use_fp8=use_fp8)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Return the Config that V1 recommends for a number of ranks."""
        return configs.dispatch_config(Buffer.num_sms, num_ranks)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """Return the Config that V1 recommends for a number of ranks."""
        return configs.combine_config(Buffer.num_sms, num_ranks)

    def get_comm_stream(self) -> torch.cuda.Stream | torch.cpu.Stream:
        """Return the stream of asynchronous calls."""
        return self._comm_stream.of(self._ranks.device)

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: torch.Size | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> Tensor:
        """Return memory of the size of the buffer of V1; nothing that travels lies in it.

        Programs clear the buffer of V1 after a failure. Lifetime: the caller owns it.
        """
        num_bytes = self.num_rdma_bytes if use_rdma_buffer else self.num_nvl_bytes
        shape = size or torch.Size([max(num_bytes - offset, 0) // dtype.itemsize])
        return torch.zeros(shape, dtype=dtype, device=self._begin("get_local_buffer_tensor").device)
