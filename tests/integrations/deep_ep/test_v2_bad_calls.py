"""A wrong call of one rank of V2 is an error on every rank, at once, and the buffer serves on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from epcomm.errors import CapacityError, ConfigError, EPError, HandleError, ShapeError
from epcomm.integrations.deep_ep import ElasticBuffer, EPHandle
from tests.integrations.deep_ep.v2_ranks import BufferMaker, buffers_of

HIDDEN, TOP_K, NUM_EXPERTS, MAX_TOKENS = 256, 2, 4, 16
# The rank whose call is wrong.
FAULTY = 1
# Seconds from the call to the error.
LIMIT_S = 1.0


@pytest.fixture
def make_buffer() -> Iterator[BufferMaker]:
    with buffers_of(ElasticBuffer) as make:
        yield make


class Batch:
    """Tokens of one rank; x[t] is a number of the rank and token."""

    def __init__(self, rank: int) -> None:
        num_tokens = 3 + rank
        tokens = torch.arange(num_tokens)
        self.x = (1.0 + 10 * rank + tokens).unsqueeze(1).repeat(1, HIDDEN).bfloat16()
        self.topk_idx = (tokens.unsqueeze(1) + torch.arange(TOP_K) + rank) % NUM_EXPERTS
        self.weights = torch.full((num_tokens, TOP_K), 0.5)

    def arguments(self, **options: Any) -> dict[str, Any]:  # noqa: ANN401 - any of dispatch
        own = {
            "x": self.x,
            "topk_idx": self.topk_idx,
            "topk_weights": self.weights,
            "num_experts": NUM_EXPERTS,
            "num_max_tokens_per_rank": MAX_TOKENS,
        }
        return own | options

    def codes(self, num_scales: int = 2) -> tuple[Tensor, Tensor]:
        """Return x as FP8 with scales."""
        return self.x.to(torch.float8_e4m3fn), torch.ones(len(self.x), num_scales)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A wrong call.

    wrong: from a batch, the arguments that the faulty rank changes.
    kind: the error of both ranks.
    words: what the message of the faulty rank says: argument, received and expected.
    """

    wrong: Callable[[Batch], dict[str, Any]]
    kind: type[EPError]
    words: str


DISAGREE = "rank 0, .*on rank 1"

