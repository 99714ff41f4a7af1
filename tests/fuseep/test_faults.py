from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from epcomm import (
    BackendUnavailable,
    CapacityError,
    ConfigError,
    EPConfig,
    EPError,
    EPGroup,
    ExpertParallelExperts,
    HandleError,
    ShapeError,
    TopKOutput,
)
from epcomm.fuseep.ascend import DispatchFFNCombine, FusedDeepMoE
from epcomm.fuseep.path import FuseEPPath
from epcomm.fuseep.reference import FuseEPReference
from epcomm.training.idle import idle_step
from fakes.ascend import limits
from fakes.ascend.deep_ep import Buffer
from tests.cases.fuseep_formats import device_that_keeps
from tests.cases.fuseep_layers import OPERATORS, E, K, M, batch, experts, make_layer

pytestmark = [pytest.mark.ranks(2), pytest.mark.usefixtures("small_a3")]

Call = tuple[Tensor, TopKOutput]


@dataclass(frozen=True)
class Fault:
    """A bad call of rank 1, its error and text, and the message on rank 0 with check_calls."""

    change: Callable[[Tensor, TopKOutput], Call]
    error: type[EPError]
    text: str
    to_others: str


def with_ids(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor, TopKOutput], Call]:
    return lambda x, topk: (x, replace(topk, topk_ids=change(topk.topk_ids)))


RANGE, TWICE = "topk_ids out of range on rank 1", "an expert twice in a row of topk_ids on rank 1"
FAULTS = [
    Fault(
        lambda x, topk: batch(1, num_tokens=M + 1),
        CapacityError,
        f"has {M + 1} tokens, expected at most max_tokens_per_rank = {M} (rank 1 of 2)",
        "more tokens than max_tokens_per_rank on rank 1",
    ),
    *(
        Fault(
            with_ids(lambda ids, bad=bad: ids.index_fill(0, torch.tensor([2]), bad)),
            ShapeError,
            RANGE,
            RANGE,
        )
        for bad in (E, -2)
    ),
    Fault(with_ids(lambda ids: ids[:, :1].repeat(1, K)), ShapeError, TWICE, TWICE),
    Fault(
        lambda x, topk: (x.int(), topk),
        ShapeError,
        "hidden_states is torch.int32, expected torch.bfloat16 (rank 1 of 2)",
        "a tensor of wrong shape, dtype or device on rank 1",
    ),
]


def expect(error: type[EPError], text: str, call: Callable[[], object]) -> None:
    with pytest.raises(EPError) as caught:
        call()
    assert type(caught.value) is error
    assert text in str(caught.value)


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_bad_call_gives_nan_and_waits_for_check(operator: str, group: EPGroup) -> None:
    layer, (x, topk) = make_layer(group, operator), batch(group.rank)
    good = layer(x, topk)
    for fault in FAULTS:
        bad_x, bad_topk = fault.change(x, topk) if group.rank == 1 else (x, topk)
        y = layer(bad_x, bad_topk)
        assert y.shape == bad_x.shape
        assert y.dtype is torch.bfloat16
        if group.rank == 1:
            assert y.isnan().all()
            expect(fault.error, fault.text, layer.check)
        else:
            # This rank does not learn of the fault, and both ranks computed its tokens.
            assert torch.equal(y, good)
        # check() raises a fault once.
        layer.check()
        assert torch.equal(layer(x, topk), good)


@pytest.mark.parametrize("operator", OPERATORS)
def test_with_check_calls_every_rank_raises_at_once(operator: str, group: EPGroup) -> None:
    layer, (x, topk) = make_layer(group, operator, check_calls=True), batch(group.rank)
    good = layer(x, topk)
    for fault in FAULTS:
        bad_x, bad_topk = fault.change(x, topk) if group.rank == 1 else (x, topk)
        text = fault.text if group.rank == 1 else fault.to_others
        expect(fault.error, text, lambda x=bad_x, topk=bad_topk: layer(x, topk))
        assert torch.equal(layer(x, topk), good)
    assert layer.path.traffic().control_bytes > 0


@pytest.mark.parametrize("checks", [False, True])
def test_gradients_are_refused_on_the_rank_that_needs_them(checks: bool, group: EPGroup) -> None:
    """Gradients of x, weights and scales; with check_calls or a host sync, all ranks raise."""
    for operator in (*OPERATORS, "fuseep_reference"):
        layer, (x, topk) = make_layer(group, operator, check_calls=checks), batch(group.rank)
        good, all_raise = layer(x, topk), checks or operator == "fuseep_reference"
        leaves = {
            "x": x.clone(),
            "weights": topk.topk_weights.clone(),
            "scale": layer.get_parameter("down_scale"),
        }
        for leaf in leaves.values():
            leaf.requires_grad_(group.rank == 1)
            call = partial(layer, leaves["x"], replace(topk, topk_weights=leaves["weights"]))
            with torch.no_grad():
                assert torch.equal(call(), good)
            if group.rank == 1:
                text = f"{operator} has no gradients, but some are needed (rank 1 of 2)"
                expect(ConfigError, text, call)
                if not all_raise:
                    # The fault is recorded on the device too, like the faults of all bad calls.
                    expect(ConfigError, text, layer.check)
            elif all_raise:
                text = "gradients or decode in a mode or combine_dtype without them on rank 1"
                expect(ConfigError, text, call)
            else:
                assert torch.equal(call(), good)
            # There are no further faults.
            layer.check()
            leaf.requires_grad_(False)


