"""Ascend's Buffer over ranks: golden values, lifetimes, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fakes.ascend.deep_ep import Buffer
from fakes.ascend.limits import soc
from fakes.ascend.registry import register
from fakes.deep_ep.limits import limits_off
from tests.fakes.ascend.recorded import assert_equals, golden, group_for, is_poison, tensor_of

pytestmark = pytest.mark.ranks(4)

register()

NORMAL = golden("ascend_deep_ep_normal")["cases"]
LOW_LATENCY = golden("ascend_deep_ep_low_latency")
CASES = LOW_LATENCY["cases"]
NEG_ONE = "MOE_ENABLE_TOPK_NEG_ONE"
E, H, K, M = 8, 6, 3, 6


@dataclass(frozen=True)
class Inputs:
    """x [T, H], ids [T, K], weights [T, K] of this rank."""

    x: Tensor
    ids: Tensor
    weights: Tensor


@pytest.fixture(autouse=True)
def small_sizes() -> Iterator[None]:
    with soc("A3", size_limits=False):
        yield


def inputs_of(recorded: dict[str, Any]) -> Inputs:
    """Fresh tensors of one rank of a case."""
    names = ("x", "topk_idx", "topk_weights")
    x, ids, weights = (tensor_of(recorded[name]) for name in names)
    return Inputs(x, ids, weights)


def my_inputs(case: str = "W4_bf16_uneven") -> Inputs:
    """Return this rank's inputs of a case with 4 ranks."""
    (found,) = (entry for entry in CASES if entry["id"] == case)
    return inputs_of(found["ranks"][dist.get_rank()])


def combine_x(case: dict[str, Any], rows: list[list[int]], shape: torch.Size) -> Tensor:
    """Compute the rows by the formula of the case, with NaN beyond them."""
    y = torch.full(shape, float("nan"))
    column = torch.arange(shape[1])
    special = {0: 2.0**25, 1: 1.0, 2: -(2.0**25)}
    for i, (source, token, choice) in enumerate(rows):
        expert = case["ranks"][source]["topk_idx"]["values"][token][choice]
        if "accumulation" in case["id"]:
            y[i] = special[expert]
        else:
            y[i] = ((5 * i + 3 * column + 7 * expert + i * column) % 61 - 30) / 2
    return y.bfloat16()


def dispatch_normal(
    buffer: Buffer, inputs: Inputs, num_experts: int = E, *, quant_mode: str | None = None
) -> Any:  # noqa: ANN401 (what the real one returns)
    """Compute the layout, then dispatch."""
    per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(inputs.ids, num_experts)
    return buffer.dispatch(
        inputs.x,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=is_in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=inputs.ids,
        topk_weights=inputs.weights,
        quant_mode=quant_mode,
    )


@contextmanager
def refused(match: str) -> Iterator[None]:
    """Make a call that every rank refuses."""
    with pytest.raises(RuntimeError, match=match):
        yield


