from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from epcomm.errors import CapacityError, ConfigError, HandleError, ShapeError
from epcomm.integrations.deep_ep import Buffer
from tests.integrations.deep_ep.bad_calls import (
    FAULTY,
    UNKNOWN_TOP_K,
    Arguments,
    Case,
    cases_of_dispatch,
    cases_of_ids,
    check_case,
    check_cases,
    check_refused,
    check_wrong_ids_of_a_new_shape,
    cut,
    disagreeing,
    narrow,
    spoilt,
)
from tests.integrations.deep_ep.test_v1_calls import Batch
from tests.integrations.deep_ep.v1_ranks import world

pytestmark = pytest.mark.ranks(2)

T, H, K, E, M = 3, 128, 2, 4, 4
LIMIT = "num_max_dispatch_tokens_per_rank"


def own_batch() -> Batch:
    return Batch(world().rank(), (H, K, E), num_tokens=T)


def dispatch_arguments(buffer: Buffer) -> Arguments:
    batch = own_batch()
    _, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(batch.ids, E)
    return {
        "x": batch.x,
        "topk_idx": batch.ids,
        "topk_weights": batch.weights,
        "is_token_in_rank": is_in_rank,
        "num_tokens_per_expert": per_expert,
    }


def combine_arguments(buffer: Buffer) -> Arguments:
    rows, _, weights, _, handle, _ = buffer.dispatch(**dispatch_arguments(buffer))
    return {"x": rows, "handle": handle, "topk_weights": weights}


def along_arguments(buffer: Buffer) -> Arguments:
    return {"x": own_batch().x, "handle": combine_arguments(buffer)["handle"]}


def low_latency_dispatch_arguments(buffer: Buffer) -> Arguments:
    del buffer
    batch = own_batch()
    return {"x": batch.x, "topk_idx": batch.ids, "use_fp8": False, LIMIT: M, "num_experts": E}


def low_latency_combine_arguments(buffer: Buffer) -> Arguments:
    batch = own_batch()
    slabs, _, handle, _, _ = buffer.low_latency_dispatch(**low_latency_dispatch_arguments(buffer))
    own = {"topk_idx": batch.ids, "topk_weights": batch.weights}
    return {"x": slabs, "handle": handle, **own}


MANY_ROWS = torch.ones(T + 1, H).bfloat16()
BIAS = MANY_ROWS[1:]