@pytest.mark.parametrize("operator", OPERATORS)
def test_tokens_without_an_expert_cost_rows_and_give_zeros(operator: str, group: EPGroup) -> None:
    layer, (x, topk) = make_layer(group, operator), batch(group.rank)
    assert isinstance(layer.path, FuseEPPath)
    y = layer(x, topk)
    ids = topk.topk_ids.clone()
    ids[0], ids[1, 1] = -1, -1
    holed = layer.path.run(x, replace(topk, topk_ids=ids), layer.weights)
    layer.check()
    assert torch.equal(holed.y[2:], y[2:])
    assert not holed.y[0].any()
    # The weight of a masked entry is not read.
    weights = topk.topk_weights.masked_fill(ids < 0, float("nan"))
    again = layer(x, TopKOutput(topk_ids=ids, topk_weights=weights))
    assert torch.equal(again, holed.y)
    # Substitutes are computed: 2 experts for each of 5 tokens of 2 ranks.
    total = holed.num_tokens_per_expert.sum()
    torch.distributed.all_reduce(total)
    assert int(total) == 2 * 5 * K
    # Without tokens each rank sends one dummy token.
    nothing = TopKOutput(topk_ids=ids[:0], topk_weights=weights[:0])
    out = layer.path.run(x[:0], nothing, layer.weights)
    assert out.y.shape == x[:0].shape
    total = out.num_tokens_per_expert.sum()
    torch.distributed.all_reduce(total)
    assert int(total) == 2 * K
    # A rank without data takes part, and the other rank gets its y.
    if group.rank == 1:
        idle_step(layer)
    else:
        assert torch.equal(layer(x, topk), y)


@pytest.mark.parametrize("operator", [*OPERATORS, "fuseep_reference"])
def test_what_lies_in_padding_does_not_matter(operator: str, group: EPGroup) -> None:
    """The y of a token without an expert is zero, whatever the result of its substitute."""
    layer, (x, topk) = make_layer(group, operator), batch(group.rank)
    ids = topk.topk_ids.clone()
    ids[:3] = -1
    topk = replace(topk, topk_ids=ids)
    good = layer(x, topk)
    # The last value is finite, but its products overflow float16.
    for row, value in enumerate((float("nan"), float("inf"), 3e38)):
        x[row] = value
    y = layer(x, topk)
    layer.check()
    assert not y[:3].any()
    assert y[3:].any()
    assert torch.equal(y, good)


def test_paths_refuse_other_plans_closed_groups_and_other_packings() -> None:
    with EPGroup() as group:
        layers = {name: make_layer(group, name) for name in OPERATORS}
        x, topk = batch(group.rank)
        normal = EPConfig(mode="normal", backend="collective")
        pipeline = ExpertParallelExperts(experts(), group, normal, top_k=K)
        expect(
            ConfigError,
            "the plan is for mode normal, expected fuseep",
            lambda: FuseEPPath(group, pipeline._spec, normal, pipeline.plan.prefill),
        )
        layer = layers["fused_deep_moe"]
        for part in ("phases", "runner"):
            expect(ConfigError, "mode fuseep has no", lambda part=part: getattr(layer, part))
        first, second = FusedDeepMoE.pack(experts()), DispatchFFNCombine.pack(experts())
        operators: list[tuple[Any, object]] = [
            (FusedDeepMoE, second),
            (DispatchFFNCombine, first),
            (FuseEPReference, first),
            (FusedDeepMoE, experts()),
        ]
        for kind, wrong in operators:
            operator = group.open_fused(kind.__name__, layer.plan.prefill.buffer_spec)
            with pytest.raises(TypeError, match=f"experts are {type(wrong).__name__}, expected"):
                operator.run(Any, wrong)  # pyright: ignore[reportArgumentType]
        layer(x, topk)
    for layer in layers.values():
        expect(HandleError, "the EPGroup is closed", lambda layer=layer: layer(x, topk))


@pytest.mark.parametrize("operator", OPERATORS)
def test_what_one_rank_lacks_all_ranks_hear(
    operator: str, monkeypatch: pytest.MonkeyPatch, group: EPGroup
) -> None:
    """Each rank lacks one of: a variable, the chip, a parameter of the package, NZ weights."""

    class Older(Buffer):
        """A release with one operator."""

        def fused_deep_moe(  # pyright: ignore[reportIncompatibleMethodOverride]
            self,
            x: Tensor,
            **others: Any,  # noqa: ANN401 (they pass through)
        ) -> tuple[Tensor, Tensor]:
            return super().fused_deep_moe(x, **others)

    is_bad = group.rank == 1
    with monkeypatch.context() as patch:
        if is_bad:
            patch.setenv("DEEP_USE_MODE", "ops")
        text = "rank 1: DEEP_USE_MODE is ops, expected default; unset it"
        expect(BackendUnavailable, text, lambda: make_layer(group, operator))
    with limits.soc("A2" if is_bad else "A3", size_limits=False):
        text = "rank 1: the chip is A2, expected A3"
        expect(BackendUnavailable, text, lambda: make_layer(group, operator))
    with monkeypatch.context() as patch:
        if is_bad:
            patch.setattr("deep_ep.Buffer", Older)
        text = (
            f"{operator}: cannot be opened, rank 1: Older.fused_deep_moe of the installed "
            "package has no parameter topk_idx; install another release"
        )
        expect(BackendUnavailable, text, lambda: make_layer(group, operator))
    with device_that_keeps(allows_nz=not is_bad):
        text = "rank 1: to_nz: weights on cpu have format 2, expected 29 (NZ); set torch.npu."
        expect(BackendUnavailable, text, lambda: make_layer(group, operator))
    make_layer(group, operator)
