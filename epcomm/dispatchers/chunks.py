"""Compute a batch in chunks, so that rows of one chunk are sent while another is computed.

With three chunks, D their dispatch, E their experts, C their combine:

    caller            E0      E1      E2
    thread    D0      D1      C0 D2   C1      C2

A batch may be one chunk: then other work is done while it is sent, such as shared experts.

Backward runs the same pipeline from its end. For each chunk it computes the gradients of the rows,
begins to return them, and computes the gradients of the experts meanwhile (LateGradient). On GPUs,
where these take longer than the transfers, it computes them for all chunks at the end: otherwise
each chunk would read and write a sum in float32, 8 ms for 32 experts of DeepSeek-V3 on an H100.

An error ends its chunk at the same call on all ranks, and the other chunks go on. So all ranks make
the same calls, and the group stays usable.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from epcomm.dispatchers.checks import NeedGrad
from epcomm.dispatchers.dispatcher import Dispatcher
from epcomm.micro_batches import Steps
from epcomm.records import CombineInput, DispatchOutput, ExchangePlan, TopKOutput
from epcomm.types import WireTensor, data_of
from epcomm.weights.unquantized import ExpertTensors, LateGradient


def run(
    dispatcher: Dispatcher[Any, Any],
    x: Tensor | WireTensor,
    topk: TopKOutput,
    weights: ExpertTensors,
    compute: Callable[[DispatchOutput, ExpertTensors], CombineInput],
    *,
    number: int,
    joins: bool,
    experts_need_grad: NeedGrad,
    meanwhile: Callable[[], object] | None = None,
) -> Steps[tuple[Tensor, list[ExchangePlan]]]:
    """Dispatch, compute and combine the chunks; return y [T, H] and their exchange plans.

    It yields `number` + 1 times, while calls that it has begun are sent.

    dispatcher: begins calls.   number: of chunks, equal on all ranks.
    x, topk, experts_need_grad: see Dispatcher.dispatch().
    joins: gradients of experts are computed for all chunks together, at the end of backward; else
        for each chunk, while those of its rows are returned.
    meanwhile: local work to do while the first chunk is sent.

    Collective: yes.   Raises: as dispatch and combine, on every rank; and what compute() raises.
    """
    tensors = weights.tensors() if torch.is_grad_enabled() else {}
    late = {
        name: LateGradient[Any](number, joins=joins)
        for name, each in tensors.items()
        if each.requires_grad
    }
    plans: list[ExchangePlan] = []

    def steps(
        x: Tensor | WireTensor, topk: TopKOutput, beside: Callable[[], object] | None
    ) -> Iterator[Tensor | None]:
        """Compute one chunk, in three steps; the last returns y."""
        dispatching = dispatcher.dispatch_async(x, topk, experts_need_grad=experts_need_grad)
        share, problem = _share(weights, late), None
        yield None
        try:
            if beside is not None:
                beside()
        except Exception as error:  # noqa: BLE001
            problem = error
        out = dispatching.wait()
        plans.append(out.handle.exchange_plan)
        try:
            if problem is not None:
                raise problem
            results = compute(out, share)
        except Exception as error:
            dispatcher.refuse_results(error, out.handle)
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
        if last > 0:
            yield
        for chunk in reversed(chunks[max(0, last - 2) : last + 1]):
            try:
                y = next(chunk, None)
            except Exception as error:  # noqa: BLE001
                problem = problem or error
            else:
                ys += [] if y is None else [y]
    if problem is not None:
        raise problem
    return ys[0] if number == 1 else torch.cat(ys), plans


def _split(
    x: Tensor | WireTensor, topk: TopKOutput, number: int
) -> list[tuple[Tensor | WireTensor, TopKOutput]]:
    """Return `number` chunks of equal numbers of tokens, or one more; they may be empty.

    Arguments that do not fit are in every chunk as they are, so that its dispatch reports them.
    """
    if number == 1 or not isinstance(x, Tensor | WireTensor) or not isinstance(topk, TopKOutput):
        return [(x, topk)] * number
    names = ("topk_ids", "topk_weights") + ("topk_groups",) * (topk.topk_groups is not None)
    tensors = {name: getattr(topk, name) for name in names}
    every = (data_of(x), *tensors.values())
    fit = all(isinstance(each, Tensor) and each.dim() > 0 for each in every)
    if not fit or len({each.shape[0] for each in every}) != 1:
        return [(x, topk)] * number
    length, rest = divmod(len(every[0]), number)
    chunks: list[tuple[Tensor | WireTensor, TopKOutput]] = []
    for place in range(number):
        begin = place * length + min(place, rest)
        part = slice(begin, begin + length + (place < rest))
        given = {name: each[part] for name, each in tensors.items()}
        rows = x.part(part) if isinstance(x, WireTensor) else x[part]
        chunks.append((rows, replace(topk, **given)))
    return chunks


class _Share(torch.autograd.Function):
    """A tensor of the experts as one chunk uses it.

    Its node is created before the rows are received, so backward runs it after it has begun to
    return their gradients.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor, late: LateGradient[Any]) -> Tensor:
        ctx.late = late  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor | None) -> tuple[Tensor | None, None]:  # type: ignore[override]
        return ctx.late.add(gradient), None  # type: ignore[attr-defined]


def _share(weights: ExpertTensors, late: Mapping[str, LateGradient[Any]]) -> ExpertTensors:
    """Return the experts as one chunk uses them."""
    tensors = weights.tensors()
    shares = {name: _Share.apply(tensors[name], each) for name, each in late.items()}
    return weights.exchanged(shares, late=late) if late else weights
