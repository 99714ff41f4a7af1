"""A mistake of one rank is reported on every rank, and the next call of the group works.

The table is in tests/cases/bad_calls.py. All its cases run in one group for each backend, one after
another.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from epcomm import (
    ConfigError,
    EPConfig,
    EPError,
    EPGroup,
    EPTimeout,
    ExpertParallelExperts,
    HandleError,
    ShapeError,
    TopKOutput,
)
from epcomm.planning import candidates
from epcomm.testing.data import make_weights
from tests.cases.bad_calls import (
    BAD_CALLS,
    FAILED_RESULTS,
    LAYER_FAULTS,
    ORDER_FAULTS,
    UNREADY,
    Bad,
    combine_faults,
)
from tests.cases.meshes import mesh_of
from tests.cases.playing import (
    FAULTY,
    KINDS,
    LAYER,
    NUM_RANKS,
    ON_HOSTS,
    SPEC,
    SUM_KINDS,
    H,
    K,
    M,
    OwnError,
    Play,
    Plays,
    error_of,
    expected_y,
    fail,
    identity,
    open_dispatcher,
    playing,
)

if TYPE_CHECKING:
    from mpi4py import MPI


HALF = torch.full((1, K), 0.5)
ALL_KINDS = {**KINDS, **SUM_KINDS}
# Every rank raises within this time, unless a rank is lost.
LIMIT_S = 1.0


@pytest.fixture(scope="module")
def plays() -> Iterator[Plays]:
    with Plays() as plays:
        yield plays


@pytest.fixture
def play(request: pytest.FixtureRequest, plays: Plays) -> Iterator[Play]:
    with plays.on(ALL_KINDS[request.param]) as play:
        yield play


def refusal_of(play: Play, bad: Bad) -> EPError | OwnError:
    """Make a call that is wrong on one rank; return the error of the call or of check()."""
    # The garbage collector may need a second for the objects of all tests.
    gc.disable()
    began = time.perf_counter()
    try:
        raised = error_of(lambda: (bad.call if play.is_faulty else bad.others)(play))
        waiting = error_of(play.dispatcher.check)
        took_s = time.perf_counter() - began
    finally:
        gc.enable()
    assert waiting is None or (play.kind.is_static and raised is None), "a fault is raised once"
    found = raised or waiting
    assert found is not None, "the call was served"
    assert took_s < LIMIT_S
    return found


def check_told(play: Play, bad: Bad) -> None:
    """Check that all ranks raise, in the call or, on a static buffer, in check()."""
    found = refusal_of(play, bad)
    error = bad.raised if play.is_faulty and bad.raised is not None else bad.error
    assert isinstance(found, error), found
    is_notified = not play.is_faulty or (bad.reads_ids and play.kind.is_static)
    assert (bad.told if is_notified else bad.own) in str(found)
    play.expect_works()


def check_told_on_hosts(play: Play, bad: Bad) -> None:
    """Check that all ranks raise; on the other host the error has code and rank only."""
    others = r"rank 1|rank [023] is in|differs from that of another rank on rank [01]"
    found = refusal_of(play, bad)
    error = bad.raised if play.is_faulty and bad.raised is not None else bad.error
    assert isinstance(found, error), found
    if not play.is_faulty or bad.id in {each.id for each in ORDER_FAULTS}:
        assert re.search(others if bad.told != "ranks disagree on" else bad.told, str(found))
    else:
        assert bad.own.replace("rank 1 of 2", "rank 1 of 4") in str(found)
    play.expect_works()


def cases_of(bad_calls: list[Bad], kinds: list[str]) -> list[Any]:
    return [
        pytest.param(name, bad, id=f"{name}-{bad.id}")
        for name in kinds
        for bad in bad_calls
        if ALL_KINDS[name].trains or not bad.trains
    ]


# One check finds all faults and returns a code, which each buffer reports in its own manner. Run
# all cases on a kind that raises faults and on one that keeps them on the device. On the other
# kinds run one fault of each code in dispatch and in combine, and the comparisons in headers.
OF_EACH_CODE = {
    "x of another H",
    "M + 1 tokens",
    "id E",
    "no rows",
    "a handle used twice",
    "combine after close",
    "dispatch after close",
    "no_grad on rank 1",
    "another M",
    *(bad.id for bad in ORDER_FAULTS),
}
TOLD = [
    *cases_of(BAD_CALLS, ["collective", "low_latency"]),
    *cases_of(
        [bad for bad in BAD_CALLS if bad.id in OF_EACH_CODE],
        ["shared_memory", "budget", "all_gather", "replicated", *SUM_KINDS],
    ),
]


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.parametrize(("play", "bad"), TOLD, indirect=["play"])
def test_fault_of_one_rank_is_told_to_all(play: Play, bad: Bad) -> None:
    if bad.id == "rank 1 skips backward" and play.kind.config.replicated:
        # The backward of combine has no exchange here; the backward of dispatch is the first.
        bad = replace(bad, own="rank 0 is in backward of dispatch")
    check_told(play, bad)


@pytest.fixture
def play_on_hosts(plays: Plays) -> Iterator[Play]:
    mesh = mesh_of((2, 2), ("host", "place"))
    with plays.on(ON_HOSTS, mesh) as play:
        yield play


ON_ALL_HOSTS = OF_EACH_CODE | {bad.id for bad in LAYER_FAULTS} | {"sums cannot be made"}


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "bad", [bad for bad in BAD_CALLS if bad.id in ON_ALL_HOSTS], ids=lambda bad: bad.id
)
def test_fault_of_one_rank_is_told_to_all_hosts(play_on_hosts: Play, bad: Bad) -> None:
    check_told_on_hosts(play_on_hosts, bad)


def backward_of_block(play: Play, fault: str) -> None:
    """Train the block; on rank 1 no parameter is trained, or the call runs under no_grad()."""
    play.block.requires_grad_(not play.is_faulty or fault != "frozen")
    try:
        with torch.set_grad_enabled(not play.is_faulty or fault != "no_grad"):
            y = play.block(play.x.detach())
        y.sum().backward()
    finally:
        play.block.requires_grad_(True)


def check_gradients_told(play: Play, fault: str) -> None:
    with pytest.raises(ConfigError, match=r"frozen|no_grad|gradients .* on rank|rank \d of"):
        backward_of_block(play, fault)
    play.dispatcher.check()
    # NaN weights on one rank are ordinary values.
    gate = play.block.get_parameter("gate.weight").detach()
    kept = gate.clone()
    gate.fill_(float("nan") if play.is_faulty else 0.5)
    with torch.no_grad():
        y = play.block(play.x.detach())
    gate.copy_(kept)
    assert y.isnan().any() == play.is_faulty
    play.expect_works()


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.parametrize("fault", ["frozen", "no_grad"])
@pytest.mark.parametrize("play", ["budget", "low_latency"], indirect=True)
def test_a_rank_that_does_not_train_hears_of_it_before_its_backward(play: Play, fault: str) -> None:
    check_gradients_told(play, fault)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("fault", ["frozen", "no_grad"])
def test_a_rank_that_does_not_train_is_told_to_all_hosts(play_on_hosts: Play, fault: str) -> None:
    check_gradients_told(play_on_hosts, fault)


@dataclass(frozen=True, kw_only=True)
class Odd:
    """An unusual but valid batch of rank 1, or of all ranks if tokens are replicated."""

    id: str
    make: Callable[[Tensor, TopKOutput], tuple[Tensor, TopKOutput]]


def of_x(change: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, TopKOutput]]:
    return lambda x, topk: (change(x), topk)


def with_nan(tensor: Tensor) -> Tensor:
    return torch.cat([torch.full_like(tensor[:1], float("nan")), tensor[1:]])


ODD_BATCHES = [
    Odd(id="nan in a token", make=of_x(with_nan)),
    Odd(
        id="nan in weights",
        make=lambda x, topk: (x, replace(topk, topk_weights=with_nan(topk.topk_weights))),
    ),
    Odd(id="not contiguous", make=of_x(lambda x: x.T.contiguous().T)),
    Odd(id="strided", make=of_x(lambda x: x.repeat_interleave(2, dim=1)[:, ::2])),
    Odd(id="expanded", make=of_x(lambda x: x[:1].expand(3, -1))),
    Odd(id="negative view", make=of_x(lambda x: torch.complex(x, -x).conj().imag)),
    Odd(
        id="M tokens",
        make=lambda x, topk: (
            x.repeat(2, 1)[:M],
            TopKOutput(
                topk_ids=topk.topk_ids.repeat(2, 1)[:M],
                topk_weights=topk.topk_weights.repeat(2, 1)[:M],
            ),
        ),
    ),
    Odd(
        id="ids and weights strided",
        make=lambda x, topk: (
            x,
            TopKOutput(
                topk_ids=topk.topk_ids.T.contiguous().T,
                topk_weights=topk.topk_weights.repeat(1, 2)[:, :K],
            ),
        ),
    ),
]


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.parametrize(
    ("play", "odd"),
    [pytest.param(name, odd, id=f"{name}-{odd.id}") for name in KINDS for odd in ODD_BATCHES],
    indirect=["play"],
)
def test_odd_batch_is_computed_rightly(play: Play, odd: Odd) -> None:
    x, topk = play.x.detach(), play.topk
    if play.is_faulty or play.kind.config.replicated:
        x, topk = odd.make(x, topk)
    y = play.whole_call(x=x, topk=topk)
    play.dispatcher.check()
    torch.testing.assert_close(y, expected_y(x, topk), equal_nan=True)


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.parametrize(
    ("play", "bad"),
    [
        case
        for case in cases_of(
            combine_faults(), [n for n, kind in KINDS.items() if not kind.is_static]
        )
        if case.values[1].id in {"no rows", "a handle used twice"}
    ],
    indirect=["play"],
)
def test_refused_batch_may_be_combined_again(play: Play, bad: Bad) -> None:
    assert error_of(lambda: (bad.call if play.is_faulty else bad.others)(play)) is not None
    y = play.dispatcher.combine(play.results)
    torch.testing.assert_close(y.detach(), expected_y(play.x.detach(), play.topk))


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.parametrize("play", KINDS, indirect=True)
def test_fault_of_all_ranks_is_told_to_each(play: Play) -> None:
    def no_rows() -> object:
        return play.dispatcher.combine(play.begin().combine_input(play.x[:0]))

    with pytest.raises(ShapeError, match=rf"\[0, 16\], expected .*rank {play.group.rank} of 2"):
        no_rows()
    assert (error_of(play.dispatcher.check) is not None) == play.kind.is_static
    play.expect_works()


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.parametrize("bad", combine_faults()[:-1:3], ids=lambda bad: bad.id)
def test_with_check_calls_a_static_buffer_raises_in_the_call(bad: Bad) -> None:
    kind = KINDS["low_latency"]
    checked = replace(kind, config=replace(kind.config, check_calls=True), is_static=False)
    with playing(checked) as play:
        check_told(play, bad)


@pytest.mark.mpi_ranks(NUM_RANKS)
@pytest.mark.parametrize("name", ["collective", "low_latency"])
def test_order_is_compared_over_mpi(name: str, ep_ranks: MPI.Comm | None) -> None:
    with playing(KINDS[name], ep_ranks) as play:
        for bad in ORDER_FAULTS:
            if play.kind.trains or not bad.trains:
                check_told(play, replace(bad, error=HandleError))


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.parametrize("shares_memory", [True, False])
def test_rank_decoding_alone_is_named(shares_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not shares_memory:
        monkeypatch.setattr(candidates, "host_of_this_process", lambda: "")
    with EPGroup() as group, torch.no_grad():
        layer = make_layer(group, EPConfig(max_tokens_per_rank=M))
        x, topk = torch.ones(1, H), TopKOutput(topk_ids=torch.tensor([[0, 7]]), topk_weights=HALF)
        y = layer(x, topk)
        with pytest.raises(HandleError, match=r"rank 1 decodes, rank 0 does not") as caught:
            layer(x, topk, decode=group.rank == FAULTY)
        backend = "shared_memory" if shares_memory else "collective"
        assert f"(low_latency, buffer 2: {backend})" in str(caught.value)
        torch.testing.assert_close(layer(x, topk), y)
        torch.testing.assert_close(layer(x, topk, decode=True), y)


@pytest.mark.ranks(NUM_RANKS)
def test_decode_that_nothing_serves_is_told_to_all() -> None:
    with EPGroup() as group, torch.no_grad():
        layer = make_layer(group, EPConfig())
        x, topk = torch.ones(1, H), TopKOutput(topk_ids=torch.tensor([[0, 7]]), topk_weights=HALF)
        own = "decode=True but there is no low latency"
        text = (
            own
            if group.rank == FAULTY
            else "decode in a mode or combine_dtype without them on rank 1"
        )
        with pytest.raises(ConfigError, match=text):
            layer(x, topk, decode=group.rank == FAULTY)
        assert layer(x, topk).isfinite().all()


def make_layer(group: EPGroup, config: EPConfig) -> ExpertParallelExperts:
    """Make a layer of SPEC with random experts."""
    return ExpertParallelExperts(make_weights(LAYER, NUM_RANKS), group, config, top_k=K)


def config_of(play: Play) -> EPConfig:
    return replace(play.kind.config, mode=play.dispatcher.mode)


@pytest.mark.ranks(NUM_RANKS)
def test_experts_that_train_on_one_rank_alone_are_refused_on_all() -> None:
    weights = make_weights(LAYER, NUM_RANKS)
    with EPGroup() as group:
        if group.rank == FAULTY:
            tensors = {name: tensor.detach() for name, tensor in weights.tensors().items()}
            weights = weights.with_tensors(tensors)
        with pytest.raises(ConfigError, match="requires_grad: true on rank 0, false on rank 1"):
            ExpertParallelExperts(weights, group, EPConfig(), top_k=K)


def batch_of(play: Play) -> tuple[Tensor, TopKOutput]:
    return play.x.detach(), play.topk


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.parametrize("play", ALL_KINDS, indirect=True)
def test_experts_that_fail_are_told_to_all(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(play.group, config_of(play))
    right = layer(*batch_of(play))

    def check_refused(error: type[Exception], own: str, told: str) -> None:
        found: Exception | None = None
        try:
            layer(*batch_of(play))
        except (EPError, OwnError) as raised:
            found = raised
        waiting = error_of(layer.check)
        found = found or waiting
        assert isinstance(found, error if play.is_faulty else EPError), found
        assert (own if play.is_faulty else told) in str(found)

    parameters = dict(layer.named_parameters())
    own = (
        "down_proj is torch.float32 on cpu, expected torch.float32 on meta as gate_up_proj",
        "ExpertParallelExperts: gate_up_proj is on meta, expected cpu (rank 1 of 2); load the",
    )
    for text, (name, parameter) in zip(own, parameters.items(), strict=True):
        if play.is_faulty:
            setattr(layer, name, nn.Parameter(parameter.detach().to("meta")))
        check_refused(ShapeError, text, "a tensor of wrong shape, dtype or device on rank 1")
    for name, parameter in parameters.items():
        setattr(layer, name, parameter)

    if play.is_faulty:
        monkeypatch.setattr(layer.runner, "run", fail)
    check_refused(OwnError, "no memory", FAILED_RESULTS)
    monkeypatch.undo()
    if play.is_faulty:
        monkeypatch.setattr(type(layer), "weights", property(fail))
    check_refused(OwnError, "no memory", UNREADY)
    monkeypatch.undo()
    torch.testing.assert_close(layer(*batch_of(play)), right)


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.parametrize("name", ["collective", "shared_memory"])
def test_counts_of_many_experts_take_a_second_exchange(name: str) -> None:
    """Use 300 experts per rank, more than the 128 counts of a header."""
    kind, num_experts = KINDS[name], 300 * NUM_RANKS
    with EPGroup() as group, torch.no_grad():
        dispatcher = open_dispatcher(kind, group, replace(SPEC, num_experts=num_experts, top_k=3))
        x, ids = torch.randn(2, H), torch.tensor([[0, 299, 300], [427, 428, 599]])
        topk = TopKOutput(topk_ids=ids, topk_weights=torch.ones(2, 3))
        out = dispatcher.dispatch(x, topk)
        found = out.num_tokens_per_expert.tolist()
        mine = [int(e) - 300 * group.rank for e in ids.flatten()]
        assert found == [NUM_RANKS * mine.count(e) for e in range(300)]
        torch.testing.assert_close(dispatcher.combine(identity(out)), 3 * x)
        before = dispatcher.plan.header_bytes()
        assert dispatcher.traffic().control_bytes == before == 8 * (11 + 300)

        def call() -> None:
            if group.rank == 0:
                dispatcher.dispatch(x, topk)
            else:
                # A rank in a different call sends no counts.
                group.calls.gather_records({})

        with pytest.raises(HandleError, match="rank 0 is in dispatch"):
            call()
        torch.testing.assert_close(
            dispatcher.combine(identity(dispatcher.dispatch(x, topk))), 3 * x
        )


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.parametrize("name", KINDS)
def test_closed_group_tells_at_once(name: str) -> None:
    with playing(KINDS[name]) as play:
        results = play.results
        play.group.close()
        play.group.close()
        with pytest.raises(HandleError, match="combine: the EPGroup is closed"):
            play.dispatcher.combine(results)
        with pytest.raises(HandleError, match="dispatch: the EPGroup is closed"):
            play.begin()


@pytest.mark.ranks(NUM_RANKS)
def test_rank_that_calls_alone_hears_of_its_fault_and_not_only_of_the_silence() -> None:
    process_group = dist.new_group()
    with playing(KINDS["collective"], process_group) as play:
        if play.is_faulty:
            play.group.collectives.bounded.timeout_s = 0.3
            with pytest.raises(HandleError, match="was combined before") as caught:
                play.dispatcher.combine(play.spent)
            assert isinstance(caught.value.__cause__, EPTimeout)


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.parametrize("name", ["collective", "shared_memory"])
@pytest.mark.parametrize("call", ["backward", "bad dispatch", "bad combine"])
def test_late_rank_does_not_take_a_group_others_gave_up_for_usable(call: str, name: str) -> None:
    process_group = dist.new_group()
    with playing(KINDS[name], process_group) as play:
        y = play.whole_call()
        results = identity(play.begin())
        play.group.collectives.bounded.timeout_s = 0.3
        calls = {
            "backward": lambda: y.sum().backward(),
            "bad dispatch": lambda: play.dispatcher.dispatch(play.x[:, 1:], play.topk),
            "bad combine": lambda: play.dispatcher.combine(play.spent),
        }
        if not play.is_faulty:
            error = error_of(calls[call])
            assert isinstance(error, EPTimeout) or isinstance(error.__cause__, EPTimeout)
        dist.barrier()
        if play.is_faulty:
            message = "this rank came too late: rank 0 had given up on rank 1.*make an EPGroup"
            with pytest.raises(EPTimeout, match=message):
                play.dispatcher.combine(results) if "combine" in call else play.begin()


@pytest.mark.ranks(NUM_RANKS)
def test_expert_tensors_that_only_one_rank_names_are_reported_by_all() -> None:
    with playing(KINDS["collective"]) as play:
        named = {"first": True, "second": True} if play.group.rank == 0 else False
        with pytest.raises(
            ConfigError, match=r"(first, second|tensor 0, expert tensor 1) are frozen"
        ):
            play.dispatcher.dispatch(play.x, play.topk, experts_need_grad=named)
