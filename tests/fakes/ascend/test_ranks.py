from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fakes.ascend.deep_ep import Buffer
from tests.fakes.ascend.recorded import assert_equals, golden, group_for, is_poison, tensor_of
from tests.integrations.deep_ep.v1_ranks import Inputs, refused

pytestmark = pytest.mark.ranks(4)

NORMAL = golden("ascend_deep_ep_normal")["cases"]
LOW_LATENCY = golden("ascend_deep_ep_low_latency")
CASES = LOW_LATENCY["cases"]
NEG_ONE = "MOE_ENABLE_TOPK_NEG_ONE"
E, H, K, M = 8, 6, 3, 6


def inputs_of(recorded: dict[str, Any]) -> Inputs:
    names = ("x", "topk_idx", "topk_weights")
    x, ids, weights = (tensor_of(recorded[name]) for name in names)
    return Inputs(x, ids, weights)


def my_inputs(case: str = "W4_bf16_uneven") -> Inputs:
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
    # Combine does not read the weights argument; it uses those of dispatch.
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
    # The hook does nothing, because the results are already complete.
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
    return Buffer(dist.group.WORLD, low_latency_mode=True)


def normal_buffer() -> Buffer:
    return Buffer(dist.group.WORLD)


MUST_RAISE = LOW_LATENCY["must_raise"]
# The rows are in the order of the file.
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


def test_ranks_in_different_calls_all_raise() -> None:
    buffer, inputs = low_latency_buffer(), my_inputs()
    max_tokens = M if dist.get_rank() else M + 1
    with refused("all ranks pass the same sizes"):
        buffer.low_latency_dispatch(inputs.x, inputs.ids, max_tokens, E)
