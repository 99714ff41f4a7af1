"""Dispatch and combine of a training step as operators with names, for those who watch operators.

A policy of selective activation checkpointing chooses by name what it saves:

    saved = {torch.ops.epcomm.dispatch.default, torch.ops.epcomm.combine.default}

What is saved does not travel again when backward recomputes. An operator takes tensors and numbers
alone, so the call of a buffer goes by a number, and so does the exchange plan of a batch: when rows
come from the storage of a policy, that number still finds it, because the graph of the forward pass
holds it.

Only a TorchDispatchMode sees operators, so without one a call goes to its buffer directly.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor
from torch.library import Library

from epcomm.buffers.base import Buffer, Dispatched
from epcomm.calls.call import DispatchCall
from epcomm.protocol import BatchFlags
from epcomm.records import ExchangePlan, SlotIndex
from epcomm.types import RowsPer, WireTensor


@dataclass(frozen=True, kw_only=True, eq=False)
class CombineCall:
    """The arguments of combine that are no tensors of the graph.

    lasts: rows along the exchange plan are the caller's own; see Buffer.cached_dispatch().
    """

    buffer: Buffer
    exchange_plan: ExchangePlan
    rows_per: RowsPer
    gradient_dtype: torch.dtype
    lasts: bool


@dataclass(kw_only=True, eq=False)
class _DispatchOn:
    """A call of a buffer, which holds the exchange plan that came of it until the caller does."""

    buffer: Buffer
    call: DispatchCall
    exchange_plan: ExchangePlan | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class _Arrival:
    """The fields that a dispatch returns beside its plan and tensors; `rows` has no elements."""

    rows: WireTensor
    index: SlotIndex
    any_flags: BatchFlags


# Who makes a call or has an exchange plan holds it; nothing is kept alive here.
_numbered: WeakValueDictionary[int, object] = WeakValueDictionary()
_arrivals: WeakKeyDictionary[ExchangePlan, _Arrival] = WeakKeyDictionary()
_numbers = itertools.count()


def _number_of(record: object) -> int:
    number = next(_numbers)
    _numbered[number] = record
    return number


def dispatch(buffer: Buffer, call: DispatchCall) -> Dispatched:
    """Dispatch through the operator, where somebody watches.

    Lifetime: a policy's storage serves as long as somebody holds the exchange plan.
    Collective: as Buffer.dispatch; unless a policy had saved it, on all ranks alike.
    """
    if not _is_watched():
        return buffer.dispatch(call)
    held = _DispatchOn(buffer=buffer, call=call)
    rows, scales, slot_weights, number = torch.ops.epcomm.dispatch.default(
        call.unquantized, call.topk_ids, call.topk_weights, _number_of(held)
    )
    exchange_plan = _numbered[int(number)]
    assert isinstance(exchange_plan, ExchangePlan), "the operator returned the number of one"
    arrival = _arrivals[exchange_plan]
    has_scales = arrival.rows.scales is not None
    return Dispatched(
        rows=replace(arrival.rows, data=rows, scales=scales if has_scales else None),
        index=arrival.index,
        slot_weights=slot_weights,
        exchange_plan=exchange_plan,
        any_flags=arrival.any_flags,
    )


def combine(rows: Tensor, slot_weights: Tensor | None, call: CombineCall) -> Tensor:
    """Combine through the operator, where somebody watches: y [T, H].

    Collective: as Buffer.combine; unless a policy had saved it, on all ranks alike.
    """
    if not _is_watched():
        return _combine_on(rows, slot_weights, call)
    return torch.ops.epcomm.combine.default(rows, slot_weights, _number_of(call))


def _is_watched() -> bool:
    """Tell whether a mode sees operators that is more than one for tensors without data.

    A tensor without data has nothing that a policy could save, and the operators no kernel for it.
    """
    keys = torch._C._TorchDispatchModeKey
    has_mode = torch._C._len_torch_dispatch_stack() > 0
    return has_mode and torch._C._get_dispatch_mode(keys.FAKE) is None


def _dispatch_kernel(
    hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, call: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    held = _numbered[call]
    assert isinstance(held, _DispatchOn), "numbers are made here"
    out = held.buffer.dispatch(held.call)
    assert out.slot_weights is not None, "to a trainable buffer, weights travel"
    rows, scales = out.rows.data, out.rows.scales
    nothing = rows.new_empty(0)
    shell = replace(out.rows, data=nothing, scales=None if scales is None else nothing)
    _arrivals[out.exchange_plan] = _Arrival(rows=shell, index=out.index, any_flags=out.any_flags)
    held.exchange_plan = out.exchange_plan
    number = torch.tensor(_number_of(out.exchange_plan), device="cpu")
    return rows, nothing.clone() if scales is None else scales, out.slot_weights, number


def _combine_kernel(rows: Tensor, slot_weights: Tensor | None, call: int) -> Tensor:
    held = _numbered[call]
    assert isinstance(held, CombineCall), "numbers are made here"
    return _combine_on(rows, slot_weights, held)


def _combine_on(rows: Tensor, slot_weights: Tensor | None, call: CombineCall) -> Tensor:
    return call.buffer.combine(
        rows, call.exchange_plan, rows_per=call.rows_per, slot_weights=slot_weights
    ).y


_library = Library("epcomm", "DEF")
_library.define(
    "dispatch(Tensor hidden_states, Tensor topk_ids, Tensor topk_weights, int call)"
    " -> (Tensor rows, Tensor scales, Tensor slot_weights, Tensor number)"
)
_library.define("combine(Tensor rows, Tensor? slot_weights, int call) -> Tensor")
_library.impl("dispatch", _dispatch_kernel, "CompositeExplicitAutograd")
_library.impl("combine", _combine_kernel, "CompositeExplicitAutograd")