CONFIG: Case = ({"config": 4}, ConfigError, "config is int, expected Config or None")
STREAM: Case = (
    {"allocate_on_comm_stream": True},
    ConfigError,
    "without previous_event.*expected both",
)
BOTH: Case = (
    {"async_finish": True, "return_recv_hook": True},
    ConfigError,
    "async_finish and return_recv_hook are both True, expected one",
)
DISPATCH: dict[str, Case] = {
    **cases_of_dispatch(T, H),
    **spoilt("topk_weights", "is_token_in_rank", "num_tokens_per_expert"),
    "in_rank_columns": ({"is_token_in_rank": narrow}, ShapeError, r"is \[3, 1\].*expected \[3, 2"),
    "per_expert_no_multiple": (
        {"num_tokens_per_expert": cut},
        ShapeError,
        "num_tokens_per_expert has 3 entries, expected a multiple of the 2 ranks",
    ),
    "alignment": ({"expert_alignment": 0}, ConfigError, "expert_alignment is 0, expected a posit"),
    "worst_others": disagreeing("num_worst_tokens", 0, 16, num_worst_tokens=16),
    "config": CONFIG,
    "event": STREAM,
    "experts_others": disagreeing(
        "num_local_experts", 2, 4, num_tokens_per_expert=lambda counts: torch.cat([counts, counts])
    ),
}
COMBINE: dict[str, Case] = {
    **spoilt("x", optional=("topk_weights",)),
    "x_rows": ({"x": cut}, ShapeError, r"x is \[4, 128\].*expected \[5, 128\]"),
    "weights_others": disagreeing("has_topk_weights", "true", "false", topk_weights=None),
    "bias_rows": ({"bias": MANY_ROWS}, ShapeError, r"bias is \[4, 128\].*expected \[3, 128\]"),
    "three_biases": ({"bias": (BIAS,) * 3}, ShapeError, "bias is a tuple of 3, expected two tenso"),
    "handle_none": ({"handle": None}, HandleError, r"handle is NoneType, expected what dispatch\("),
    "config": CONFIG,
    "event": STREAM,
}
ALONG: dict[str, Case] = {
    **spoilt("x"),
    "x_rows": ({"x": cut}, ShapeError, r"x is \[2, 128\].*expected \[3, 128\]"),
    "x_too_wide": ({"x": Tensor.float}, ShapeError, "rows take 512 bytes .*expected at most 256"),
    "dtype_others": disagreeing("x", ".*bfloat16.*", ".*float16.*", x=Tensor.half),
    "config": CONFIG,
}
LOW_LATENCY_DISPATCH: dict[str, Case] = {
    **spoilt("x", "topk_idx"),
    **cases_of_ids(T),
    "hidden_others": DISPATCH["hidden_others"],
    "experts_no_multiple": ({"num_experts": 5}, ShapeError, "num_experts is 5, expected a multip"),
    "experts_others": disagreeing("num_local_experts", 2, 4, num_experts=2 * E),
    "ids_repeated": (
        {"topk_idx": torch.zeros(T, K, dtype=torch.int64)},
        CapacityError,
        "topk_idx names an expert 6 times, expected at most .* = 4",
    ),
    "too_many_tokens": ({LIMIT: 2}, CapacityError, f"x has 3 tokens, expected at most {LIMIT} = 2"),
    "limit_others": disagreeing("max_tokens_per_rank", M, 2 * M, **{LIMIT: 2 * M}),
    "fp8_others": ({"use_fp8": True}, ConfigError, "disagree on .*bf16.* rank 0, .*fp8.* rank 1"),
    "packed_without_powers": (
        {"use_fp8": True, "use_ue8m0": True},
        ConfigError,
        "round_scale=False, expected round_scale=True",
    ),
    "event_and_hook": BOTH,
    "stats_dtype": (
        {"cumulative_local_expert_recv_stats": torch.zeros(2, dtype=torch.float32)},
        ShapeError,
        r"recv_stats is \[2\] torch\.float32.*expected \[2\] torch\.int32",
    ),
    "nvfp4": ({"use_nvfp4": True}, NotImplementedError, "use_nvfp4=True is not available"),
}
LOW_LATENCY_COMBINE: dict[str, Case] = {
    **spoilt("x", "topk_idx", "topk_weights"),
    "ids_rows": ({"topk_idx": cut}, ShapeError, r"topk_idx is \[2, 2\].*expected \[3, 2\]"),
    "out_rows": ({"out": MANY_ROWS}, ShapeError, r"out is \[4, 128\].*expected \[3, 128\]"),
    "event_and_hook": BOTH,
    "logfmt": ({"use_logfmt": True}, NotImplementedError, "use_logfmt=True is not available"),
}
# Function -> its correct arguments, and wrong ones.
CALLS: dict[str, tuple[Callable[[Buffer], Arguments], dict[str, Case]]] = {
    "dispatch": (dispatch_arguments, DISPATCH),
    "combine": (combine_arguments, COMBINE),
    "dispatch along": (along_arguments, ALONG),
    "low_latency_dispatch": (low_latency_dispatch_arguments, LOW_LATENCY_DISPATCH),
    "low_latency_combine": (low_latency_combine_arguments, LOW_LATENCY_COMBINE),
}
# Wrong calls that ranks find in different exchanges, where no call was made before.
FIRST = [
    *[("dispatch", name) for name in ("x none", "ids_too_large", "hidden_others", "worst_others")],
    *[("low_latency_dispatch", name) for name in ("too_many_tokens", "limit_others", "nvfp4")],
]


