"""Compute a batch in chunks, so that rows of one chunk are sent while another is computed.

A batch may be one chunk: then other work is done while it is sent, such as shared experts.

With three chunks, D their dispatch, E their experts, C their combine:

    caller            E0      E1      E2
    thread    D0      D1      C0 D2   C1      C2

A rank makes D(i + 1) before it learns that C(i - 1) or an earlier call has failed, and C(i) before
it learns of D(i + 1). So a rank with an error makes these calls too, as refusals; then all ranks
have made the same calls, and the group is usable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from epcomm.dispatchers.checks import NeedGrad, unready_error
from epcomm.dispatchers.dispatcher import Dispatcher
from epcomm.errors import EPError
from epcomm.records import CombineInput, DispatchOutput, Pending, TopKOutput
from epcomm.weights.unquantized import ExpertTensors


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """The tokens of one chunk, and the experts, whose gradients the chunks add up."""

    x: Tensor
    topk: TopKOutput
    weights: ExpertTensors


def split(x: Tensor, topk: TopKOutput, weights: ExpertTensors, number: int) -> list[Chunk]:
    """Return `number` chunks of equal numbers of tokens, or one more; they may be empty.

    Tensors that do not fit are in every chunk as they are, so that the first dispatch reports them.
    """
    tensors = (x, topk.topk_ids, topk.topk_weights)
    fit = all(isinstance(each, Tensor) and each.dim() > 0 for each in tensors)
    if number == 1 or not fit or len({each.shape[0] for each in tensors}) != 1:
        return [Chunk(x=x, topk=topk, weights=weights)] * number
    xs, ids, router_weights = (each.tensor_split(number) for each in tensors)
    groups: Iterable[Tensor | None] = repeat(None)
    if topk.topk_groups is not None:
        groups = topk.topk_groups.tensor_split(number)
    parts = zip(xs, ids, router_weights, groups, _shares(weights, number), strict=False)
    return [
        Chunk(
            x=rows,
            topk=replace(topk, topk_ids=of_ids, topk_weights=of_weights, topk_groups=of_groups),
            weights=share,
        )
        for rows, of_ids, of_weights, of_groups, share in parts
    ]


def run(
    dispatcher: Dispatcher[Any, Any],
    chunks: Sequence[Chunk],
    compute: Callable[[int, DispatchOutput], CombineInput],
    *,
    experts_need_grad: NeedGrad,
    where: str,
    meanwhile: Callable[[], object] | None = None,
) -> Tensor:
    """Dispatch, compute and combine the chunks; return y [T, H].

    Args:
        dispatcher: is_asynchronous.
        chunks: equally many on all ranks.
        compute: computes the experts of the chunk with this number.
        experts_need_grad: see Dispatcher.dispatch().
        where: this rank for messages.
        meanwhile: local work to do while the first chunk is sent.

    Collective: yes.   Raises: as dispatch and combine, on every rank; and what compute() raises.
    """
    call = _ChunkedCall(dispatcher, chunks, experts_need_grad, where)
    try:
        return call.run(compute, meanwhile)
    except BaseException:
        call.finish()
        raise


class _ChunkedCall:
    def __init__(
        self,
        dispatcher: Dispatcher[Any, Any],
        chunks: Sequence[Chunk],
        experts_need_grad: NeedGrad,
        where: str,
    ) -> None:
        self._dispatcher, self._chunks, self._where = dispatcher, chunks, where
        self._experts_need_grad = experts_need_grad
        # The calls that were begun and not waited for.
        self._dispatching: Pending[DispatchOutput] | None = None
        self._combining: Pending[Tensor] | None = None

    def run(
        self,
        compute: Callable[[int, DispatchOutput], CombineInput],
        meanwhile: Callable[[], object] | None,
    ) -> Tensor:
        ys: list[Tensor] = []
        self._begin_dispatch(0)
        problem: Exception | None = None
        try:
            if meanwhile is not None:
                meanwhile()
        except Exception as error:  # noqa: BLE001
            problem = error
        out, last = self._dispatched(), len(self._chunks) - 1
        for number in range(len(self._chunks)):
            if number < last:
                try:
                    self._begin_dispatch(number + 1)
                except Exception as error:
                    self._refuse_combine(error, out)
                    raise
            results: CombineInput | None = None
            try:
                results = None if problem is not None else compute(number, out)
            except Exception as error:  # noqa: BLE001
                problem = error
            if self._combining is not None:
                ys.append(self._combined())
            try:
                if problem is not None:
                    self._refuse_combine(problem, out)
                    raise problem
                self._combining = self._dispatcher.combine_async(results)
            except Exception as error:
                if number + 1 < last:
                    self._refuse_dispatch(error)
                raise
            if number < last:
                out = self._dispatched()
        ys.append(self._combined())
        return ys[0] if last == 0 else torch.cat(ys)

    def finish(self) -> None:
        """Wait for the calls that were begun, whatever their result."""
        for pending in (self._combining, self._dispatching):
            if pending is not None:
                with suppress(EPError, RuntimeError):
                    pending.wait()

    def _begin_dispatch(self, number: int) -> None:
        chunk = self._chunks[number]
        self._dispatching = self._dispatcher.dispatch_async(
            chunk.x, chunk.topk, experts_need_grad=self._experts_need_grad
        )

    def _dispatched(self) -> DispatchOutput:
        pending, self._dispatching = self._dispatching, None
        assert pending is not None, "its dispatch was begun"
        return pending.wait()

    def _combined(self) -> Tensor:
        pending, self._combining = self._combining, None
        assert pending is not None, "its combine was begun"
        return pending.wait()

    def _refuse_combine(self, problem: Exception, out: DispatchOutput) -> None:
        with suppress(EPError, RuntimeError):
            error = unready_error(problem, self._where, function="combine")
            self._dispatcher.refuse_combine(error, out.handle.exchange_plan)

    def _refuse_dispatch(self, problem: Exception) -> None:
        with suppress(EPError, RuntimeError):
            self._dispatcher.refuse(unready_error(problem, self._where))


class _Total:
    """The sum of the gradients that the chunks of one call give to a tensor, in float32."""

    def __init__(self, number: int) -> None:
        """Start a sum of `number` gradients."""
        self._number, self._num_added = number, 0
        self._sum: Tensor | None = None

    def add(self, gradient: Tensor) -> Tensor | None:
        """Add a gradient; return the sum after the last one, else None."""
        self._sum = gradient.float() if self._sum is None else self._sum.add_(gradient)
        self._num_added += 1
        if self._num_added < self._number:
            return None
        total, self._sum, self._num_added = self._sum, None, 0
        return total.to(gradient.dtype)


class _Share(torch.autograd.Function):
    """A tensor as one chunk uses it."""

    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor, total: _Total) -> Tensor:
        ctx.total = total  # type: ignore[attr-defined]
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, None]:  # type: ignore[override]
        return ctx.total.add(gradient), None  # type: ignore[attr-defined]


def _shares(weights: ExpertTensors, number: int) -> list[ExpertTensors]:
    """Return the experts for each chunk; narrow gradients are added in float32, rounded once."""
    trained = {
        name: (tensor, _Total(number))
        for name, tensor in weights.tensors().items()
        if torch.is_grad_enabled() and tensor.requires_grad and tensor.itemsize < 4
    }
    if not trained:
        return [weights] * number
    return [
        weights.exchanged({name: _Share.apply(*pair) for name, pair in trained.items()})
        for _ in range(number)
    ]
