"""Low latency like that of the real package: at most two results, whose rows are shuffled per call.

Rows of one source lie together, and sources and their rows come in any order. So rows that the
drop-in received are shuffled into tensors that were poisoned before, and back before they return.
"""

from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from fakes.deep_ep.limits import require
from fakes.deep_ep.strict_v1.low_latency_checks import check_bytes
from fakes.deep_ep.undefined import poison, undefined

# Results that may wait for their combine: the real package has two buffers.
_MAX_RESULTS = 2
# A row of the buffer for zero_copy ends with a float32 scale for each 128 elements, as messages do;
# a scale is as long as two elements.
_SCALE_BLOCK, _SCALE_ELEMENTS = 128, 2
# Bits of a layout range below its beginning.
_COUNT_BITS = 32

Handle = tuple[Tensor, Tensor, int, int, int]


@dataclass(frozen=True)
class Sizes:
    """The sizes that decide the layout of the buffer: M, H, E, equal on all ranks."""

    max_tokens: int
    hidden_size: int
    num_experts: int


class StrictHandle(tuple[Tensor, Tensor, int, int, int]):
    """A handle of shuffled rows: the handle of the drop-in, and the positions of its rows."""

    behind: Handle
    # For each expert, the rows of the drop-in in the order of the shuffled rows.
    orders: list[Tensor]

    @classmethod
    def over(cls, behind: Handle) -> Self:
        handle = cls((poisoned_like(behind[0]), poisoned_like(behind[1]), *behind[2:]))
        handle.behind, handle.orders = behind, []
        return handle

    def require_written(self) -> None:
        """Require that the rows were received, and that no later result overwrote them."""
        num_rows = self[0].shape[1]
        first, count = self[1] >> _COUNT_BITS, self[1] & ((1 << _COUNT_BITS) - 1)
        written = bool(((first >= 0) & (first + count <= num_rows)).all())
        require(written, "the handle is undefined; call its hook, hold at most 2 results")


@dataclass(kw_only=True, eq=False)
class Result:
    """The tensors that a dispatch returns, poisoned until they are received."""

    x: Tensor
    scales: Tensor | None
    count: Tensor
    handle: StrictHandle

    def poison(self) -> None:
        """Poison the tensors, which are not yet written or were overwritten by another result."""
        for tensor in (self.x, self.scales, self.count, self.handle[0], self.handle[1]):
            if tensor is not None:
                poison(tensor)

    def take(self, received: Self, generator: torch.Generator) -> None:
        """Shuffle what the drop-in received into these tensors."""
        layout_range = received.handle.behind[1]
        src_info = received.handle.behind[0]
        self.count.copy_(received.count)
        for expert, packed in enumerate(layout_range.tolist()):
            order = _shuffled(packed, generator)
            num_rows = order.shape[0]
            # Rows are compared as bytes, so that every dtype is covered.
            _rows(self.x[expert])[:num_rows] = _rows(received.x[expert])[order]
            if self.scales is not None and received.scales is not None:
                self.scales[expert, :num_rows] = received.scales[expert, order]
            self.handle[0][expert, :num_rows] = src_info[expert, order]
            self.handle.orders.append(order)
            place = torch.empty_like(order)
            place[order] = torch.arange(num_rows)
            for source, value in enumerate(packed):
                first, count = value >> _COUNT_BITS, value & ((1 << _COUNT_BITS) - 1)
                begin = int(place[first : first + count].min()) if count else num_rows
                self.handle[1][expert, source] = begin << _COUNT_BITS | count