def check_serves(buffer: Buffer) -> None:
    x = own_batch().x
    num_ranks = dispatch_arguments(buffer)["is_token_in_rank"].sum(1, keepdim=True)
    assert torch.equal(buffer.combine(**combine_arguments(buffer))[0], x * num_ranks)
    assert torch.equal(buffer.low_latency_combine(**low_latency_combine_arguments(buffer))[0], x)


def method_of(buffer: Buffer, function: str) -> Callable[..., Any]:
    return getattr(buffer, function.partition(" ")[0])


@pytest.mark.parametrize("function", CALLS)
def test_a_wrong_call_is_an_error_on_every_rank(function: str) -> None:
    buffer = Buffer(world(), low_latency_mode=True)
    make, cases = CALLS[function]
    call = method_of(buffer, function)
    check_serves(buffer)
    check_cases(cases, lambda: make(buffer), call, lambda: check_serves(buffer))


@pytest.mark.parametrize(("function", "name"), FIRST)
def test_a_wrong_first_call_is_an_error_on_every_rank(function: str, name: str) -> None:
    buffer = Buffer(world(), low_latency_mode=True)
    make, cases = CALLS[function]
    check_case(method_of(buffer, function), make(buffer), cases[name])
    check_serves(buffer)


@pytest.mark.usefixtures("compares_no_calls")
@pytest.mark.parametrize(
    "case", [DISPATCH["ids_rows"], UNKNOWN_TOP_K], ids=["rows", "unknown_top_k"]
)
def test_wrong_ids_of_a_new_shape_are_an_error_where_hosts_compare_no_calls(case: Case) -> None:
    buffer = Buffer(world())
    right = dispatch_arguments(buffer)
    right["x"] = narrow(right["x"])

    def serves() -> None:
        buffer.combine(**combine_arguments(buffer))

    check_wrong_ids_of_a_new_shape(buffer.dispatch, right, case, serves)


@pytest.mark.parametrize("with_hook", [False, True])
def test_a_handle_of_another_buffer_or_before_its_hook_is_an_error_on_all(with_hook: bool) -> None:
    buffer, other = (Buffer(world(), low_latency_mode=True) for _ in range(2))
    arguments = low_latency_combine_arguments(buffer)
    foreign = low_latency_combine_arguments(other)["handle"]
    words = "handle is LowLatencyHandle, expected what low_latency_dispatch"
    _, _, unreceived, _, hook = buffer.low_latency_dispatch(
        **low_latency_dispatch_arguments(buffer), return_recv_hook=True
    )
    if with_hook:
        foreign, words = unreceived, "handle is of a batch that is not received.*, expected"
    else:
        hook()

    def call() -> None:
        if buffer.rank == FAULTY:
            wrong: dict[str, Any] = arguments | {"handle": foreign}
            buffer.low_latency_combine(**wrong)
        elif with_hook:
            hook()
        else:
            buffer.low_latency_combine(**arguments)

    check_refused(call, HandleError, words)
    check_serves(buffer)


@pytest.mark.parametrize("function", ["combine", "dispatch along"])
def test_a_handle_of_another_buffer_serves_if_all_ranks_pass_one(function: str) -> None:
    buffer, earlier = Buffer(world()), Buffer(world())
    make = CALLS[function][0]
    method, own, foreign = method_of(buffer, function), make(buffer), make(earlier)

    def call() -> object:
        return method(**(foreign if buffer.rank == FAULTY else own))

    check_refused(call, HandleError, "handle of another Buffer")
    wrong = foreign | ({"x": foreign["x"][1:]} if buffer.rank == FAULTY else {})
    check_refused(lambda: method(**wrong), ShapeError, r"x is .*expected \[")
    assert torch.equal(method(**make(earlier))[0], method(**make(buffer))[0])
