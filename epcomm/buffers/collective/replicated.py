"""The buffer for tokens that every rank has: a dispatch sends nothing, combine sums over the ranks.

StandardDispatcher uses this buffer with `replicated=True`, for example after tensor-parallel
attention. A rank computes its experts on all tokens. Combine scatters the partial sums over the
ranks, adds them in float32 by ascending rank and gathers the totals, so y is bit-equal on all
ranks. dy is equal on all ranks too, so the backward of combine is the identity, which quantises
nothing, and the backward of dispatch is a sum over the ranks.
"""

from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from epcomm.buffers import sizes
from epcomm.buffers.base import Buffer, Dispatched
from epcomm.buffers.collective.base import (
    COLLECTIVE_CAPS,
    OverCollectives,
    SignedExchangePlan,
    row_bytes_of,
)
from epcomm.buffers.row_layout import wire_tensor_of
from epcomm.buffers.traffic import BufferTraffic
from epcomm.calls.call import DispatchCall
from epcomm.calls.counts import any_flags, guard_ids
from epcomm.calls.faults import ids_error
from epcomm.calls.header import ANY_BATCH, FLAGS, ROWS, CallKind, CallSign
from epcomm.config import Mode
from epcomm.errors import EPError, ShapeError
from epcomm.ops.slots import count_experts
from epcomm.protocol import BatchFlags, FaultCode
from epcomm.records import ExchangePlan
from epcomm.spec import BufferCaps, BufferSpec
from epcomm.types import RowsPer, align_up


