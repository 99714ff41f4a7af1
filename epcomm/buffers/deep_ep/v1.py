"""Normal mode of deep_ep V1: rows by (source rank, token), over NVLink and RDMA.

With static sizes dispatch returns W * M rows, of which unused ones have ids of -1. Static sizes use
num_worst_tokens, which the package has on one host only.
"""

from collections.abc import Set
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from epcomm.buffers.deep_ep.normal import DeepEPBuffer, ReceivedBatch
from epcomm.buffers.deep_ep.rows import LegacyHandle, Rows
from epcomm.buffers.sizes import Region
from epcomm.config import Mode
from epcomm.platforms.deep_ep import DeepEPKind
from epcomm.platforms.deep_ep_package import WITH_LEGACY_BUFFER, format_reasons
from epcomm.spec import BufferSpec

# Numbers of ranks for which V1 has a table of chunk sizes.
_WORLD_SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
# The most ranks that NVLink connects; V1 needs RDMA for more.
MAX_NVLINK_RANKS = 8
# Source of the limits: deep_ep, csrc/kernels/legacy.
_MAX_LOCAL_EXPERTS = 1024
# Half a row of bfloat16 is copied 16 bytes at a time, in pieces of 8192 bytes less a word.
_HIDDEN_MULTIPLE, _MAX_HIDDEN = 16, 8176
# Number of entries of a handle if NVLink connects all ranks.
_NVLINK_HANDLE = 6
# Source of the NVLink memory: deep_ep, csrc/kernels/legacy, Config.get_nvl_buffer_size_hint, with
# 20 SMs, 256 tokens a chunk, and capacity for 128 ids, weights and scales a token.
_NUM_CHANNELS, _CHUNK_TOKENS = 10, 256
_CHUNK_ENTRY_BYTES = 8 + 128 * (8 + 4 + 4)


class DeepEPV1Buffer(DeepEPBuffer[LegacyHandle]):
    """Serves normal mode with exact sizes; the host waits for the counts, once a dispatch."""

    name: ClassVar[str] = "deep_ep_v1"
    kinds: ClassVar[Set[DeepEPKind]] = WITH_LEGACY_BUFFER
    hidden_multiple: ClassVar[int] = _HIDDEN_MULTIPLE
    is_static: ClassVar[bool] = False

    @classmethod
    def lacks(cls, mode: Mode, spec: BufferSpec, world_size: int) -> tuple[str, ...]:
        reasons = format_reasons(spec)
        if spec.hidden_size > _MAX_HIDDEN:
            reasons.append(f"hidden_size is {spec.hidden_size}, at most {_MAX_HIDDEN}")
        if world_size not in _WORLD_SIZES:
            reasons.append(f"serves {', '.join(map(str, _WORLD_SIZES))} ranks, not {world_size}")
        if spec.num_local_experts > _MAX_LOCAL_EXPERTS:
            reasons.append(f"has at most {_MAX_LOCAL_EXPERTS} experts a rank")
        if cls.is_static and world_size > MAX_NVLINK_RANKS:
            reasons.append(f"has static sizes for at most {MAX_NVLINK_RANKS} ranks of one host")
        return tuple(reasons)

    @classmethod
    def lacks_between(cls, spec: BufferSpec) -> tuple[str, ...]:
        hosts = spec.hosts
        if hosts is None:
            return ()
        # The package takes rank // 8 as the host of a rank, and uses only NVLink within a host.
        expected = tuple(rank // MAX_NVLINK_RANKS for rank in range(hosts.world_size))
        if cls.is_static:
            return (f"has static sizes for the ranks of one host, not of {hosts.num_hosts}",)
        if hosts.host_of_rank != expected or hosts.world_size % MAX_NVLINK_RANKS:
            return (f"serves hosts of {MAX_NVLINK_RANKS} neighbouring ranks each, not {hosts}",)
        return ()

    @classmethod
    def own_region(cls, spec: BufferSpec, world_size: int) -> Region:
        chunk = 2 * spec.hidden_size + _CHUNK_ENTRY_BYTES
        num_bytes = _NUM_CHANNELS * min(world_size, MAX_NVLINK_RANKS) * _CHUNK_TOKENS * chunk
        return Region(name="deep_ep's chunks over NVLink", max_bytes=num_bytes)

    def _open(self, package: ModuleType) -> object:
        kind, ranks, hidden_bytes = package.Buffer, self._world_size, 2 * self._spec.hidden_size
        configs = [kind.get_dispatch_config(ranks), kind.get_combine_config(ranks)]
        return kind(
            self._process_group,
            num_nvl_bytes=max(c.get_nvl_buffer_size_hint(hidden_bytes, ranks) for c in configs),
            num_rdma_bytes=max(c.get_rdma_buffer_size_hint(hidden_bytes, ranks) for c in configs),
            explicitly_destroy=True,
        )

    def _send(self, rows: Rows, ids: Tensor, weights: Tensor) -> ReceivedBatch:
        per_rank, per_rdma_rank, per_expert, is_in_rank, _ = self._buffer.get_dispatch_layout(
            ids, self._num_experts
        )
        received, local_ids, weights, counts, handle, _ = self._buffer.dispatch(
            rows,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=weights,
            num_worst_tokens=self._num_rows if self.is_static else 0,
        )
        # Where the rows of each source rank end, [W]. Over NVLink the first entry of the handle is
        # [W, W], from rank to rank; with RDMA the seventh is [W].
        ends = handle[0][:, self._rank] if len(handle) == _NVLINK_HANDLE else handle[6]
        ends = ends.to(torch.int64)
        return ReceivedBatch(
            rows=received,
            local_ids=local_ids,
            weights=weights,
            host_counts=tuple(counts),
            handle=handle,
            rows_to_rank=per_rank,
            rows_from_rank=ends.diff(prepend=ends.new_zeros(1)),
        )

    def _send_along(self, rows: Tensor, handle: LegacyHandle) -> Tensor:
        return self._buffer.dispatch(rows, handle=handle)[0]

    def _return(
        self, rows: Tensor, handle: LegacyHandle, row_scalars: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return self._buffer.combine(rows, handle, topk_weights=row_scalars)[:2]


class DeepEPV1StaticBuffer(DeepEPV1Buffer):
    """Serves normal mode with W * M rows and a budget of slots; the host reads nothing."""

    is_static: ClassVar[bool] = True