DISPATCHES = {
    "sms_of_text": Case(
        wrong=lambda b: {"num_sms": "a"},
        kind=ConfigError,
        words="num_sms is 'a', expected an integer of at least 0",
    ),
    "queues_below_zero": Case(
        wrong=lambda b: {"num_qps": -1}, kind=ConfigError, words="num_qps is -1, expected"
    ),
    "event_of_int": Case(
        wrong=lambda b: {"previous_event": 3},
        kind=ConfigError,
        words="previous_event is int, expected EventHandle, EventOverlap or None",
    ),
    "limit_of_63_bits": Case(
        wrong=lambda b: {"num_max_tokens_per_rank": 2**62},
        kind=ConfigError,
        words=f"num_max_tokens_per_rank is {2**62}, expected a positive integer",
    ),
    "x_none": Case(
        wrong=lambda b: {"x": None}, kind=ShapeError, words=r"x is NoneType, expected \[any, any\]"
    ),
    "x_list": Case(wrong=lambda b: {"x": [b.x]}, kind=ShapeError, words="x is list, expected"),
    "x_tuple_of_one": Case(
        wrong=lambda b: {"x": (b.x,)}, kind=ShapeError, words=r"x is tuple, expected \[any, any\]"
    ),
    "x_vector": Case(
        wrong=lambda b: {"x": b.x[0]}, kind=ShapeError, words=r"x is \[256\].*expected \[any, any"
    ),
    "x_cube": Case(
        wrong=lambda b: {"x": b.x[None]}, kind=ShapeError, words=r"x is \[1, 4, 256\].*expected"
    ),
    "x_float16": Case(
        wrong=lambda b: {"x": b.x.half()},
        kind=ShapeError,
        words=r"x is .*float16 on cpu, expected .*bfloat16",
    ),
    "x_float8_without_scales": Case(
        wrong=lambda b: {"x": b.codes()[0]},
        kind=ShapeError,
        words=r"x is .*float8_e4m3fn on cpu, expected .*bfloat16",
    ),
    "x_bfloat16_with_scales": Case(
        wrong=lambda b: {"x": (b.x, b.codes()[1])},
        kind=ShapeError,
        words=r"x is .*bfloat16 on cpu, expected .*float8_e4m3fn",
    ),
    "x_meta": Case(
        wrong=lambda b: {"x": b.x.to("meta")},
        kind=ShapeError,
        words=r"x is .* on meta, expected .* on cpu",
    ),
    "scales_of_two_bytes": Case(
        wrong=lambda b: {"x": (b.codes()[0], b.codes()[1].half())},
        kind=ShapeError,
        words=r"x\[1\] is \[4, 2\] torch.float16 .*expected \[4, any\] torch.float32 or",
    ),
    "scales_of_other_rows": Case(
        wrong=lambda b: {"x": (b.codes()[0], b.codes()[1][1:])},
        kind=ShapeError,
        words=r"x\[1\] is \[3, 2\] .*expected \[4, any\]",
    ),
    "scales_of_no_block": Case(
        wrong=lambda b: {"x": b.codes(num_scales=0)},
        kind=ShapeError,
        words="0 scales for 256 columns, expected blocks",
    ),
    "topk_idx_none": Case(
        wrong=lambda b: {"topk_idx": None}, kind=ShapeError, words="topk_idx is NoneType, expected"
    ),
    "topk_idx_vector": Case(
        wrong=lambda b: {"topk_idx": b.topk_idx[0]},
        kind=ShapeError,
        words=r"topk_idx is \[2\] .*expected \[4, any\]",
    ),
    "topk_idx_int32": Case(
        wrong=lambda b: {"topk_idx": b.topk_idx.int()},
        kind=ShapeError,
        words=r"topk_idx is .*int32.*expected .*int64",
    ),
    "topk_idx_of_fewer_tokens": Case(
        wrong=lambda b: {"topk_idx": b.topk_idx[1:]},
        kind=ShapeError,
        words=r"topk_idx is \[3, 2\].*expected \[4, any\]",
    ),
    "topk_idx_too_large": Case(
        wrong=lambda b: {"topk_idx": b.topk_idx + NUM_EXPERTS},
        kind=ShapeError,
        words="topk_idx holds 7, expected -1 or 0 to 3",
    ),
    "topk_idx_below_minus_one": Case(
        wrong=lambda b: {"topk_idx": b.topk_idx - NUM_EXPERTS},
        kind=ShapeError,
        words="topk_idx holds -4, expected -1 or 0 to 3",
    ),
    "weights_float64": Case(
        wrong=lambda b: {"topk_weights": b.weights.double()},
        kind=ShapeError,
        words="topk_weights is .*float64.*expected .*float32",
    ),
    "weights_of_another_top_k": Case(
        wrong=lambda b: {"topk_weights": b.weights[:, :1]},
        kind=ShapeError,
        words=r"topk_weights is \[4, 1\].*expected \[4, 2\]",
    ),
    "weights_missing": Case(
        wrong=lambda b: {"topk_weights": None},
        kind=ConfigError,
        words=f"disagree on has_topk_weights: true on {DISAGREE}",
    ),
    "experts_no_multiple": Case(
        wrong=lambda b: {"num_experts": NUM_EXPERTS + 1},
        kind=ConfigError,
        words="num_experts is 5, expected a multiple of 2 ranks",
    ),
    "experts_none": Case(
        wrong=lambda b: {"num_experts": None},
        kind=ConfigError,
        words="num_experts is None, expected a multiple of 2 ranks",
    ),
    "experts_others": Case(
        wrong=lambda b: {"num_experts": 2 * NUM_EXPERTS},
        kind=ConfigError,
        words="disagree on num_local_experts: 2 on rank 0, 4 on rank 1",
    ),
    "max_tokens_others": Case(
        wrong=lambda b: {"num_max_tokens_per_rank": 2 * MAX_TOKENS},
        kind=ConfigError,
        words="disagree on .*max_tokens_per_rank: 16 on rank 0, 32 on rank 1",
    ),
    "max_tokens_none": Case(
        wrong=lambda b: {"num_max_tokens_per_rank": "16"},
        kind=ConfigError,
        words="num_max_tokens_per_rank is 16, expected a positive integer",
    ),
    "too_many_tokens": Case(
        wrong=lambda b: {
            "x": b.x[:1].repeat(MAX_TOKENS + 1, 1),
            "topk_idx": b.topk_idx[:1].repeat(MAX_TOKENS + 1, 1),
            "topk_weights": b.weights[:1].repeat(MAX_TOKENS + 1, 1),
        },
        kind=CapacityError,
        words="x has 17 tokens, expected at most num_max_tokens_per_rank = 16",
    ),
    "stats_float32": Case(
        wrong=lambda b: {"cumulative_local_expert_recv_stats": torch.zeros(2)},
        kind=ShapeError,
        words=r"recv_stats is \[2\] torch.float32.*expected \[2\] torch.int32",
    ),
    "alignment_zero": Case(
        wrong=lambda b: {"expert_alignment": 0},
        kind=ConfigError,
        words="expert_alignment is 0, expected a positive integer",
    ),
    "alignment_others": Case(
        wrong=lambda b: {"expert_alignment": 8},
        kind=ConfigError,
        words="disagree on expert_alignment: 1 on rank 0, 8 on rank 1",
    ),
    "expanded_alone": Case(
        wrong=lambda b: {"do_expand": True},
        kind=ConfigError,
        words="disagree on do_expand: false on rank 0, true on rank 1",
    ),
    "hidden_others": Case(
        wrong=lambda b: {"x": b.x[:, :128]},
        kind=ConfigError,
        words="disagree on hidden_size: 256 on rank 0, 128 on rank 1",
    ),
    "top_k_others": Case(
        wrong=lambda b: {"topk_idx": b.topk_idx[:, :1], "topk_weights": b.weights[:, :1]},
        kind=ConfigError,
        words="disagree on top_k: 2 on rank 0, 1 on rank 1",
    ),
    "dtype_others": Case(
        wrong=lambda b: {"x": b.codes()},
        kind=ConfigError,
        words="disagree on dispatch_format: .*bf16.* on rank 0, .*fp8.* on rank 1",
    ),
    "handle_of_nothing": Case(
        wrong=lambda b: {"handle": (b.x,), "topk_idx": None},
        kind=HandleError,
        words=r"handle is tuple, expected what dispatch\(\)",
    ),
}