class ReplicatedBuffer(OverCollectives, Buffer):
    """Serves standard mode for tokens that all ranks share; a dispatch sends no rows."""

    name: ClassVar[str] = "collective"
    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.STANDARD})
    serves_replicated: ClassVar[bool] = True

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return COLLECTIVE_CAPS

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[sizes.Region, ...]:
        max_tokens, columns = spec.max_tokens_per_rank, spec.returned_columns(world_size)
        hidden_bytes = spec.dispatch_format.data_bytes(spec.hidden_size)
        total_bytes = spec.hidden_format.data_bytes(spec.hidden_size)
        padded = None if max_tokens is None else align_up(max_tokens, world_size)
        # Rows need no memory, because they are the caller's hidden states.
        return (
            sizes.index_region(spec, rows_per_token=world_size, max_rows=max_tokens),
            *sizes.slot_regions(spec, row_bytes=hidden_bytes, max_rows=max_tokens),
            *sizes.sum_regions(spec, world_size, sent=padded, returned=padded, columns=columns),
            sizes.rows_region("gathered sums", total_bytes, per_token=world_size, max_rows=padded),
        )

    @classmethod
    def wire_bytes(
        cls, spec: BufferSpec, call: sizes.CallShape, *, backward: bool = False
    ) -> BufferTraffic:
        share = align_up(call.tokens_of_rank[call.rank], call.world_size) // call.world_size
        # Every rank sends each other rank one share of the partial sums and one of the totals.
        wide = sizes.RowBytes.of(spec, call.world_size, backward=backward)
        # Totals are not quantised.
        plain = replace(spec, combine_format=None, backward_format=None)
        share_bytes = share * (wide.combine + sizes.RowBytes.of(plain, backward=backward).combine)
        return BufferTraffic(
            combine_bytes=share_bytes * (call.world_size - 1),
            bytes_between=share_bytes * len(spec.ranks_elsewhere(call.rank)),
        )

    def dispatch(self, call: DispatchCall) -> Dispatched:
        num_local = self._spec.num_local_experts
        topk_ids, fault = guard_ids(call.topk_ids, self._num_experts, call.error)
        counts = count_experts(topk_ids, self._num_experts)
        counts = counts[self._first_expert : self._first_expert + num_local]
        code, *host_counts = torch.cat([fault.view(1), counts]).tolist()
        # Convert before the header is sent, so that the header can report a failure.
        rows = wire_tensor_of(call, self._spec.dispatch_format)
        batch = self._new_batch(call)
        flags = self._compare_batches(call, batch, FaultCode(code))
        ids = topk_ids.to(torch.int32)
        index, slot_weights = self._index(ids, call.topk_weights, counts, host_counts)
        num_tokens = topk_ids.shape[0]
        return Dispatched(
            # Unquantised rows share the memory of the caller's tensor, but not its history.
            rows=replace(rows, data=rows.data.detach()),
            index=index,
            slot_weights=slot_weights,
            exchange_plan=SignedExchangePlan(
                num_tokens=num_tokens,
                num_rows=num_tokens,
                index=index,
                call=batch,
                group_sums=self._group_sums(*self._share_of(call, topk_ids), topk_ids, index),
            ),
            any_flags=flags,
        )

    def _share_of(self, call: DispatchCall, topk_ids: Tensor) -> tuple[DispatchCall, Tensor]:
        """Return the call with the entries of the tokens that this rank adds up, and their ids.

        Those of padding have no expert.
        """
        if self._groups is None or not self._groups.sums_at_source:
            return call, topk_ids
        share = align_up(topk_ids.shape[0], self._world_size) // self._world_size
        padding = share * self._world_size - topk_ids.shape[0]
        mine = slice(self._rank * share, (self._rank + 1) * share)
        assert call.topk_groups is not None, "checked by the dispatcher"
        weights, groups = (
            F.pad(each, (0, 0, 0, padding))[mine] for each in (call.topk_weights, call.topk_groups)
        )
        own = replace(call, topk_weights=weights, topk_groups=groups)
        return own, F.pad(topk_ids, (0, 0, 0, padding), value=-1)[mine]

    def _compare_batches(self, call: DispatchCall, batch: CallSign, code: FaultCode) -> BatchFlags:
        """Return the flags of all ranks, or raise on every rank if a call is bad or differs.

        If the host does not wait in collectives and spec.compares_calls is not set, a rank checks
        only its own call: all ranks have the same tokens, so they find the same faults.
        """
        names = self._collectives.names
        own_error = call.error
        if code is FaultCode.IDS:
            own_error = ids_error(call.topk_ids, self._num_experts, names)
        if not self._compares_calls:
            if own_error is not None:
                raise own_error
            return call.flags
        headers = self._calls.announce(
            CallKind.DISPATCH,
            batch,
            error=own_error,
            fault=code,
            flags=call.flags,
            num_rows=call.topk_ids.shape[0],
            expert_names=call.expert_names,
        )
        tokens_of_rank = [words[ROWS] for words in headers]
        if len(set(tokens_of_rank)) > 1:
            raise ShapeError(
                f"dispatch: ranks pass {', '.join(map(str, tokens_of_rank))} tokens, expected the "
                f"same tokens on all of them, because EPConfig.replicated is set (this is "
                f"{names.where}); pass the same batch on all ranks, or do not set replicated"
            )
        return any_flags([words[FLAGS] for words in headers])

    def cached_dispatch(self, hidden_states: Tensor, exchange_plan: ExchangePlan) -> Tensor:
        return hidden_states

    def combine(
        self,
        rows: Tensor,
        exchange_plan: ExchangePlan | None,
        *,
        rows_per: RowsPer,
        slot_weights: Tensor | None = None,
        row_scalars: Tensor | None = None,
        error: EPError | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if error is not None:
            self._announce(CallKind.COMBINE, ANY_BATCH, error=error)
            return rows, None
        assert isinstance(exchange_plan, SignedExchangePlan), "an exchange plan of this buffer"
        parts, scalars = self._exchange_sums(
            exchange_plan.sums(rows, rows_per, slot_weights),
            row_scalars,
            lambda sums, kind: self._scatter(sums, exchange_plan, kind),
        )
        total = exchange_plan.total(parts, rows.dtype, has_weights=slot_weights is not None)
        if scalars is None:
            return self._gather(total, CallKind.COMBINE)[: exchange_plan.num_tokens], None
        layout, kind = self._scalar_layout(rows.dtype), CallKind.DISPATCH_BACKWARD
        returned = self._gather(layout.pack_rows(total, scalars), kind)[: exchange_plan.num_tokens]
        return layout.data(returned).contiguous(), layout.scalars(returned).contiguous()

    def _scatter(self, rows: Tensor, exchange_plan: SignedExchangePlan, kind: CallKind) -> Tensor:
        """Announce the call and scatter [T, ...]; return this rank's share of each rank's rows.

        Returns: [W, T' / W, ...], where T' is T rounded up to a multiple of W.
        """
        self._announce(kind, exchange_plan.call)
        world_size = self._world_size
        padding = align_up(rows.shape[0], world_size) - rows.shape[0]
        if padding:
            rows = torch.cat([rows, rows.new_zeros(padding, rows.shape[1])])
        share = rows.shape[0] // world_size
        self._traffic.combine([share] * world_size, row_bytes_of(rows))
        parts = self._collectives.all_to_all(rows, phase=kind.text)
        return parts.view(world_size, share, rows.shape[1])

    def _gather(self, share: Tensor, kind: CallKind) -> Tensor:
        """Gather the shares [T' / W, ...] of all ranks into [T', ...]."""
        self._traffic.combine([share.shape[0]] * self._world_size, row_bytes_of(share))
        return self._collectives.all_gather(share, phase=kind.text).flatten(0, 1)
