"""Vary the orders that the real package leaves open, and poison what it does not write."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from epcomm.integrations import deep_ep
from epcomm.integrations.deep_ep import EPHandle, EventHandle, EventOverlap
from epcomm.integrations.deep_ep.events import AsyncCall
from epcomm.integrations.deep_ep.v2.handle import Arrived, DispatchRequest, Positions
from epcomm.types import align_up
from fakes.deep_ep.strict_v2.limits import check_received_routes
from fakes.deep_ep.undefined import poison, undefined

# Columns of recv_src_metadata that every layout writes.
_NUM_SOURCE_COLUMNS = 2


class LateEvent(EventHandle):
    """An event that writes the results of its call, which are poison before."""

    def __init__(self, results: Sequence[Tensor | None]) -> None:
        super().__init__()
        self._late: list[tuple[Tensor, Tensor]] = []
        for result in results:
            if result is not None:
                kept = result.clone(memory_format=torch.preserve_format)
                self._late.append((result, kept))
                poison(result)

    def current_stream_wait(self) -> None:
        """Write the results; a GPU writes them at some time before."""
        for result, value in self._late:
            result.copy_(value)
        self._late.clear()


class OpenOrders(deep_ep.ElasticBuffer):
    """An ElasticBuffer whose orders differ between calls, and whose undefined results show."""

    def __init__(self, *args: Any, **options: Any) -> None:  # noqa: ANN401 - as the drop-in
        super().__init__(*args, **options)
        # The generator is seeded, so that a failure can be repeated; all calls draw from it.
        self._generator = torch.Generator().manual_seed(11 + self.rank_idx)
        self._in_flight: list[LateEvent] = []

    def finish(self) -> None:
        """Write the results of all calls, which run one after another, waited for or not."""
        for event in self._in_flight:
            event.current_stream_wait()
        self._in_flight.clear()

    def _handle_of(self, request: DispatchRequest, arrived: Arrived) -> EPHandle:
        check_received_routes(arrived.received.topk_ids)
        handle = super()._handle_of(request, arrived)
        if self.deterministic:
            pass
        elif handle.do_expand:
            order = self._draw(_slot_keys(handle))
            handle.positions = replace(handle.positions, element_of_position=order)
        else:
            order = self._draw(_row_keys(handle))[: handle.num_recv_tokens]
            handle.positions = replace(
                handle.positions, element_of_position=order, row_of_message=order
            )
        self._spoil_metadata(handle)
        return handle

    def _event(
        self, call: AsyncCall, given: Sequence[Tensor | None], made: Sequence[Tensor | None]
    ) -> EventOverlap:
        if super()._event(call, given, made).event is None:
            return EventOverlap()
        event = LateEvent(made)
        self._in_flight.append(event)
        return EventOverlap(event)

    def _finish(
        self,
        made: Sequence[Tensor | None],
        handle: EPHandle,
        positions: Positions,
        *,
        do_zero_padding: bool,
    ) -> None:
        super()._finish(made, handle, positions, do_zero_padding=do_zero_padding)
        is_used = positions.is_used
        if is_used is None:
            return
        is_undefined = ~is_used
        if do_zero_padding:
            end = align_up(int(handle.psum_num_recv_tokens_per_expert[-1]), handle.expert_alignment)
            is_undefined = torch.arange(len(is_used)) >= end
        x, scales, topk_idx, weights = made
        for tensor in (x, scales, weights):
            _poison_rows(tensor, is_undefined)
        if topk_idx is not None:
            garbage = torch.full_like(topk_idx, 0x7F7F7F7F7F7F7F7F)
            # Some of the garbage looks valid, as in the recording.
            garbage[1::2] = 0
            topk_idx[is_undefined] = garbage[is_undefined]

    def _spoil_metadata(self, handle: EPHandle) -> None:
        metadata, order = handle.recv_src_metadata.clone(), handle.positions.element_of_position
        if handle.do_expand and order is not None and len(order):
            position_of_slot = torch.empty_like(order)
            position_of_slot[order] = torch.arange(len(order))
            slots = metadata[:, _NUM_SOURCE_COLUMNS:]
            found = position_of_slot[slots.clamp(min=0).long()].int()
            metadata[:, _NUM_SOURCE_COLUMNS:] = found.masked_fill(slots < 0, -1)
        # Recorded garbage is far out of range or looks valid, so that no filter finds all of it.
        garbage = undefined(metadata.shape, torch.int32, metadata.device)
        garbage.masked_fill_(torch.rand(metadata.shape, generator=self._generator) < 0.5, 0)
        count = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        metadata[count:] = garbage[count:]
        if not handle.do_expand:
            metadata[:, _NUM_SOURCE_COLUMNS:] = garbage[:, _NUM_SOURCE_COLUMNS:]
        handle.recv_src_metadata = metadata

    def _draw(self, keys: tuple[Tensor, Tensor]) -> Tensor:
        """Draw an order of elements, [N], int64: by the first key, then by chance.

        keys: [N] each; the second is the length of the range in which chance decides.
        """
        first, length = keys
        chance = torch.rand(len(first), dtype=torch.float64, generator=self._generator)
        return torch.argsort(first + chance * length, stable=True)


def _row_keys(handle: EPHandle) -> tuple[Tensor, Tensor]:
    """Rows of one source rank are neighbours, in any order; rows that were not received are
    last."""
    ranks = (handle.sources // handle.num_max_tokens_per_rank).double()
    if handle.is_row is not None:
        num_ranks = len(handle.psum_num_recv_tokens_per_scaleup_rank)
        ranks = torch.where(handle.is_row, ranks, float(num_ranks))
    return ranks, torch.ones_like(ranks)


def _slot_keys(handle: EPHandle) -> tuple[Tensor, Tensor]:
    """Slots of one expert are neighbours, in any order; padding stays where it is."""
    index, row_of_slot = handle.index, handle.row_of_slot
    positions = torch.arange(len(row_of_slot), dtype=torch.int32)
    experts = torch.searchsorted(index.first_slot[1:].contiguous(), positions, right=True)
    experts = experts.clamp(max=len(index.num_tokens_per_expert) - 1)
    is_used = row_of_slot >= 0
    first = torch.where(is_used, index.first_slot[experts], positions)
    return first.double(), torch.where(is_used, index.num_tokens_per_expert[experts], 0).double()


def _poison_rows(tensor: Tensor | None, is_undefined: Tensor) -> None:
    if tensor is not None:
        poisoned = poison(torch.empty_like(tensor))
        if tensor.itemsize == 1:
            # torch cannot index eight-bit floating numbers.
            tensor, poisoned = tensor.view(torch.uint8), poisoned.view(torch.uint8)
        tensor[is_undefined] = poisoned[is_undefined]