class LowLatencyState:
    """The state of the real buffer between low-latency calls."""

    def __init__(self, group: dist.ProcessGroup, num_rdma_bytes: int) -> None:
        self._group = group
        self._num_rdma_bytes = num_rdma_bytes
        self._sizes: Sizes | None = None
        self._is_dirty = False
        self._results: list[Result] = []
        # A call was sent whose receive step has not run.
        self.is_unreceived = False
        # Number of calls; its last bit selects the buffer of the next call.
        self._num_calls = 0
        self._combine_buffers: list[Tensor | None] = [None, None]

    def soil(self) -> None:
        """Record that normal kernels have used the buffer."""
        self._is_dirty = True

    def clean(self, sizes: Sizes) -> None:
        """Begin with these sizes, on all ranks together."""
        check_bytes(sizes.max_tokens, sizes.hidden_size, sizes.num_experts, self._num_rdma_bytes)
        self._agree(sizes)
        self._is_dirty = False

    def begin(self, sizes: Sizes) -> torch.Generator:
        """Begin a dispatch or combine, after its checks; return the seed of its order."""
        # A send clears the counts of the other of two buffers, for the call after it: those of the
        # call before it, which then waits for ever. Source: csrc/kernels, internode_ll, next_clean.
        require(not self.is_unreceived, "the call before is not received")
        require(not self._is_dirty, "normal kernels ran; call clean_low_latency_buffer")
        if self._sizes is None:
            self._agree(sizes)
        require(
            sizes == self._sizes,
            f"{sizes} on a buffer that holds {self._sizes}; call clean_low_latency_buffer before "
            "other sizes",
        )
        # Rows that a caller wrote for zero_copy are lost at the next call of either kind.
        used = self._combine_buffers[self._num_calls % 2]
        if used is not None:
            poison(used)
        seed = self._num_calls * self._group.size() + self._group.rank()
        self._num_calls += 1
        self.is_unreceived = True
        return torch.Generator().manual_seed(seed)

    def keep(self, result: Result) -> None:
        """Keep a result, which overwrites the last but one."""
        while len(self._results) >= _MAX_RESULTS:
            self._results.pop(0).poison()
        self._results.append(result)

    def forget(self, handle: StrictHandle) -> None:
        """Free the memory of a result that is combined."""
        self._results = [result for result in self._results if result.handle is not handle]

    def next_combine_buffer(self, handle: Handle) -> Tensor:
        """Return the buffer of the next call, bfloat16 [L, W*M, H] with strides of messages."""
        src_info, _, max_tokens, hidden_size, num_experts = handle
        num_ranks = self._group.size()
        place = self._num_calls % 2
        width = hidden_size + hidden_size // _SCALE_BLOCK * _SCALE_ELEMENTS
        shape = (num_experts // num_ranks, num_ranks * max_tokens, width)
        buffer = self._combine_buffers[place]
        if buffer is None or buffer.shape != shape:
            buffer = self._combine_buffers[place] = undefined(
                shape, torch.bfloat16, src_info.device
            )
        return buffer[..., :hidden_size]

    def _agree(self, sizes: Sizes) -> None:
        everyone: list[Sizes | None] = [None] * self._group.size()
        dist.all_gather_object(everyone, sizes, group=self._group)
        require(all(each == sizes for each in everyone), f"M, H, E differ: {everyone}")
        self._sizes = sizes


def poisoned_like(tensor: Tensor) -> Tensor:
    """Return new memory with the strides of `tensor` and values that cannot pass for results."""
    return poison(torch.empty_like(tensor, memory_format=torch.preserve_format))


def unshuffled(rows: Tensor, handle: StrictHandle) -> Tensor:
    """Return rows [L, W * M, H] in the order of the drop-in, NaN where none was written."""
    back = undefined(tuple(rows.shape), rows.dtype, rows.device)
    for expert, order in enumerate(handle.orders):
        back[expert, order] = rows[expert, : order.shape[0]]
    return back


def _shuffled(packed: list[int], generator: torch.Generator) -> Tensor:
    """Return the rows of an expert in a new order; those of one source stay together."""
    parts = [torch.empty(0, dtype=torch.int64)]
    for source in torch.randperm(len(packed), generator=generator).tolist():
        first, count = packed[source] >> _COUNT_BITS, packed[source] & ((1 << _COUNT_BITS) - 1)
        parts.append(first + torch.randperm(count, generator=generator))
    return torch.cat(parts)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
