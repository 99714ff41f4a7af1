from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from epcomm.errors import CapacityError, ConfigError, HandleError, ShapeError
from epcomm.integrations.deep_ep import ElasticBuffer, EPHandle
from tests.integrations.deep_ep.bad_calls import (
    FAULTY,
    UNKNOWN_TOP_K,
    Arguments,
    Case,
    cases_of_dispatch,
    check_case,
    check_cases,
    check_refused,
    check_wrong_ids_of_a_new_shape,
    cut,
    disagreeing,
    narrow,
    spoilt,
    with_scales,
)
from tests.integrations.deep_ep.v2_ranks import BufferMaker

pytestmark = pytest.mark.ranks(2)

HIDDEN, TOP_K, NUM_EXPERTS, MAX_TOKENS = 256, 2, 4, 16


class Batch:
    """Tokens of one rank, 4 on the faulty one; x[t] is a number of the rank and token."""

    def __init__(self, rank: int) -> None:
        num_tokens = 3 + rank
        tokens = torch.arange(num_tokens)
        self.x = (1.0 + 10 * rank + tokens).unsqueeze(1).repeat(1, HIDDEN).bfloat16()
        self.ids = (tokens.unsqueeze(1) + torch.arange(TOP_K) + rank) % NUM_EXPERTS
        self.weights = torch.full((num_tokens, TOP_K), 0.5)


def arguments_of(buffer: ElasticBuffer, **options: Any) -> Arguments:  # noqa: ANN401 - of dispatch
    batch = Batch(buffer.rank_idx)
    own = {"x": batch.x, "topk_idx": batch.ids, "topk_weights": batch.weights}
    return own | {"num_experts": NUM_EXPERTS, LIMIT: MAX_TOKENS} | options


def many(tensor: Tensor) -> Tensor:
    return tensor[:1].repeat(MAX_TOKENS + 1, 1)


BIAS = torch.zeros(4, HIDDEN).bfloat16()
LIMIT = "num_max_tokens_per_rank"

LAUNCH: dict[str, Case] = {
    "sms_of_text": ({"num_sms": "a"}, ConfigError, "num_sms is 'a', expected an integer of at l"),
    "queues_below_zero": ({"num_qps": -1}, ConfigError, "num_qps is -1, expected"),
    "event_number": ({"previous_event": 3}, ConfigError, "previous_event is int, expected Event"),
    "second_event": (
        {"previous_event_before_epilogue": 3},
        ConfigError,
        "previous_event_before_epilogue is int, expected EventHandle, EventOverlap or None",
    ),
}
WEIGHTS_MISSING = disagreeing("has_topk_weights", "true", "false", topk_weights=None)
DISPATCHES: dict[str, Case] = {
    **LAUNCH,
    **cases_of_dispatch(4, HIDDEN),
    **spoilt(optional=("topk_weights",)),
    "topk_idx_int32": ({"topk_idx": Tensor.int}, ShapeError, "topk_idx is .*int32.*expected .*64"),
    "weights_missing": WEIGHTS_MISSING,
    "experts_no_multiple": ({"num_experts": 5}, ConfigError, "num_experts is 5, expected a multip"),
    "experts_others": disagreeing("num_local_experts", 2, 4, num_experts=2 * NUM_EXPERTS),
    "max_tokens_others": disagreeing(".*max_tokens_per_rank", 16, 32, **{LIMIT: 2 * MAX_TOKENS}),
    "too_many_tokens": (
        {"x": many, "topk_idx": many, "topk_weights": many},
        CapacityError,
        f"x has 17 tokens, expected at most {LIMIT} = 16",
    ),
    "stats_float32": (
        {"cumulative_local_expert_recv_stats": torch.zeros(2)},
        ShapeError,
        r"recv_stats is \[2\] torch.float32.*expected \[2\] torch.int32",
    ),
    "alignment_zero": ({"expert_alignment": 0}, ConfigError, "expert_alignment is 0, expected a p"),
    "alignment_others": disagreeing("expert_alignment", 1, 8, expert_alignment=8),
    "handle_of_nothing": (
        {"handle": (3,), "topk_idx": None},
        HandleError,
        r"handle is tuple, expected what dispatch\(\)",
    ),
}
# Wrong calls that ranks find in different exchanges, where no call was made before.
FIRST = ("event_number", "x none", "too_many_tokens", "hidden_others", "handle_of_nothing")

