"""Normal mode of deep_ep V1: rows by (source rank, token), over NVLink and RDMA.

With static sizes dispatch returns W * M rows, of which unused ones have ids of -1. Static sizes use
num_worst_tokens, which the package has on one host only.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from epcomm.buffers.base import Buffer
from epcomm.buffers.deep_ep.normal import DeepEPCalls, DeepEPPackage, ReceivedBatch
from epcomm.buffers.deep_ep.rows import LegacyHandle, Rows
from epcomm.buffers.sizes import Region
from epcomm.platforms.deep_ep import DeepEPKind
from epcomm.platforms.deep_ep_package import WITH_LEGACY_BUFFER, load_deep_ep
from epcomm.spec import BufferSpec, HostLayout

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


class LegacyPackage(DeepEPPackage[LegacyHandle]):
    """The Buffer of V1, which later packages keep in addition to theirs."""

    kinds: ClassVar[Set[DeepEPKind]] = WITH_LEGACY_BUFFER
    hidden_multiple: ClassVar[int] = _HIDDEN_MULTIPLE

    @staticmethod
    def reasons(spec: BufferSpec, world_size: int, *, is_static: bool) -> list[str]:
        reasons = []
        if spec.hidden_size > _MAX_HIDDEN:
            reasons.append(f"hidden_size is {spec.hidden_size}, at most {_MAX_HIDDEN}")
        if world_size not in _WORLD_SIZES:
            sizes = ", ".join(map(str, _WORLD_SIZES))
            reasons.append(f"serves {sizes} ranks, not {world_size}")
        if spec.num_local_experts > _MAX_LOCAL_EXPERTS:
            reasons.append(f"has at most {_MAX_LOCAL_EXPERTS} experts a rank")
        if is_static and world_size > MAX_NVLINK_RANKS:
            reasons.append(f"has static sizes for at most {MAX_NVLINK_RANKS} ranks of one host")
        return reasons

    @staticmethod
    def host_reasons(hosts: HostLayout, *, is_static: bool) -> tuple[str, ...]:
        # The package takes rank // 8 as the host of a rank, and uses only NVLink within a host.
        expected = tuple(rank // MAX_NVLINK_RANKS for rank in range(hosts.world_size))
        if is_static:
            return (f"has static sizes for the ranks of one host, not of {hosts.num_hosts}",)
        if hosts.host_of_rank != expected or hosts.world_size % MAX_NVLINK_RANKS:
            return (f"serves hosts of {MAX_NVLINK_RANKS} neighbouring ranks each, not {hosts}",)
        return ()

    @staticmethod
    def own_region(spec: BufferSpec, world_size: int) -> Region:
        chunk = 2 * spec.hidden_size + _CHUNK_ENTRY_BYTES
        num_bytes = _NUM_CHANNELS * min(world_size, MAX_NVLINK_RANKS) * _CHUNK_TOKENS * chunk
        return Region(name="deep_ep's chunks over NVLink", max_bytes=num_bytes)

    def __init__(self, group: dist.ProcessGroup, spec: BufferSpec) -> None:
        package: Any = load_deep_ep(self.kinds)
        self._rank, ranks = group.rank(), group.size()
        self._num_experts = spec.num_local_experts * ranks
        self._num_rows = (spec.max_tokens_per_rank or 0) * ranks
        hidden_bytes = 2 * spec.hidden_size
        kind = package.Buffer
        configs = [kind.get_dispatch_config(ranks), kind.get_combine_config(ranks)]
        self._buffer = kind(
            group,
            num_nvl_bytes=max(c.get_nvl_buffer_size_hint(hidden_bytes, ranks) for c in configs),
            num_rdma_bytes=max(c.get_rdma_buffer_size_hint(hidden_bytes, ranks) for c in configs),
            explicitly_destroy=True,
        )

    def dispatch(
        self, rows: Rows, ids: Tensor, weights: Tensor, *, is_static: bool
    ) -> ReceivedBatch:
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
            num_worst_tokens=self._num_rows if is_static else 0,
        )
        ends = _row_ends(handle, self._rank)
        return ReceivedBatch(
            rows=received,
            local_ids=local_ids,
            weights=weights,
            host_counts=tuple(counts),
            handle=handle,
            rows_to_rank=per_rank,
            rows_from_rank=ends.diff(prepend=ends.new_zeros(1)),
        )

    def cached_dispatch(self, rows: Tensor, handle: LegacyHandle) -> Tensor:
        return self._buffer.dispatch(rows, handle=handle)[0]

    def combine(
        self, rows: Tensor, handle: LegacyHandle, row_scalars: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return self._buffer.combine(rows, handle, topk_weights=row_scalars)[:2]


class DeepEPV1Buffer(DeepEPCalls, Buffer):
    """Serves normal mode with exact sizes; the host waits for the counts, once a dispatch."""

    name: ClassVar[str] = "deep_ep_v1"
    package = LegacyPackage
    is_static: ClassVar[bool] = False


class DeepEPV1StaticBuffer(DeepEPV1Buffer):
    """Serves normal mode with W * M rows and a budget of slots; the host reads nothing."""

    is_static: ClassVar[bool] = True


def _row_ends(handle: LegacyHandle, rank: int) -> Tensor:
    """Return where the rows of each source rank end, [W], int64, from the handle."""
    # Over NVLink its first entry is [W, W], from rank to rank; with RDMA its seventh is [W].
    ends = handle[0][:, rank] if len(handle) == _NVLINK_HANDLE else handle[6]
    return ends.to(torch.int64)
