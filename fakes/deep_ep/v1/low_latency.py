"""Imitate low latency: a slab of rows for each expert, and a combine that weighs and sums.

The message to a rank has a place for each of M tokens; places that are not used have no copies. So
its size is known without asking, and a send never waits for the rank it goes to. What comes back
has a place for each (expert, token), as in the real buffer; a place that nobody wrote is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from epcomm.quantization import FP8_FLOAT32_SCALES, FP8_POWER_OF_TWO_SCALES, quantize
from epcomm.quantization.scale_layout import pack_scales
from fakes.deep_ep.limits import require
from fakes.deep_ep.v1.config import combine_message_bytes
from fakes.deep_ep.v1.handle import LowLatencyHandle, layout_range
from fakes.deep_ep.v1.low_latency_checks import (
    check_bytes,
    check_combine,
    check_dispatch,
    check_stats,
)
from fakes.deep_ep.v1.transport import begin_exchange, gather, pack, unpack
from fakes.deep_ep.v1.undefined import poison, undefined

# Results that may wait for their combine: the real package has two buffers.
_MAX_RESULTS = 2
# Two bytes each, in the strides of the buffer for zero_copy.
_BF16_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class Wire:
    """The wire format of rows: use_fp8, round_scale and use_ue8m0 of the call."""

    fp8: bool
    power_of_two: bool
    packed: bool


@dataclass(frozen=True)
class Sizes:
    """The sizes that decide the layout of the buffer: M, H, E, equal on all ranks."""

    max_tokens: int
    hidden_size: int
    num_experts: int


@dataclass(kw_only=True)
class Result:
    """The results of a dispatch; `is_pending` until it is received."""

    x: Tensor
    scales: Tensor | None
    count: Tensor
    handle: LowLatencyHandle
    is_pending: bool = True

    def poison(self) -> None:
        """Nobody has written it yet, or another result has taken its place."""
        for tensor in (self.x, self.scales, self.count):
            if tensor is not None:
                poison(tensor)
        poison(self.handle.src_info)
        poison(self.handle.layout_range)


class LowLatency:
    """The low-latency half of a Buffer."""

    def __init__(self, group: dist.ProcessGroup, num_rdma_bytes: int, enable_shrink: bool) -> None:
        self._group = group
        self._num_rdma_bytes = num_rdma_bytes
        self.masks = torch.zeros(group.size(), dtype=torch.int32) if enable_shrink else None
        self._sizes: Sizes | None = None
        self._is_dirty = False
        self._results: list[Result] = []
        # A call was sent whose receive step has not run.
        self._is_unreceived = False
        # Calls so far; the last bit says which of the two buffers the next one takes.
        self._num_calls = 0
        self._combine_buffers: list[Tensor | None] = [None, None]

    def soil(self) -> None:
        """Note that normal kernels have used the buffer."""
        self._is_dirty = True

    def clean(self, max_tokens: int, hidden_size: int, num_experts: int) -> None:
        """Begin with these sizes, on all ranks together."""
        sizes = Sizes(max_tokens, hidden_size, num_experts)
        check_bytes(max_tokens, hidden_size, num_experts, self._num_rdma_bytes)
        self._agree(sizes)
        self._is_dirty = False

    @staticmethod
    def wire_format(use_fp8: bool, round_scale: bool, use_ue8m0: bool) -> Wire:
        """Return the three flags of a call; without FP8 the others mean nothing."""
        require(not use_fp8 or not use_ue8m0 or round_scale, "UE8M0 SF requires round_scale=True")
        return Wire(fp8=use_fp8, power_of_two=round_scale, packed=use_ue8m0)

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        max_tokens: int,
        num_experts: int,
        *,
        expert_stats: Tensor | None,
        wait_stats: Tensor | None,
        wire: Wire,
    ) -> tuple[Result, Callable[[], None]]:
        """Send; the second result receives, once, and writes the first."""
        num_ranks = self._group.size()
        check_dispatch(x, topk_idx, max_tokens, num_experts, num_ranks, is_fp8=wire.fp8)
        check_stats(expert_stats, wait_stats, num_experts, num_ranks)
        sizes = Sizes(max_tokens, x.shape[1], num_experts)
        check_bytes(max_tokens, x.shape[1], num_experts, self._num_rdma_bytes)
        self._begin(sizes)
        while len(self._results) >= _MAX_RESULTS:
            self._results.pop(0).poison()
        columns, blocks = _message(x, topk_idx, sizes, num_ranks, wire)
        wait = begin_exchange(self._group, blocks)
        self._is_unreceived = True
        result = _new_result(columns, sizes, num_ranks)
        self._results.append(result)
        generator = torch.Generator().manual_seed(self._num_calls * num_ranks + self._group.rank())

        def receive() -> None:
            received = wait().flatten(0, 1)
            require(result.is_pending, "the fake: received twice")
            result.is_pending = self._is_unreceived = False
            _write_slabs(result, unpack(received, columns), num_ranks, generator)
            if expert_stats is not None:
                expert_stats.add_(result.count)

        return result, receive

    def combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: tuple[Tensor, Tensor, int, int, int],
        *,
        zero_copy: bool,
        out: Tensor | None,
        wait_stats: Tensor | None,
    ) -> tuple[Tensor, Callable[[], None]]:
        """Send the rows back; the second result receives, once, and writes the first."""
        known = LowLatencyHandle.of(handle)
        num_ranks = self._group.size()
        check_combine(x, topk_idx, topk_weights, known, num_ranks, out)
        check_stats(None, wait_stats, known.num_experts, num_ranks)
        sizes = Sizes(known.max_tokens, x.shape[2], known.num_experts)
        rows = self.next_combine_buffer(*handle[2:]) if zero_copy else x
        blocks = _rows_by_source(rows, known, num_ranks)
        self._begin(sizes)
        self._forget(known)
        wait = begin_exchange(self._group, blocks)
        self._is_unreceived = True
        # `out` may share memory with x, which has left.
        shape = (topk_idx.shape[0], x.shape[2])
        combined = undefined(shape, x.dtype) if out is None else poison(out)
        pending = [wait]

        def receive() -> None:
            require(len(pending) == 1, "the fake: received twice")
            by_expert = pending.pop()().flatten(0, 1)
            self._is_unreceived = False
            combined.copy_(_weighted_sum(by_expert, topk_idx, topk_weights))

        return combined, receive

    def next_combine_buffer(self, max_tokens: int, hidden_size: int, num_experts: int) -> Tensor:
        """Return the buffer of the next call, bfloat16 [L, W*M, H] with strides of messages."""
        num_ranks = self._group.size()
        place = self._num_calls % 2
        width = combine_message_bytes(hidden_size) // _BF16_BYTES
        shape = (num_experts // num_ranks, num_ranks * max_tokens, width)
        buffer = self._combine_buffers[place]
        if buffer is None or buffer.shape != shape:
            buffer = self._combine_buffers[place] = undefined(shape, torch.bfloat16)
        return buffer[..., :hidden_size]

    def _begin(self, sizes: Sizes) -> None:
        """Begin a dispatch or combine, after its checks and before it sends."""
        # A send clears the counts of the other of two buffers, for the call after it: those of the
        # call before it, which then waits for ever. Source: csrc/kernels, internode_ll, next_clean.
        require(not self._is_unreceived, "the fake: the call before is not received")
        require(not self._is_dirty, "the fake: normal kernels ran; call clean_low_latency_buffer")
        no_masks = self.masks is None or not bool(self.masks.any())
        require(no_masks, "the fake cannot leave a masked rank out")
        if self._sizes is None:
            self._agree(sizes)
        require(
            sizes == self._sizes,
            f"the fake: {sizes} on a buffer that holds {self._sizes}; call "
            "clean_low_latency_buffer before other sizes",
        )
        # Rows that a caller wrote for zero_copy are lost at the next call of either kind.
        used = self._combine_buffers[self._num_calls % 2]
        if used is not None:
            poison(used)
        self._num_calls += 1

    def _agree(self, sizes: Sizes) -> None:
        own = torch.tensor([sizes.max_tokens, sizes.hidden_size, sizes.num_experts])
        everyone = gather(self._group, own)
        require(bool((everyone == own).all()), f"the fake: M, H, E differ: {everyone.tolist()}")
        self._sizes = sizes

    def _forget(self, handle: LowLatencyHandle) -> None:
        address = handle.src_info.data_ptr()
        self._results = [
            result for result in self._results if result.handle.src_info.data_ptr() != address
        ]


def _message(
    x: Tensor, topk_idx: Tensor, sizes: Sizes, num_ranks: int, wire: Wire
) -> tuple[list[Tensor], Tensor]:
    """Columns of a place, and places [W, M, bytes]: data, scales, token, copies for each expert."""
    num_tokens, num_local = x.shape[0], sizes.num_experts // num_ranks
    data, scales = _quantized(x, wire)
    token = torch.arange(num_tokens, dtype=torch.int32).unsqueeze(1)
    copies = torch.zeros(num_tokens, sizes.num_experts, dtype=torch.uint8)
    is_chosen = (topk_idx >= 0).to(torch.uint8)
    copies.scatter_add_(1, topk_idx.clamp(min=0), is_chosen)
    by_rank = copies.view(num_tokens, num_ranks, num_local)
    fixed = [data, token] if scales is None else [data, token, scales]
    columns = [*fixed, by_rank[:, 0]]
    width = pack(columns).shape[1]
    blocks = torch.zeros(num_ranks, sizes.max_tokens, width, dtype=torch.uint8)
    for rank in range(num_ranks):
        tokens = by_rank[:, rank].any(dim=1).nonzero().squeeze(1)
        rows = pack([column[tokens] for column in [*fixed, by_rank[:, rank]]])
        blocks[rank, : tokens.shape[0]] = rows
    return columns, blocks


def _quantized(x: Tensor, wire: Wire) -> tuple[Tensor, Tensor | None]:
    if not wire.fp8:
        return x, None
    quantized = quantize(x, FP8_POWER_OF_TWO_SCALES if wire.power_of_two else FP8_FLOAT32_SCALES)
    assert quantized.scales is not None, "FP8 has scales"
    scales = pack_scales(quantized.scales) if wire.packed else quantized.scales.float()
    return quantized.data, scales


def _new_result(columns: list[Tensor], sizes: Sizes, num_ranks: int) -> Result:
    num_local, num_rows = sizes.num_experts // num_ranks, num_ranks * sizes.max_tokens
    scales = None
    if len(columns) == 4:
        shape = (num_local, columns[2].shape[1], num_rows)
        # Column-major: a GEMM reads the scales of neighbouring rows together.
        scales = torch.empty(shape, dtype=columns[2].dtype).transpose(1, 2)
    result = Result(
        x=torch.empty(num_local, num_rows, sizes.hidden_size, dtype=columns[0].dtype),
        scales=scales,
        count=torch.empty(num_local, dtype=torch.int32),
        handle=LowLatencyHandle(
            src_info=torch.empty(num_local, num_rows, dtype=torch.int32),
            layout_range=torch.empty(num_local, num_ranks, dtype=torch.int64),
            max_tokens=sizes.max_tokens,
            hidden_size=sizes.hidden_size,
            num_experts=sizes.num_experts,
        ),
    )
    result.poison()
    return result


def _write_slabs(
    result: Result, places: list[Tensor], num_ranks: int, generator: torch.Generator
) -> None:
    """Rows of one source together; sources and their rows in an order of this call alone."""
    data, token, *scales, copies = places
    by_source = copies.view(num_ranks, -1, copies.shape[1]).to(torch.int64)
    max_tokens = by_source.shape[1]
    for expert in range(copies.shape[1]):
        first = 0
        for source in torch.randperm(num_ranks, generator=generator).tolist():
            wanted = by_source[source, :, expert]
            rows = torch.arange(max_tokens).repeat_interleave(wanted) + source * max_tokens
            rows = rows[torch.randperm(rows.shape[0], generator=generator)]
            last = first + rows.shape[0]
            result.x[expert, first:last] = data[rows]
            if result.scales is not None:
                result.scales[expert, first:last] = scales[0][rows]
            result.handle.src_info[expert, first:last] = token[rows, 0]
            found = layout_range(first, last - first)
            result.handle.layout_range[expert, source] = found
            first = last
        result.count[expert] = first


def _rows_by_source(x: Tensor, handle: LowLatencyHandle, num_ranks: int) -> Tensor:
    """Return the rows of each source's tokens, in the places of the tokens, [W, L, M, H]."""
    num_local, _, hidden_size = x.shape
    blocks = undefined((num_ranks, num_local, handle.max_tokens, hidden_size), x.dtype)
    for expert, ranges in enumerate(handle.ranges()):
        for source, (first, count) in enumerate(ranges):
            tokens = handle.src_info[expert, first : first + count].long()
            blocks[source, expert, tokens] = x[expert, first : first + count]
    return blocks


def _weighted_sum(by_expert: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
    """Sum by_expert [E, M, H] to [T, H] in float32, by expert in the order of topk_idx."""
    num_tokens, num_topk = topk_idx.shape
    tokens = torch.arange(num_tokens)
    total = torch.zeros(num_tokens, by_expert.shape[2])
    for k in range(num_topk):
        is_chosen = topk_idx[:, k] >= 0
        rows = by_expert[topk_idx[is_chosen, k], tokens[is_chosen]].float()
        total[is_chosen] += rows * topk_weights[is_chosen, k].unsqueeze(1)
    return total.to(by_expert.dtype)