ALONG: dict[str, Case] = {
    **LAUNCH,
    **spoilt("x", optional=("topk_weights",)),
    "topk_idx": (
        {"topk_idx": torch.zeros(4, 2)},
        HandleError,
        "topk_idx came with a handle, expected topk_idx=None",
    ),
    "cpu_sync": ({"do_cpu_sync": True}, HandleError, "do_cpu_sync came with a handle, expected"),
    "experts": ({"num_experts": 8}, HandleError, "num_experts is 8, expected 4 as in the dispatch"),
    "expand": ({"do_expand": True}, HandleError, "do_expand is True, expected False"),
    "x_rows": ({"x": cut}, ShapeError, r"x is \[3, 256\].*expected \[4, 256\]"),
    "x_quantized_alone": disagreeing(
        "x", r".*256\] torch.bfloat16.*", ".*float8_e4m3fn.*", x=with_scales(torch.ones(4, 1))
    ),
    "weights_missing": WEIGHTS_MISSING,
    "handle_of_nothing": ({"handle": 3}, HandleError, "handle is int, expected"),
}
COMBINES: dict[str, Case] = {
    **LAUNCH,
    **spoilt("x", optional=("topk_weights",)),
    "x_rows": ({"x": cut}, ShapeError, r"x is \[\d+, 256\].*expected \[\d+, 256\]"),
    "handle_tuple": ({"handle": (1,)}, HandleError, "handle is tuple, expected"),
    "weights_missing": WEIGHTS_MISSING,
    "bias_rows": ({"bias": BIAS[:1]}, ShapeError, r"bias is \[1, 256\].*expected \[4, 256\]"),
    "three_biases": ({"bias": (BIAS,) * 3}, ShapeError, "bias is a tuple of 3, expected two"),
}


def state_of(buffer: ElasticBuffer, **options: Any) -> Arguments:  # noqa: ANN401
    rows, _, weights, handle, _ = buffer.dispatch(**arguments_of(buffer, **options))
    return {"x": rows, "handle": handle, "topk_weights": weights}


def along_of(buffer: ElasticBuffer, handle: EPHandle) -> Arguments:
    batch = Batch(buffer.rank_idx)
    return {"x": batch.x, "topk_weights": batch.weights, "handle": handle}