@pytest.mark.parametrize("sums", [False, True], ids=["counts", "sums"])
@pytest.mark.parametrize("case", NORMAL, ids=[case["id"] for case in NORMAL])
def test_normal_mode_equals_the_golden_values(
    case: dict[str, Any], sums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = group_for(case["W"])
    if group is None:
        return
    monkeypatch.setenv("MOE_EXPERT_TOKEN_NUMS_TYPE", str(int(not sums)))
    recorded = case["ranks"][group.rank()]
    inputs, buffer = inputs_of(recorded), Buffer(group)
    per_rank, none, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(inputs.ids, case["E"])
    assert none is None
    assert_equals(per_rank, recorded["layout"]["num_tokens_per_rank"])
    assert_equals(per_expert, recorded["layout"]["num_tokens_per_expert"])
    assert_equals(is_in_rank, recorded["layout"]["is_token_in_rank"])
    mode = {"bfloat16": "bf16", "int8": "int8"}[case["wire"]]
    recv_x, ids, weights, counts, handle, event = dispatch_normal(
        buffer, inputs, case["E"], quant_mode=mode
    )
    event.current_stream_wait()
    data, scales = recv_x if mode == "int8" else (recv_x, None)
    assert_equals(data, recorded["recv_x"])
    if scales is not None:
        assert_equals(scales, recorded["scales"])
    assert is_poison(ids)
    assert is_poison(weights)
    assert list(ids.shape) == list(weights.shape) == [data.shape[0], case["K"]]
    suffix = "_cumulative" if sums else ""
    assert counts == recorded[f"num_recv_tokens_per_expert{suffix}"]
    assert_equals(handle[5], recorded["recv_count_prefix"])
    rows = recorded["rows"]
    assert handle[3].view(-1, 3)[: len(rows)].tolist() == rows
    y = combine_x(case, rows, data.shape)
    if "combine_x" in recorded:
        assert_equals(y, recorded["combine_x"])
    # Weights of the argument are not read: those of dispatch count.
    wrong = torch.full_like(inputs.weights, float("nan"))
    combined, no_weights, _ = buffer.combine(y, handle, topk_weights=wrong)
    assert_equals(combined, recorded["combined_x"])
    assert no_weights is None


@pytest.mark.parametrize("sums", [False, True], ids=["counts", "sums"])
@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_low_latency_equals_the_golden_values(
    case: dict[str, Any], sums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = group_for(case["W"])
    if group is None:
        return
    monkeypatch.setenv("MOE_EXPERT_TOKEN_NUMS_TYPE", str(int(not sums)))
    if case.get("minus_one_ids"):
        monkeypatch.setenv(NEG_ONE, "1")
    recorded = case["ranks"][group.rank()]
    inputs, buffer = inputs_of(recorded), Buffer(group, low_latency_mode=True)
    max_tokens, is_int8 = case["num_max_dispatch_tokens_per_rank"], case["wire"] == "int8"
    recv_x, count, handle, event, hook = buffer.low_latency_dispatch(
        inputs.x, inputs.ids, max_tokens, case["E"], use_fp8=is_int8, return_recv_hook=True
    )
    data, scales = recv_x if isinstance(recv_x, tuple) else (recv_x, None)
    rows = recorded["rows"]
    # The hook does nothing: results are there before it.
    assert_equals(data, recorded["recv_x"])
    hook()
    event.current_stream_wait()
    if scales is not None:
        # A row of zeros has the scale 0, which the file leaves open.
        assert_equals(scales, recorded["scales"], poisoned=False)
        assert is_poison(scales[len(rows) :])
    assert (scales is not None) is is_int8
    expected = tensor_of(recorded["recv_count"])
    assert torch.equal(count, expected.cumsum(0) if sums else expected)
    assert_equals(handle[1], recorded["layout_range"])
    assert handle[0].view(-1, 3)[: len(rows)].tolist() == rows
    assert handle[2:5] == (max_tokens, case["H"], case["E"])
    assert handle[6] is None
    y = combine_x(case, rows, data.shape)
    if "combine_x" in recorded:
        assert_equals(y, recorded["combine_x"])
    out = torch.full_like(inputs.x, 7.0)
    combined, _, _ = buffer.low_latency_combine(
        y, inputs.ids, inputs.weights, handle, zero_copy=True, out=out
    )
    assert_equals(combined, recorded["combined_x"])
    # `out` is accepted and ignored.
    assert bool((out == 7.0).all())


def low_latency_buffer() -> Buffer:
    assert dist.group.WORLD is not None
    return Buffer(dist.group.WORLD, low_latency_mode=True)


def normal_buffer() -> Buffer:
    assert dist.group.WORLD is not None
    return Buffer(dist.group.WORLD)


MUST_RAISE = LOW_LATENCY["must_raise"]
# In the order of the file.
RULES = ["less than 3 tokens", "ids of a row differ", "ids are below 4", NEG_ONE]


@pytest.mark.parametrize(("case", "rule"), list(zip(MUST_RAISE, RULES, strict=True)), ids=RULES)
def test_low_latency_must_raise_on_all_ranks(case: dict[str, Any], rule: str) -> None:
    group = group_for(case["W"])
    if group is None:
        return
    ids = torch.tensor(case["topk_idx"])[: case["T"] if group.rank() == 0 else 0]
    x = torch.zeros(ids.shape[0], H).bfloat16()
    buffer = Buffer(group, low_latency_mode=True)
    max_tokens = case["num_max_dispatch_tokens_per_rank"]
    with refused(rule if group.rank() == 0 else r"ranks \[0\] refuse"):
        buffer.low_latency_dispatch(x, ids, max_tokens, case["E"])


def test_normal_mode_refuses_bad_ids_on_all_ranks() -> None:
    buffer, inputs = normal_buffer(), my_inputs()
    if dist.get_rank() == 2:
        inputs.ids[0, 0] = E
    with refused("ids are below 8" if dist.get_rank() == 2 else r"ranks \[2\] refuse"):
        dispatch_normal(buffer, inputs)


def test_a_layout_comes_before_each_dispatch() -> None:
    buffer, inputs = normal_buffer(), my_inputs()
    per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(inputs.ids, E)
    options: dict[str, Any] = {
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": is_in_rank,
        "num_tokens_per_expert": per_expert,
        "topk_weights": inputs.weights,
    }
    # Two layers take turns: the layout of the second is in the way of the first.
    buffer.get_dispatch_layout(inputs.ids.flip(1).clone(), E)
    with refused("latest get_dispatch_layout|refuse"):
        buffer.dispatch(inputs.x, topk_idx=inputs.ids, **options)
    with refused("comes before each dispatch"):
        buffer.dispatch(inputs.x, topk_idx=inputs.ids, **options)
    with pytest.raises(NotImplementedError, match="cached handle"):
        buffer.dispatch(inputs.x, handle=(per_rank,))


def test_multiplying_by_weights_before_combine_squares_them() -> None:
    inputs = Inputs(
        torch.ones(2, H).bfloat16(), torch.tensor([[0, 5, 2]] * 2), torch.full((2, K), 0.5)
    )
    buffer = normal_buffer()
    data, _, _, _, handle, _ = dispatch_normal(buffer, inputs)
    assert bool((buffer.combine(data, handle)[0] == 1.5).all())
    buffer.get_dispatch_layout(inputs.ids, E)
    assert bool((buffer.combine(0.5 * data, handle)[0] == 0.75).all())


@pytest.mark.parametrize("argument", [None, "bf16", "int8"])
def test_the_argument_wins_over_the_environment(
    argument: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEP_NORMAL_MODE_USE_INT8_QUANT", "1")
    recv_x, *_ = dispatch_normal(normal_buffer(), my_inputs(), quant_mode=argument)
    assert isinstance(recv_x, tuple) is (argument != "bf16")
    monkeypatch.setenv("DEEP_USE_MODE", "alltoall")
    # A documented defect: this mode forgets the environment.
    recv_x, *_ = dispatch_normal(normal_buffer(), my_inputs(), quant_mode=argument)
    assert isinstance(recv_x, tuple) is (argument == "int8")


def test_defects_of_alltoall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_USE_MODE", "alltoall")
    buffer, inputs = normal_buffer(), my_inputs()
    _, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(inputs.ids, E)
    assert not is_in_rank.any()
    _, _, _, counts, _, _ = dispatch_normal(buffer, inputs)
    assert per_expert.tolist() == counts
    ids = torch.tensor([[0, 1, 2]])
    few = Inputs(torch.ones(1, H).bfloat16(), ids, torch.ones(1, K))
    with pytest.raises(UnboundLocalError, match="dynamic_scale_after_routing"):
        dispatch_normal(buffer, few, 4, quant_mode="int8")


def test_the_ops_strategy_looks_at_use_fp8_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_USE_MODE", "ops")
    buffer, inputs = low_latency_buffer(), my_inputs()
    with refused("needs topk_weights"):
        buffer.low_latency_dispatch(inputs.x, inputs.ids, M, E)
    recv_x, *_ = buffer.low_latency_dispatch(
        *(inputs.x, inputs.ids, M, E),
        use_fp8=False,
        quant_mode="int8",
        topk_weights=inputs.weights,
    )
    # Codes without their scales.
    assert isinstance(recv_x, Tensor)
    assert recv_x.dtype == torch.int8


def test_rounds_lengthen_the_layout_and_keep_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Inputs(torch.randn(40, H).bfloat16(), torch.arange(40)[:, None] % E, torch.ones(40, 1))
    data, *_ = dispatch_normal(normal_buffer(), inputs)
    monkeypatch.setenv("DEEPEP_NORMAL_LONG_SEQ_ROUND", "2")
    monkeypatch.setenv("DEEPEP_NORMAL_LONG_SEQ_PER_ROUND_TOKENS", "32")
    buffer = normal_buffer()
    per_expert = buffer.get_dispatch_layout(inputs.ids, E)[2]
    assert per_expert.tolist() == [4] * E + [1] * E
    assert torch.equal(dispatch_normal(buffer, inputs)[0], data)
    many = torch.zeros(65, H).bfloat16(), torch.zeros(65, 1).long(), torch.ones(65, 1)
    with refused("65 tokens, of 64 at most"):
        dispatch_normal(buffer, Inputs(*many))


def test_combine_has_one_round_unless_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPEP_NORMAL_LONG_SEQ_ROUND", "2")
    monkeypatch.setenv("DEEPEP_NORMAL_LONG_SEQ_PER_ROUND_TOKENS", "8192")
    num_tokens = 8193 if dist.get_rank() == 1 else 1
    ids, x = torch.zeros(num_tokens, 1).long(), torch.ones(num_tokens, H).bfloat16()
    buffer = normal_buffer()
    data, _, _, _, handle, _ = dispatch_normal(buffer, Inputs(x, ids, torch.ones(num_tokens, 1)))
    with refused("8193 tokens, of 8192" if dist.get_rank() == 1 else r"ranks \[1\] refuse"):
        buffer.combine(data, handle)
    monkeypatch.setenv("DEEPEP_NORMAL_COMBINE_ENABLE_LONG_SEQ", "1")
    assert torch.equal(buffer.combine(data, handle)[0], x)


def test_combine_refuses_a_handle_or_ids_of_another_dispatch() -> None:
    buffer, inputs = low_latency_buffer(), my_inputs()
    recv_x, _, handle, _, _ = buffer.low_latency_dispatch(inputs.x, inputs.ids, M, E, use_fp8=False)
    assert isinstance(recv_x, Tensor)
    others = (inputs.ids + 1) % E
    with refused("of one dispatch|refuse"):
        buffer.low_latency_combine(recv_x, others, inputs.weights, handle)
    broken = (handle[0] + 1, *handle[1:])
    with refused("of one dispatch"):
        buffer.low_latency_combine(recv_x, inputs.ids, inputs.weights, broken)
    slabs = recv_x.view(2, -1, H)
    with refused("2-D"):
        buffer.low_latency_combine(slabs, inputs.ids, inputs.weights, handle)
    with refused("low_latency_mode"):
        normal_buffer().low_latency_dispatch(inputs.x, inputs.ids, M, E)


def test_limits_of_sizes_apply_unless_they_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = my_inputs()
    tall = Inputs(torch.zeros(inputs.x.shape[0], 2048).bfloat16(), inputs.ids, inputs.weights)
    with soc("A3"):
        buffer, low_latency = normal_buffer(), low_latency_buffer()
        with refused("H is 1024 to 7168"):
            dispatch_normal(buffer, inputs)
        with refused("H is 1024 to 8192"):
            low_latency.low_latency_dispatch(inputs.x, inputs.ids, M, E)
        with refused("1 to 512 tokens"):
            low_latency.low_latency_dispatch(tall.x, tall.ids, 513, E)
        # Normal mode needs twice 208 MiB for a start, and HCCL gives 200.
        with refused("set DEEPEP_HCCL_BUFFSIZE"):
            dispatch_normal(buffer, tall)
        monkeypatch.setenv("HCCL_BUFFSIZE", "600")
        dispatch_normal(buffer, tall)
        low_latency.low_latency_dispatch(tall.x, tall.ids, M, E)
        monkeypatch.setenv("DEEPEP_HCCL_BUFFSIZE", "1")
        with refused("set DEEPEP_HCCL_BUFFSIZE"):
            low_latency.low_latency_dispatch(tall.x, tall.ids, 512, E)
        with limits_off():
            dispatch_normal(buffer, inputs)
    with soc("A2"), refused("A2: 7168"):
        dispatch_normal(buffer, tall)
    with soc("A2"), refused("1 to 256 tokens"):
        low_latency.low_latency_dispatch(tall.x, tall.ids, 257, E)


def test_ranks_in_different_calls_all_raise() -> None:
    buffer, inputs = low_latency_buffer(), my_inputs()
    max_tokens = M if dist.get_rank() else M + 1
    with refused("all ranks pass the same sizes"):
        buffer.low_latency_dispatch(inputs.x, inputs.ids, max_tokens, E)