ALONG = {
    "event_of_int": Case(
        wrong=lambda b: {"previous_event_before_epilogue": 3},
        kind=ConfigError,
        words="previous_event_before_epilogue is int, expected EventHandle, EventOverlap",
    ),
    "topk_idx": Case(
        wrong=lambda b: {"topk_idx": b.topk_idx},
        kind=HandleError,
        words="topk_idx came with a handle, expected topk_idx=None",
    ),
    "cpu_sync": Case(
        wrong=lambda b: {"do_cpu_sync": True},
        kind=HandleError,
        words="do_cpu_sync came with a handle, expected",
    ),
    "experts": Case(
        wrong=lambda b: {"num_experts": 8},
        kind=HandleError,
        words="num_experts is 8, expected 4 as in the dispatch",
    ),
    "expand": Case(
        wrong=lambda b: {"do_expand": True},
        kind=HandleError,
        words="do_expand is True, expected False",
    ),
    "x_none": Case(wrong=lambda b: {"x": None}, kind=ShapeError, words="x is NoneType, expected"),
    "x_of_fewer_tokens": Case(
        wrong=lambda b: {"x": b.x[1:]},
        kind=ShapeError,
        words=r"x is \[3, 256\].*expected \[4, 256\]",
    ),
    "x_of_another_hidden": Case(
        wrong=lambda b: {"x": b.x[:, :128]},
        kind=ShapeError,
        words=r"x is \[4, 128\].*expected \[4, 256\]",
    ),
    "x_float32": Case(
        wrong=lambda b: {"x": b.x.float()},
        kind=ShapeError,
        words=r"x is .*float32.*expected .*bfloat16",
    ),
    "x_quantized_alone": Case(
        wrong=lambda b: {"x": b.codes()},
        kind=ConfigError,
        words=r"disagree on x: .*256\] torch.bfloat16.* on rank 0, .*float8_e4m3fn.* on rank 1",
    ),
    "weights_of_another_top_k": Case(
        wrong=lambda b: {"topk_weights": b.weights[:, :1]},
        kind=ShapeError,
        words=r"topk_weights is \[4, 1\].*expected \[4, 2\]",
    ),
    "weights_missing": Case(
        wrong=lambda b: {"topk_weights": None},
        kind=ConfigError,
        words=f"disagree on has_topk_weights: true on {DISAGREE}",
    ),
    "handle_of_nothing": Case(
        wrong=lambda b: {"handle": 3}, kind=HandleError, words="handle is int, expected"
    ),
}

