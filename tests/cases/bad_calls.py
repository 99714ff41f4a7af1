"""Faults of rank 1 in a call, and the errors of all ranks; test_bad_calls.py plays them."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from epcomm import (
    CapacityError,
    ConfigError,
    EPError,
    HandleError,
    RowsCombineInput,
    ShapeError,
    TopKOutput,
)
from epcomm.calls.order import Calls
from epcomm.dispatchers import dispatcher as of_rows
from epcomm.protocol import FaultCode, pack_fault
from epcomm.quantization import FP8_FLOAT32_SCALES, quantize
from epcomm.types import RowsPer, WireFormat, WireTensor
from tests.cases.playing import SPEC, E, OwnError, Play, fail, identity

WRONG_TENSOR = "a tensor of wrong shape, dtype or device on rank 1"
WRONG_ROWS = "a combine input of wrong layout, shape, dtype or device on rank 1"
UNREADY = "dispatch: an error while tokens were routed or prepared for dispatch on rank 1"
FAILED_RESULTS = (
    "combine: an error while the experts computed or their results were summed on rank 1"
)
WRONG_HANDLE = "a batch combined twice, by another dispatcher, or after close() on rank 1"


@dataclass(frozen=True, kw_only=True)
class Bad:
    """A mistake of rank 1.

    call: the call of rank 1.   others: the calls of the other ranks meanwhile.
    own: part of the message on rank 1.   told: part of it on the others.   error: on all ranks.
    raised: the error of rank 1, if it differs from that of the others.
    trains: only where there are gradients.   reads_ids: the host reads ids for the message,
        so on a static buffer rank 1 gets the message of the others.
    """

    id: str
    call: Callable[[Play], object]
    own: str
    told: str = WRONG_TENSOR
    error: type[EPError] = ShapeError
    raised: type[Exception] | None = None
    others: Callable[[Play], object] = Play.whole_call
    trains: bool = False
    reads_ids: bool = False


def with_x(spoil: Callable[[Tensor], object]) -> Callable[[Play], object]:
    return lambda play: play.whole_call(x=spoil(play.x.detach()))


def with_ids(spoil: Callable[[Tensor], object]) -> Callable[[Play], object]:
    return lambda play: play.whole_call(topk=replace(play.topk, topk_ids=spoil(play.topk.topk_ids)))


def with_weights(spoil: Callable[[Tensor], object]) -> Callable[[Play], object]:
    return lambda play: play.whole_call(
        topk=replace(play.topk, topk_weights=spoil(play.topk.topk_weights))
    )


def last_id(value: int) -> Callable[[Tensor], Tensor]:
    def spoil(ids: Tensor) -> Tensor:
        ids = ids.clone()
        ids[-1, -1] = value
        return ids

    return spoil


def combined(make: Callable[[Play], object]) -> Callable[[Play], object]:
    """Combine the result of `make` instead of the results of the current batch."""

    def call(play: Play) -> object:
        play.begin()
        return play.dispatcher.combine(make(play))

    return call


def rows_input(play: Play, rows: object, rows_per: object = RowsPer.SLOT) -> RowsCombineInput:
    return replace(play.results, hidden_states=rows, rows_per=rows_per)


class DTensor(Tensor):
    """An imitation of torch.distributed.tensor.DTensor, whose import would take seconds."""

    def to_local(self) -> Tensor:
        return self.as_subclass(Tensor)


X_FAULTS = [
    *(
        Bad(id=f"x {name}", call=with_x(spoil), own=own)
        for name, spoil, own in (
            ("is None", lambda x: None, "NoneType, expected a tensor [T, 16]"),
            (
                "of three dimensions",
                lambda x: x.unsqueeze(0),
                "hidden_states is [1, 3, 16], expected [T, 16] (rank 1 of 2); flatten it by resh",
            ),
            ("of another H", lambda x: x[:, :8], "hidden_states is [3, 8], expected [3, 16] (rank"),
            (
                "int32",
                Tensor.int,
                "hidden_states is torch.int32, expected torch.float32 (rank 1 of 2); call "
                "hidden_states.to(torch.float32)",
            ),
            (
                "quantised to another format than that on the wire",
                lambda x: quantize(x, FP8_FLOAT32_SCALES),
                "are fp8_e4m3/128 with scales of torch.float32, expected fp32 (rank 1 of 2)",
            ),
            (
                "quantised without elements",
                lambda x: WireTensor(data=x[:, :8], format=WireFormat.of(x.dtype)),
                "hidden_states.data is [3, 8], expected [3, 16] (rank 1 of 2)",
            ),
            (
                "sparse",
                Tensor.to_sparse,
                "hidden_states is torch.sparse_coo, expected a plain strided tensor (rank 1 of 2); "
                "call hidden_states.to_dense()",
            ),
            (
                "nested",
                lambda x: torch.nested.nested_tensor([x[0], x[1, :4]]),
                "hidden_states is nested, expected a plain strided tensor",
            ),
            ("on meta", lambda x: x.to("meta"), "is on meta, expected cpu"),
            (
                "is a DTensor",
                lambda x: x.as_subclass(DTensor),
                "is a DTensor, expected a plain strided tensor (rank 1 of 2); call "
                "hidden_states.to_local()",
            ),
        )
    ),
    Bad(
        id="M + 1 tokens",
        call=lambda play: play.whole_call(
            x=play.x.detach().repeat(2, 1),
            topk=TopKOutput(
                topk_ids=play.topk.topk_ids.repeat(2, 1),
                topk_weights=play.topk.topk_weights.repeat(2, 1),
            ),
        ),
        own="hidden_states has 6 tokens, expected at most max_tokens_per_rank = 5 (rank 1 of 2)",
        told="more tokens than max_tokens_per_rank on rank 1",
        error=CapacityError,
    ),
]

TOPK_FAULTS = [
    *(
        Bad(id=name, call=call, own=own)
        for name, call, own in (
            (
                "topk is a tuple",
                lambda play: play.whole_call(topk=(play.topk.topk_ids, play.topk.topk_weights)),
                "dispatch: topk is tuple, expected a TopKOutput (rank 1 of 2)",
            ),
            ("ids int32", with_ids(Tensor.int), "topk_ids is torch.int32, expected torch.int64"),
            ("ids of another K", with_ids(lambda ids: ids.repeat(1, 2)), "topk_ids is [3, 4]"),
            (
                "ids of another T",
                with_ids(lambda ids: ids[:2]),
                "topk_ids is [2, 2], expected [3, 2] (rank 1 of 2); pass tensors of one batch",
            ),
            ("weights int", with_weights(Tensor.int), "topk_weights is torch.int32, expected"),
            (
                "weights of another T",
                with_weights(lambda weights: weights.repeat(2, 1)),
                "topk_weights is [6, 2], expected [3, 2] (rank 1 of 2)",
            ),
        )
    ),
    *(
        Bad(
            id=f"id {name}",
            call=with_ids(last_id(value)),
            own=f"topk_ids holds {value}, expected -1 or 0 to 7 (rank 1 of 2)",
            told="topk_ids out of range on rank 1",
            reads_ids=True,
        )
        for name, value in (("E", E), ("-2", -2), ("2**40", 2**40))
    ),
]


def call_closed(play: Play) -> object:
    dispatcher = play.closing
    out = dispatcher.dispatch(play.x, play.topk)
    if play.group.rank == 1:
        dispatcher.close()
        dispatcher.close()
    return dispatcher.combine(identity(out))


def dispatch_closed(play: Play) -> object:
    dispatcher = play.closing
    if play.group.rank == 1:
        dispatcher.close()
    return dispatcher.combine(identity(dispatcher.dispatch(play.x, play.topk)))


def without_grad(play: Play) -> object:
    with torch.no_grad():
        return play.whole_call()


def training(*names: str) -> Callable[[Play], object]:
    """Make a whole call with experts of which only the tensors named train."""

    def call(play: Play) -> object:
        needs = {name: name in names for name in ("gate_up_proj", "down_proj")}
        out = play.dispatcher.dispatch(play.x, play.topk, experts_need_grad=needs)
        return play.dispatcher.combine(identity(out))

    return call


def combine_faults() -> list[Bad]:
    rows: tuple[tuple[str, Callable[[Play], object], str], ...] = (
        ("no rows", lambda play: play.out.combine_input(play.x[:0]), "hidden_states is [0, 16]"),
        (
            "rows per row, but too many",
            lambda play: rows_input(play, torch.cat([play.results.hidden_states] * 3), RowsPer.ROW),
            "combine: ",
        ),
        (
            "rows per text",
            lambda play: rows_input(play, play.results.hidden_states, "slot"),
            "rows_per is 'slot', expected RowsPer.SLOT or RowsPer.ROW",
        ),
        (
            "rows per row beside slot weights",
            lambda play: replace(play.results, rows_per=RowsPer.ROW, slot_weights=torch.ones(1)),
            "rows_per is ROW but combine applies the weights of each slot (rank 1 of 2)",
        ),
        (
            "rows int32",
            lambda play: rows_input(play, play.results.hidden_states.int()),
            "hidden_states is torch.int32, expected torch.float32 (rank 1 of 2)",
        ),
        (
            "rows None",
            lambda play: play.out.combine_input(None),
            "hidden_states is NoneType, expected a tensor",
        ),
        (
            "slot weights of another C",
            lambda play: replace(play.results, slot_weights=torch.ones(1)),
            "slot_weights is [1], expected",
        ),
        (
            "what dispatch returned",
            lambda play: play.out,
            "the input is a RowsDispatchOutput, expected RowsCombineInput (rank 1 of 2)",
        ),
    )
    handles: tuple[tuple[str, Callable[[Play], object], str], ...] = (
        (
            "no handle",
            combined(lambda play: replace(play.results, handle=None)),
            "the handle is NoneType, expected a Handle",
        ),
        ("a handle used twice", combined(lambda play: play.spent), "was combined before; dispatch"),
        (
            "another dispatcher of the same buffer",
            lambda play: play.another.combine(identity(play.begin())),
            "belongs to another dispatcher",
        ),
        ("another group's handle", combined(lambda play: play.elsewhere), "to another dispatcher"),
    )
    of_handle = partial(Bad, told=WRONG_HANDLE, error=HandleError)
    closed = "the dispatcher is closed (rank 1 of 2); construct a new one"
    return [
        *(Bad(id=i, call=combined(make), own=own, told=WRONG_ROWS) for i, make, own in rows),
        *(of_handle(id=i, call=call, own=own) for i, call, own in handles),
        *(
            of_handle(id=f"{name} after close", call=call, others=call, own=f"{name}: {closed}")
            for name, call in (("combine", call_closed), ("dispatch", dispatch_closed))
        ),
    ]


def opening(**changes: object) -> Callable[[Play], object]:
    of_spec = {name: value for name, value in changes.items() if hasattr(SPEC, name)}
    of_config = {name: value for name, value in changes.items() if name not in of_spec}

    def call(play: Play) -> object:
        spec = replace(SPEC, **of_spec)
        config = replace(play.kind.config, **of_config)
        return type(play.dispatcher)(play.group, spec, config)

    return call


def told_alike(id: str, call: Callable[[Play], object], message: str, **fields: Any) -> Bad:  # noqa: ANN401
    """A mistake of which all ranks get the same message, a ConfigError."""
    return Bad(id=id, call=call, own=message, told=message, error=ConfigError, **fields)


def disagreeing(name: str, **changes: object) -> Bad:
    return told_alike(name, opening(**changes), "ranks disagree on", others=opening())


# tests/planning/test_candidates.py has another value of each field.
CONFIG_FAULTS = [
    disagreeing("another M", max_tokens_per_rank=6),
    disagreeing("K of 0", top_k=0),
    disagreeing("K above P", top_k=E + 1),
    disagreeing("H of None", hidden_size=None),
    disagreeing("P no multiple of the ranks", num_experts=7),
    disagreeing("a dtype that no layer has", dtype=torch.int64),
]


def skip_combine(play: Play) -> object:
    play.begin()
    return play.dispatcher.dispatch(play.x, play.topk)


def two_dispatchers(play: Play, other: object) -> object:
    order = [play.dispatcher, other]
    for dispatcher in order[::-1] if play.is_faulty else order:
        play.call_of(dispatcher)
    return None


def two_batches(play: Play) -> object:
    outs = [play.begin(), play.begin()]
    results = [identity(out) for out in outs]
    return play.dispatcher.combine(results[play.is_faulty])


def skip_backward(play: Play) -> object:
    play.whole_call()
    return play.whole_call()


ORDER_FAULTS = [
    Bad(
        id="rank 1 skips combine",
        call=skip_combine,
        own="dispatch: rank 0 is in combine of dispatcher",
        told="rank 1 is in dispatch of dispatcher",
    ),
    Bad(
        id="two layers of one shape in other order",
        call=lambda play: two_dispatchers(play, play.another),
        others=lambda play: two_dispatchers(play, play.another),
        own="dispatch: rank 0 is in dispatch of dispatcher",
        told="while rank 1 is in dispatch of dispatcher",
    ),
    Bad(
        id="two layers of other shapes in other order",
        call=lambda play: two_dispatchers(play, play.wider),
        others=lambda play: two_dispatchers(play, play.wider),
        own="dispatch: rank 0 is in dispatch of dispatcher",
        told="while rank 1 is in dispatch of dispatcher",
    ),
    Bad(
        id="two batches in other order",
        call=two_batches,
        others=two_batches,
        own="the batch of call",
        told="the batch of call",
    ),
    Bad(
        id="rank 1 skips backward",
        call=skip_backward,
        others=lambda play: play.whole_call().sum().backward(),
        own="rank 0 is in backward of ",
        told="rank 1 is in dispatch of dispatcher",
        trains=True,
    ),
    Bad(
        id="rank 1 opens a layer",
        call=opening(),
        own="an agreement of all ranks (plan, open_buffer or gather_records): rank 0 is in disp",
        told="rank 1 is in an agreement of all ranks (plan, open_buffer or gather_records)",
    ),
]


def of_block(play: Play) -> object:
    return play.block(play.x.detach())


def failing(owner: Callable[[Play], Any], name: str) -> Callable[[Play], object]:
    def call(play: Play) -> object:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(owner(play), name, fail)
            return of_block(play)

    return call


def module_of_sums(play: Play) -> object:
    """Return the module whose reduce_rows() the buffer of the block uses."""
    buffer = play.block.experts.phases.prefill._buffer
    # In hierarchical, the buffer inside hosts sums the results of slots.
    kinds = type(getattr(buffer, "_inner", buffer)).__mro__
    modules = [sys.modules[kind.__module__] for kind in kinds]
    return next(module for module in modules if hasattr(module, "reduce_rows"))


def without_a_header(play: Play) -> object:
    """Call the block while a buffer fails once before its first header."""
    header, left = Calls.header, iter([fail])

    def failing_once(self: Calls, *arguments: Any, **named: Any) -> list[int]:  # noqa: ANN401
        for fail_now in left:
            fail_now()
        return header(self, *arguments, **named)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Calls, "header", failing_once)
        return of_block(play)


def with_error_of_another_group(play: Play) -> object:
    """Call the block while its router raises an error that names rank 7 of another group."""

    def raise_error(*_: object) -> NoReturn:
        error = ConfigError("rank 7 trains other experts")
        error.fault_word = pack_fault(FaultCode.GRAD_MODE, 7)
        raise error

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(play.block.gate, "forward", raise_error)
        return of_block(play)


OWN_ERRORS = [
    *(
        Bad(
            id=name,
            call=call,
            others=of_block,
            own="no memory",
            told=told,
            error=EPError,
            raised=OwnError,
        )
        for name, call, told in (
            ("the router fails", failing(lambda play: play.block.gate, "forward"), UNREADY),
            (
                "the routing fails",
                failing(lambda play: play.block.routing.custom_function, "choose"),
                UNREADY,
            ),
            ("the header cannot be made", without_a_header, UNREADY),
            ("results cannot be cast", failing(lambda _: of_rows, "cast_results"), FAILED_RESULTS),
            ("sums cannot be made", failing(module_of_sums, "reduce_rows"), FAILED_RESULTS),
        )
    ),
    Bad(
        id="the router fails in another group",
        call=with_error_of_another_group,
        others=of_block,
        own="rank 7 trains other experts",
        told=UNREADY,
        error=EPError,
        raised=ConfigError,
    ),
]

LAYER_FAULTS = [
    Bad(
        id="experts called with None",
        call=lambda play: play.block.experts(None, play.topk),
        others=lambda play: play.block.experts(play.x.detach(), play.topk),
        own="dispatch: hidden_states is NoneType, expected a tensor [T, 16] (rank 1 of 2)",
    ),
    *(
        Bad(
            id=f"block called with {name}",
            call=lambda play, spoil=spoil: play.block(spoil(play.x.detach())),
            others=of_block,
            own=f"ExpertParallelMoE: x is {came}, expected a tensor [..., 16] (rank 1 of 2); pass",
            told=UNREADY,
            error=EPError,
            raised=ShapeError,
        )
        for name, came, spoil in (
            ("None", "NoneType", lambda x: None),
            ("x of another H", "[3, 8]", lambda x: x[:, :8]),
        )
    ),
]

BAD_CALLS = [
    *X_FAULTS,
    *TOPK_FAULTS,
    *combine_faults(),
    told_alike("no_grad on rank 1", without_grad, "torch.no_grad() while other", trains=True),
    told_alike(
        "an expert parameter frozen on rank 1",
        training("gate_up_proj"),
        "dispatch: down_proj is frozen on rank 1, while the other ranks train it (",
        others=training("gate_up_proj", "down_proj"),
        trains=True,
    ),
    told_alike(
        "all expert parameters frozen on rank 1",
        training(),
        "gate_up_proj, down_proj are frozen on rank 1, while the other ranks train them (",
        others=training("gate_up_proj", "down_proj"),
        trains=True,
    ),
    *OWN_ERRORS,
    *LAYER_FAULTS,
    *CONFIG_FAULTS,
    *(replace(bad, error=HandleError) for bad in ORDER_FAULTS),
]