def check_serves(buffer: ElasticBuffer, **options: Any) -> None:  # noqa: ANN401
    batch = Batch(buffer.rank_idx)
    y, weights, _ = buffer.combine(**state_of(buffer, **options))
    num_ranks = torch.tensor([[len({e // 2 for e in row})] for row in batch.ids.tolist()])
    assert torch.equal(y, batch.x * num_ranks)
    assert torch.equal(weights, batch.weights)


@pytest.mark.parametrize("do_cpu_sync", [True, False])
@pytest.mark.parametrize("function", ["dispatch", "along", "combine", "expanded"])
def test_a_wrong_call_is_an_error_on_every_rank(
    function: str, do_cpu_sync: bool, buffer: ElasticBuffer
) -> None:
    options: dict[str, Any] = {"do_cpu_sync": do_cpu_sync}
    dispatch, combine = buffer.dispatch, buffer.combine
    cases, make, call = {
        "dispatch": (DISPATCHES, lambda: arguments_of(buffer, **options), dispatch),
        "along": (ALONG, lambda: along_of(buffer, state_of(buffer, **options)["handle"]), dispatch),
        "combine": (COMBINES, lambda: state_of(buffer, **options), combine),
        "expanded": (COMBINES, lambda: state_of(buffer, do_expand=True, **options), combine),
    }[function]
    check_serves(buffer, **options)
    check_cases(cases, make, call, lambda: check_serves(buffer, **options))


@pytest.mark.parametrize("name", FIRST)
def test_a_wrong_first_call_is_an_error_on_every_rank(name: str, buffer: ElasticBuffer) -> None:
    check_case(buffer.dispatch, arguments_of(buffer), DISPATCHES[name])
    check_serves(buffer)


@pytest.mark.usefixtures("compares_no_calls")
@pytest.mark.parametrize("do_cpu_sync", [True, False])
@pytest.mark.parametrize(
    "case",
    [DISPATCHES["topk_idx_int32"], DISPATCHES["ids_rows"], UNKNOWN_TOP_K],
    ids=["dtype", "rows", "unknown_top_k"],
)
def test_wrong_ids_of_a_new_shape_are_an_error_where_hosts_compare_no_calls(
    case: Case, do_cpu_sync: bool, buffer: ElasticBuffer
) -> None:
    right = arguments_of(buffer, do_cpu_sync=do_cpu_sync)
    right["x"] = narrow(right["x"])
    check_wrong_ids_of_a_new_shape(
        buffer.dispatch, right, case, lambda: check_serves(buffer, do_cpu_sync=do_cpu_sync)
    )


@pytest.mark.parametrize("do_cpu_sync", [True, False])
@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (lambda table: table.fill_(99), "x has .* rows, expected at least 100, .*names row 99"),
        (lambda table: table[:, 1:].clone(), "recv_src_metadata is .*expected .*4"),
        (lambda table: table.tolist(), "recv_src_metadata is list, expected"),
    ],
)
def test_combine_by_metadata(
    lines: Callable[[Tensor], object], words: str, do_cpu_sync: bool, buffer: ElasticBuffer
) -> None:
    given = state_of(buffer, do_cpu_sync=do_cpu_sync, do_expand=True)
    metadata = given["handle"].recv_src_metadata
    if buffer.rank_idx == FAULTY:
        given["handle"].recv_src_metadata = lines(metadata)
    check_refused(lambda: buffer.combine(**given), ShapeError, words)
    check_serves(buffer, do_cpu_sync=do_cpu_sync, do_expand=False)


@pytest.mark.parametrize("do_cpu_sync", [True, False])
def test_shapes_that_are_open_differ(do_cpu_sync: bool, buffer: ElasticBuffer) -> None:
    own = arguments_of(buffer, do_cpu_sync=do_cpu_sync)
    for wrong, words in (
        (own | {"x": narrow(own["x"])}, "disagree on hidden_size: 256 on rank 0, 128 on rank 1"),
        (own | {LIMIT: 32}, "disagree on .*max_tokens_per_rank: 16 on rank 0, 32 on rank 1"),
    ):
        buffer.dispatch(**wrong)
        buffer.dispatch(**own)
        given = wrong if buffer.rank_idx == FAULTY else own
        check_refused(lambda given=given: buffer.dispatch(**given), ConfigError, words)
    check_serves(buffer, do_cpu_sync=do_cpu_sync)


def test_other_calls_are_an_error_of_their_order(buffer: ElasticBuffer) -> None:
    given = state_of(buffer)

    def call() -> object:
        if buffer.rank_idx == FAULTY:
            return buffer.combine(**given)
        return buffer.dispatch(**along_of(buffer, given["handle"]))

    check_refused(call, HandleError, "rank 0 is in dispatch along a handle")
    check_serves(buffer)


def test_a_handle_of_another_buffer_serves_if_all_ranks_pass_one(make_buffer: BufferMaker) -> None:
    buffer, earlier = make_buffer(), make_buffer()
    own, foreign = state_of(buffer), state_of(earlier)
    given = foreign if buffer.rank_idx == FAULTY else own
    check_refused(lambda: buffer.combine(**given), HandleError, "handle of another Buffer")

    def dispatch_along() -> object:
        return buffer.dispatch(**along_of(buffer, given["handle"]))

    check_refused(dispatch_along, HandleError, "handle of another Buffer")
    wrong = foreign | ({"x": foreign["x"][1:]} if buffer.rank_idx == FAULTY else {})
    check_refused(lambda: buffer.combine(**wrong), ShapeError, r"x is .*expected \[")
    assert torch.equal(buffer.combine(**foreign)[0], buffer.combine(**own)[0])
