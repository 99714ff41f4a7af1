"""A combine call that one rank alone gets wrong is told on every rank; the group stays usable."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from epcomm import (
    DeepEPLowLatencyDispatcher,
    DeepEPNormalDispatcher,
    EPConfig,
    EPError,
    EPGroup,
    EPTimeout,
    HandleError,
    MaskedCombineInput,
    MoESpec,
    RowsCombineInput,
    RowsDispatchOutput,
    ShapeError,
    StandardDispatcher,
    TopKOutput,
)
from epcomm.dispatchers.rows import RowsDispatcher
from epcomm.ops.slots import gather_rows
from epcomm.types import RowsPer, WeightsAppliedBy

NUM_RANKS, H, E, K, M = 4, 16, 8, 2, 5
SPEC = MoESpec(hidden_size=H, num_experts=E, top_k=K, dtype=torch.float32)
# The rank that errs.
FAULTY = 1


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A dispatcher; is_static: its faults wait for check()."""

    dispatcher: type[RowsDispatcher]
    config: EPConfig
    is_static: bool = False


KINDS = {
    "normal": Kind(dispatcher=DeepEPNormalDispatcher, config=EPConfig(max_tokens_per_rank=M)),
    "standard": Kind(dispatcher=StandardDispatcher, config=EPConfig(max_tokens_per_rank=M)),
    "budget": Kind(
        dispatcher=DeepEPNormalDispatcher,
        config=EPConfig(max_tokens_per_rank=M, max_recv_slots=NUM_RANKS * M * K),
        is_static=True,
    ),
    "low_latency": Kind(
        dispatcher=DeepEPLowLatencyDispatcher,
        config=EPConfig(max_tokens_per_rank=M),
        is_static=True,
    ),
    "low_latency_checked": Kind(
        dispatcher=DeepEPLowLatencyDispatcher,
        config=EPConfig(max_tokens_per_rank=M, check_calls=True),
    ),
}


@dataclass(kw_only=True)
class Play:
    """One rank's dispatchers and its batch under way."""

    group: EPGroup
    kind: Kind
    dispatcher: RowsDispatcher
    another: RowsDispatcher
    x: Tensor
    topk: TopKOutput
    spent: RowsCombineInput
    out: RowsDispatchOutput

    @property
    def results(self) -> RowsCombineInput:
        """What identity experts return for the batch under way."""
        return identity(self.out)

    def expect_x(self, y: Tensor) -> None:
        """y of identity experts."""
        torch.testing.assert_close(y, self.x * self.topk.topk_weights.sum(1, keepdim=True))

    def expect_works(self) -> None:
        """A correct batch on a dispatcher that is open."""
        dispatcher = open_dispatcher(self.kind, self.group)
        self.expect_x(dispatcher.combine(identity(dispatcher.dispatch(self.x, self.topk))))
        dispatcher.check()


def open_dispatcher(kind: Kind, group: EPGroup) -> RowsDispatcher:
    return kind.dispatcher(group, SPEC, kind.config)


def identity(out: RowsDispatchOutput) -> RowsCombineInput:
    """Each slot is its row, times its weight if the runner applies it."""
    rows = gather_rows(out.hidden_states.data, out.index)
    if out.weights_applied_by is WeightsAppliedBy.RUNNER:
        assert out.slot_weights is not None
        rows = rows * out.slot_weights.unsqueeze(1)
    return out.combine_input(rows)


@contextmanager
def playing(name: str) -> Iterator[Play]:
    """One batch combined, the next one dispatched."""
    kind = KINDS[name]
    with EPGroup() as group, torch.no_grad():
        dispatcher = open_dispatcher(kind, group)
        generator = torch.Generator().manual_seed(group.rank)
        num_tokens = 2 + group.rank  # T = M on the last rank
        x = torch.randn(num_tokens, H, generator=generator).to(group.device)
        ids = torch.rand(num_tokens, E, generator=generator).argsort(1)[:, :K]
        weights = torch.rand(num_tokens, K, generator=generator)
        topk = TopKOutput(topk_ids=ids.to(group.device), topk_weights=weights.to(group.device))
        spent = identity(dispatcher.dispatch(x, topk))
        dispatcher.combine(spent)
        yield Play(
            group=group,
            kind=kind,
            dispatcher=dispatcher,
            another=open_dispatcher(kind, group),
            x=x,
            topk=topk,
            spent=spent,
            out=dispatcher.dispatch(x, topk),
        )