# Of combine, from the right arguments.
COMBINES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], type[EPError], str]] = {
    "event_of_int": (
        lambda a: {"previous_event": 3},
        ConfigError,
        "previous_event is int, expected EventHandle, EventOverlap or None",
    ),
    "sms_of_text": (lambda a: {"num_sms": "a"}, ConfigError, "num_sms is 'a', expected"),
    "x_none": (lambda a: {"x": None}, ShapeError, "x is NoneType, expected"),
    "x_of_fewer_rows": (lambda a: {"x": a["x"][1:]}, ShapeError, r"x is \[.*expected \["),
    "x_of_another_hidden": (
        lambda a: {"x": a["x"][:, :128].contiguous()},
        ShapeError,
        r"x is \[\d+, 128\].*expected \[\d+, 256\]",
    ),
    "x_float32": (lambda a: {"x": a["x"].float()}, ShapeError, "float32.*expected .*bfloat16"),
    "x_vector": (lambda a: {"x": a["x"][:, 0]}, ShapeError, r"x is \[\d+\].*expected"),
    "x_meta": (lambda a: {"x": a["x"].to("meta")}, ShapeError, "on meta, expected .* on cpu"),
    "handle_tuple": (lambda a: {"handle": (1,)}, HandleError, "handle is tuple, expected"),
    "handle_none": (lambda a: {"handle": None}, HandleError, "handle is NoneType, expected"),
    "weights_float64": (
        lambda a: {"topk_weights": a["topk_weights"].double()},
        ShapeError,
        "topk_weights is .*float64.*expected .*float32",
    ),
    "weights_of_fewer_rows": (
        lambda a: {"topk_weights": a["topk_weights"][1:]},
        ShapeError,
        r"topk_weights is \[.*expected \[",
    ),
    "weights_list": (
        lambda a: {"topk_weights": [1.0]},
        ShapeError,
        "topk_weights is list, expected",
    ),
    "weights_missing": (
        lambda a: {"topk_weights": None},
        ConfigError,
        f"disagree on has_topk_weights: true on {DISAGREE}",
    ),
    "bias_of_fewer_tokens": (
        lambda a: {"bias": torch.zeros(1, HIDDEN).bfloat16()},
        ShapeError,
        r"bias is \[1, 256\].*expected \[4, 256\]",
    ),
    "bias_float32": (
        lambda a: {"bias": torch.zeros(4, HIDDEN)},
        ShapeError,
        "bias is .*float32.*expected .*bfloat16",
    ),
    "three_biases": (
        lambda a: {"bias": (torch.zeros(4, HIDDEN).bfloat16(),) * 3},
        ShapeError,
        "bias is a tuple of 3, expected two",
    ),
}


def state_of(buffer: ElasticBuffer, batch: Batch, **options: Any) -> dict[str, Any]:  # noqa: ANN401
    """Dispatch rightly; return the right arguments of the combine."""
    rows, _, weights, handle, _ = buffer.dispatch(**batch.arguments(**options))
    return {"x": rows, "handle": handle, "topk_weights": weights}


