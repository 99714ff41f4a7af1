"""Compute a batch in chunks, so that rows of one chunk are sent while another is computed.

With three chunks, D their dispatch, E their experts, C their combine:

    caller            E0      E1      E2
    thread    D0      D1      C0 D2   C1      C2

A batch may be one chunk: then other work is done while it is sent, such as shared experts.

Backward runs the same pipeline from its end. For each chunk it computes the gradients of the rows,
begins to return them, and computes the gradients of the experts meanwhile (LateGradient).

An error ends its chunk at the same call on all ranks, and the other chunks go on. So all ranks make
the same calls, and the group stays usable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from epcomm.dispatchers.checks import NeedGrad, unready_error
from epcomm.dispatchers.dispatcher import Dispatcher
from epcomm.errors import EPError
from epcomm.records import CombineInput, DispatchOutput, TopKOutput
from epcomm.weights.unquantized import ExpertTensors, LateGradient


def run(
    dispatcher: Dispatcher[Any, Any],
    x: Tensor,
    topk: TopKOutput,
    weights: ExpertTensors,
    compute: Callable[[DispatchOutput, ExpertTensors], CombineInput],
    *,
    number: int,
    experts_need_grad: NeedGrad,
    where: str,
    meanwhile: Callable[[], object] | None = None,
) -> Tensor:
    """Dispatch, compute and combine the chunks; return y [T, H].

    Args:
        dispatcher: is_asynchronous.
        x, topk: the tokens, as for dispatch.
        weights: the experts.
        compute: computes the experts of a chunk.
        number: the number of chunks, equal on all ranks.
        experts_need_grad: see Dispatcher.dispatch().
        where: this rank for messages.
        meanwhile: local work to do while the first chunk is sent.

    Collective: yes.   Raises: as dispatch and combine, on every rank; and what compute() raises.
    """
    totals = _totals(weights, number)

    def steps(
        x: Tensor, topk: TopKOutput, beside: Callable[[], object] | None
    ) -> Iterator[Tensor | None]:
        """Compute one chunk, in three steps; the last returns y."""
        dispatching = dispatcher.dispatch_async(x, topk, experts_need_grad=experts_need_grad)
        share = _share(weights, totals)
        yield None
        problem = _problem_in(beside)
        out = dispatching.wait()
        try:
            if problem is not None:
                raise problem
            results = compute(out, share)
        except Exception as problem:
            with suppress(EPError, RuntimeError):
                error = unready_error(problem, where, function="combine")
                dispatcher.refuse_combine(error, out.handle.exchange_plan)
            raise
        combining = dispatcher.combine_async(results)
        yield None
        yield combining.wait()

    chunks = [
        steps(*part, meanwhile if place == 0 else None)
        for place, part in enumerate(_split(x, topk, number))
    ]
    ys, problem = [], None
    for last in range(number + 2):
        for chunk in reversed(chunks[max(0, last - 2) : last + 1]):
            try:
                y = next(chunk, None)
            except Exception as error:  # noqa: BLE001
                problem = problem or error
            else:
                ys += [] if y is None else [y]
    if problem is not None:
        raise problem
    return ys[0] if number == 1 else torch.cat(ys)


def _split(x: Tensor, topk: TopKOutput, number: int) -> list[tuple[Tensor, TopKOutput]]:
    """Return `number` chunks of equal numbers of tokens, or one more; they may be empty.

    Tensors that do not fit are in every chunk as they are, so that its dispatch reports them.
    """
    names = ("topk_ids", "topk_weights") + ("topk_groups",) * (topk.topk_groups is not None)
    tensors = {"x": x} | {name: getattr(topk, name) for name in names}
    fit = all(isinstance(each, Tensor) and each.dim() > 0 for each in tensors.values())
    if number == 1 or not fit or len({each.shape[0] for each in tensors.values()}) != 1:
        return [(x, topk)] * number
    parts = {name: each.tensor_split(number) for name, each in tensors.items()}
    chunks = [{name: part[place] for name, part in parts.items()} for place in range(number)]
    return [(chunk.pop("x"), replace(topk, **chunk)) for chunk in chunks]


def _problem_in(work: Callable[[], object] | None) -> Exception | None:
    """Do the work and return its exception, or None."""
    try:
        if work is not None:
            work()
    except Exception as problem:  # noqa: BLE001
        return problem
    return None


class _Total:
    """The sum of the gradients that the chunks of one call give to a tensor."""

    def __init__(self, number: int) -> None:
        """Start a sum of `number` gradients."""
        self._number, self._num_added = number, 0
        self._sum: Tensor | None = None

    def add(self, gradient: Tensor) -> Tensor | None:
        """Add a gradient in float32 or wider; return the sum after the last one, else None."""
        if self._number == 1:
            return gradient
        wide = torch.promote_types(gradient.dtype, torch.float32)
        self._sum = gradient.to(wide) if self._sum is None else self._sum + gradient
        self._num_added += 1
        if self._num_added < self._number:
            return None
        total, self._sum, self._num_added = self._sum, None, 0
        return total.to(gradient.dtype)


class _Share(torch.autograd.Function):
    """A tensor of the experts as one chunk uses it.

    Its node is created before the rows are received, so backward runs it after it has begun to
    return their gradients.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor, total: _Total, late: LateGradient) -> Tensor:
        ctx.total, ctx.late = total, late  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: FunctionCtx, gradient: Tensor | None
    ) -> tuple[Tensor | None, None, None]:
        gradient = ctx.late.take(gradient)  # type: ignore[attr-defined]
        return ctx.total.add(gradient), None, None  # type: ignore[attr-defined]


def _totals(weights: ExpertTensors, number: int) -> dict[str, _Total]:
    tensors = weights.tensors() if torch.is_grad_enabled() else {}
    return {name: _Total(number) for name, each in tensors.items() if each.requires_grad}


def _share(weights: ExpertTensors, totals: dict[str, _Total]) -> ExpertTensors:
    """Return the experts as one chunk uses them."""
    if not totals:
        return weights
    late = {name: LateGradient() for name in totals}
    tensors = weights.tensors()
    shares = {name: _Share.apply(tensors[name], totals[name], late[name]) for name in totals}
    return weights.exchanged(shares, late=late)