def rows_input(play: Play, rows: Tensor, rows_per: RowsPer = RowsPer.SLOT) -> RowsCombineInput:
    """What combine_input() would refuse to make."""
    good = play.results
    return RowsCombineInput(
        hidden_states=rows, rows_per=rows_per, slot_weights=good.slot_weights, handle=good.handle
    )


@dataclass(frozen=True, kw_only=True)
class Bad:
    """A wrong call.

    call: makes it in place of the correct one.   own: what the rank hears that makes it.
    others: what the other ranks hear of it.
    """

    id: str
    call: Callable[[Play], object]
    own: str
    others: str = "a combine input of wrong layout, shape, dtype or device on rank 1"
    error: type[EPError] = ShapeError


def call_closed(play: Play) -> object:
    play.dispatcher.close()
    play.dispatcher.close()
    return play.dispatcher.combine(play.results)


SPENT_TEXT = "a handle that is spent or foreign, or a closed dispatcher, on rank 1"
BAD_CALLS = [
    Bad(
        id="a row too many",
        call=lambda play: play.dispatcher.combine(
            rows_input(play, torch.cat([play.results.hidden_states, play.x[:1]]))
        ),
        own="hidden_states is",
    ),
    Bad(
        id="no rows",
        call=lambda play: play.dispatcher.combine(rows_input(play, play.x[:0])),
        own="hidden_states is [0, 16]",
    ),
    Bad(
        id="rows of another layout",
        call=lambda play: play.dispatcher.combine(
            rows_input(play, torch.cat([play.results.hidden_states] * 3), RowsPer.ROW)
        ),
        own="hidden_states is",
    ),
    Bad(
        id="hidden size",
        call=lambda play: play.dispatcher.combine(
            rows_input(play, play.results.hidden_states[:, :8])
        ),
        own="8], expected",
    ),
    Bad(
        id="dtype",
        call=lambda play: play.dispatcher.combine(
            rows_input(play, play.results.hidden_states.int())
        ),
        own="hidden_states is torch.int32, expected torch.float32 (rank 1 of 4)",
    ),
    Bad(
        id="slot weights",
        call=lambda play: play.dispatcher.combine(
            replace(play.results, slot_weights=torch.ones(1, device=play.x.device))
        ),
        own="slot_weights is [1], expected",
    ),
    Bad(
        id="no tensor",
        call=lambda play: play.dispatcher.combine(rows_input(play, None)),  # type: ignore[arg-type]
        own="hidden_states is NoneType, expected a tensor",
    ),
    Bad(
        id="masked layout",
        call=lambda play: play.dispatcher.combine(
            MaskedCombineInput(  # type: ignore[arg-type]
                hidden_states=play.x.unsqueeze(0), slot_weights=None, handle=play.out.handle
            )
        ),
        own="the input is a MaskedCombineInput, expected RowsCombineInput (rank 1 of 4)",
    ),
    Bad(
        id="a handle used twice",
        call=lambda play: play.dispatcher.combine(play.spent),
        own="the batch of dispatch call 1 was combined before; dispatch again",
        others=SPENT_TEXT,
        error=HandleError,
    ),
    Bad(
        id="another dispatcher",
        call=lambda play: play.another.combine(play.results),
        own="the batch of dispatch call 2 belongs to another dispatcher",
        others=SPENT_TEXT,
        error=HandleError,
    ),
    Bad(
        id="after close",
        call=call_closed,
        own="the dispatcher is closed (rank 1 of 4); construct a new one",
        others=SPENT_TEXT,
        error=HandleError,
    ),
]


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.parametrize("bad", BAD_CALLS, ids=lambda bad: bad.id)
@pytest.mark.parametrize("name", KINDS)
def test_bad_combine_of_one_rank_reaches_every_rank(name: str, bad: Bad) -> None:
    with playing(name) as play:
        is_faulty = play.group.rank == FAULTY
        if is_faulty or not play.kind.is_static:
            with pytest.raises(bad.error) as caught:
                bad.call(play) if is_faulty else play.dispatcher.combine(play.results)
            assert str(caught.value).startswith("combine: ")
            assert (bad.own if is_faulty else bad.others) in str(caught.value)
        else:
            y = play.dispatcher.combine(play.results)
            assert y.shape == play.x.shape
            assert y.isnan().all()
        if play.kind.is_static:
            with pytest.raises(bad.error) as caught:
                play.dispatcher.check()
            assert (bad.own if is_faulty else bad.others) in str(caught.value)
            play.dispatcher.check()
        play.expect_works()


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.parametrize("bad", BAD_CALLS, ids=lambda bad: bad.id)
@pytest.mark.parametrize("name", KINDS)
def test_bad_combine_of_all_ranks_is_told_to_each(name: str, bad: Bad) -> None:
    with playing(name) as play:
        with pytest.raises(bad.error) as caught:
            bad.call(play)
        assert bad.own.replace("rank 1", play.group.where[:6]) in str(caught.value)
        if play.kind.is_static:
            with pytest.raises(bad.error):
                play.dispatcher.check()
        play.expect_works()


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.parametrize(
    "bad", [bad for bad in BAD_CALLS if bad.id != "after close"], ids=lambda bad: bad.id
)
@pytest.mark.parametrize("name", ["normal", "standard"])
def test_refused_batch_may_be_combined_again(name: str, bad: Bad) -> None:
    with playing(name) as play:
        is_faulty = play.group.rank == FAULTY
        with pytest.raises(bad.error):
            bad.call(play) if is_faulty else play.dispatcher.combine(play.results)
        play.expect_x(play.dispatcher.combine(play.results))


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.parametrize("is_alone", [True, False], ids=["one_rank", "all_ranks"])
@pytest.mark.parametrize("name", KINDS)
def test_dispatch_after_close_is_told(name: str, is_alone: bool) -> None:
    with playing(name) as play:
        play.dispatcher.combine(play.results)
        is_closed = play.group.rank == FAULTY or not is_alone
        if is_closed:
            play.dispatcher.close()

        def call() -> Tensor:
            return play.dispatcher.combine(identity(play.dispatcher.dispatch(play.x, play.topk)))

        if is_closed or not play.kind.is_static:
            with pytest.raises(HandleError) as caught:
                call()
            text = "the dispatcher is closed" if is_closed else SPENT_TEXT
            assert text in str(caught.value)
        else:
            assert call().isnan().all()
        if play.kind.is_static:
            with pytest.raises(HandleError):
                play.dispatcher.check()
        play.expect_works()


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.parametrize("name", KINDS)
def test_closed_group_tells_at_once(name: str) -> None:
    with playing(name) as play:
        results = play.results
        play.group.close()
        play.group.close()
        with pytest.raises(HandleError, match="combine: the EPGroup is closed"):
            play.dispatcher.combine(results)
        with pytest.raises(HandleError, match="dispatch: the EPGroup is closed"):
            play.dispatcher.dispatch(play.x, play.topk)


@pytest.mark.ranks(NUM_RANKS)
def test_rank_that_calls_alone_hears_of_its_fault_and_not_only_of_the_silence() -> None:
    with EPGroup(dist.new_group()) as group, torch.no_grad():
        dispatcher = open_dispatcher(KINDS["normal"], group)
        x = torch.ones(2, H, device=group.device)
        topk = TopKOutput(
            topk_ids=torch.tensor([[0, 7], [3, 4]], device=group.device),
            topk_weights=torch.ones(2, K, device=group.device),
        )
        spent = identity(dispatcher.dispatch(x, topk))
        dispatcher.combine(spent)
        if group.rank == FAULTY:
            assert group.collectives.bounded is not None
            group.collectives.bounded.timeout_s = 0.3
            with pytest.raises(HandleError, match="was combined before") as caught:
                dispatcher.combine(spent)
            assert isinstance(caught.value.__cause__, EPTimeout)