def check_serves(buffer: ElasticBuffer, batch: Batch, **options: Any) -> None:  # noqa: ANN401
    """Check that the next right calls give what they should."""
    y, weights, _ = buffer.combine(**state_of(buffer, batch, **options))
    num_ranks = torch.tensor([[len({e // 2 for e in row})] for row in batch.topk_idx.tolist()])
    assert torch.equal(y, batch.x * num_ranks)
    assert weights is not None
    assert torch.equal(weights, batch.weights)


def check_refused(
    call: Callable[[], object], kind: type[EPError], words: str, buffer: ElasticBuffer
) -> None:
    """Make a call that is wrong on one rank, and look at the errors of both."""
    dist.barrier()
    began = time.perf_counter()
    with pytest.raises(kind) as raised:
        call()
    took_s = time.perf_counter() - began
    message = str(raised.value)
    assert took_s < LIMIT_S
    assert "rank 1" in message
    if buffer.rank_idx == FAULTY:
        assert raised.match(words)
    dist.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("do_cpu_sync", [True, False])
@pytest.mark.parametrize("name", DISPATCHES)
def test_dispatch(name: str, do_cpu_sync: bool, is_first: bool, make_buffer: BufferMaker) -> None:
    case, buffer = DISPATCHES[name], make_buffer()
    batch = Batch(buffer.rank_idx)
    if not is_first:
        check_serves(buffer, batch, do_cpu_sync=do_cpu_sync)
    given = batch.arguments(do_cpu_sync=do_cpu_sync)
    if buffer.rank_idx == FAULTY:
        given |= case.wrong(batch)
    check_refused(lambda: buffer.dispatch(**given), case.kind, case.words, buffer)
    check_serves(buffer, batch, do_cpu_sync=do_cpu_sync)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("do_cpu_sync", [True, False])
@pytest.mark.parametrize("name", ALONG)
def test_dispatch_along_a_handle(name: str, do_cpu_sync: bool, make_buffer: BufferMaker) -> None:
    case, buffer = ALONG[name], make_buffer()
    batch = Batch(buffer.rank_idx)
    handle = state_of(buffer, batch, do_cpu_sync=do_cpu_sync)["handle"]
    assert isinstance(handle, EPHandle)
    given: dict[str, Any] = {"x": batch.x, "topk_weights": batch.weights, "handle": handle}
    if buffer.rank_idx == FAULTY:
        given |= case.wrong(batch)
    check_refused(lambda: buffer.dispatch(**given), case.kind, case.words, buffer)
    check_serves(buffer, batch, do_cpu_sync=do_cpu_sync)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("do_cpu_sync", [True, False])
@pytest.mark.parametrize("name", COMBINES)
def test_combine(name: str, do_cpu_sync: bool, make_buffer: BufferMaker) -> None:
    wrong, kind, words = COMBINES[name]
    buffer = make_buffer()
    batch = Batch(buffer.rank_idx)
    for do_expand in (False, True):
        given = state_of(buffer, batch, do_cpu_sync=do_cpu_sync, do_expand=do_expand)
        if buffer.rank_idx == FAULTY:
            given |= wrong(given)
        check_refused(lambda given=given: buffer.combine(**given), kind, words, buffer)
        check_serves(buffer, batch, do_cpu_sync=do_cpu_sync)


@pytest.mark.ranks(2)
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
    lines: Callable[[Tensor], object], words: str, do_cpu_sync: bool, make_buffer: BufferMaker
) -> None:
    buffer = make_buffer()
    batch = Batch(buffer.rank_idx)
    given = state_of(buffer, batch, do_cpu_sync=do_cpu_sync, do_expand=True)
    metadata = given["handle"].recv_src_metadata
    if buffer.rank_idx == FAULTY:
        given["handle"].recv_src_metadata = lines(metadata)
    check_refused(lambda: buffer.combine(**given), ShapeError, words, buffer)
    check_serves(buffer, batch, do_cpu_sync=do_cpu_sync, do_expand=False)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("do_cpu_sync", [True, False])
def test_shapes_that_are_open_differ(do_cpu_sync: bool, make_buffer: BufferMaker) -> None:
    buffer = make_buffer()
    batch = Batch(buffer.rank_idx)
    narrow = batch.arguments(x=batch.x[:, :128].contiguous(), do_cpu_sync=do_cpu_sync)
    other_limit = batch.arguments(num_max_tokens_per_rank=32, do_cpu_sync=do_cpu_sync)
    usual = batch.arguments(do_cpu_sync=do_cpu_sync)
    for wrong, words in (
        (narrow, "disagree on hidden_size: 256 on rank 0, 128 on rank 1"),
        (other_limit, "disagree on .*max_tokens_per_rank: 16 on rank 0, 32 on rank 1"),
    ):
        buffer.dispatch(**wrong)
        buffer.dispatch(**usual)
        given = wrong if buffer.rank_idx == FAULTY else usual
        check_refused(lambda given=given: buffer.dispatch(**given), ConfigError, words, buffer)
    check_serves(buffer, batch, do_cpu_sync=do_cpu_sync)


@pytest.mark.ranks(2)
def test_other_calls_are_an_error_of_their_order(make_buffer: BufferMaker) -> None:
    buffer = make_buffer()
    batch = Batch(buffer.rank_idx)
    given = state_of(buffer, batch)

    def call() -> object:
        if buffer.rank_idx == FAULTY:
            return buffer.combine(**given)
        return buffer.dispatch(batch.x, handle=given["handle"], topk_weights=batch.weights)

    check_refused(call, HandleError, "rank 0 is in dispatch along a handle", buffer)
    check_serves(buffer, batch)


@pytest.mark.ranks(2)
def test_a_handle_of_another_buffer_serves_where_all_ranks_pass_one(
    make_buffer: BufferMaker,
) -> None:
    buffer, earlier = make_buffer(), make_buffer()
    batch = Batch(buffer.rank_idx)
    own, foreign = state_of(buffer, batch), state_of(earlier, batch)
    given = foreign if buffer.rank_idx == FAULTY else own
    check_refused(
        lambda: buffer.combine(**given), HandleError, "handle of another Buffer", buffer
    )

    def dispatch_along() -> object:
        return buffer.dispatch(batch.x, handle=given["handle"], topk_weights=batch.weights)

    check_refused(dispatch_along, HandleError, "handle of another Buffer", buffer)
    wrong = foreign | ({"x": foreign["x"][1:]} if buffer.rank_idx == FAULTY else {})
    check_refused(lambda: buffer.combine(**wrong), ShapeError, r"x is .*expected \[", buffer)
    assert torch.equal(buffer.combine(**foreign)[0], buffer.combine(**own)[0])
