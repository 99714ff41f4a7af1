from collections.abc import Iterator
from typing import Any

import pytest
import torch

from epcomm.integrations.deep_ep import ElasticBuffer, EventOverlap
from fakes.deep_ep.strict_v2 import ElasticBuffer as StrictBuffer
from tests.integrations.deep_ep.v2_ranks import (
    CASES,
    HIDDEN,
    MAX_TOKENS,
    NUM_EXPERTS,
    UNEVEN,
    BufferMaker,
    buffers_of,
    dispatch,
    inputs_here,
    num_messages,
    run_recorded_case,
)

pytestmark = pytest.mark.ranks(4)


@pytest.fixture
def make_buffer() -> Iterator[BufferMaker]:
    with buffers_of(StrictBuffer) as make:
        yield make


@pytest.fixture
def buffer(make_buffer: BufferMaker) -> ElasticBuffer:
    return make_buffer()


# Cases whose rows have the same content in any order.
@pytest.mark.parametrize("name", [name for name in CASES if name.endswith("uneven")])
def test_recorded_case_in_any_order(name: str, make_buffer: BufferMaker) -> None:
    run_recorded_case(name, make_buffer)


def test_rows_past_the_count_are_poison_without_cpu_sync(buffer: ElasticBuffer) -> None:
    recv_x, recv_idx, weights, handle, _ = dispatch(buffer, do_cpu_sync=False)
    count = num_messages(handle)
    assert count < len(recv_x) == 4 * MAX_TOKENS
    assert recv_x[count:].isnan().all()
    assert weights[count:].isnan().all()
    assert not recv_x[:count].isnan().any()
    garbage = handle.recv_src_metadata[count:]
    # One value is far out of range, and the other looks valid.
    assert garbage.unique().tolist() == [0, 0x7F7F7F7F]
    assert recv_idx[count:].unique().tolist() == [0, 0x7F7F7F7F7F7F7F7F]
    # Reduction columns of rows that are not expanded are never written.
    assert set(handle.recv_src_metadata[:count, 2:].unique().tolist()) <= {0, 0x7F7F7F7F}


@pytest.mark.parametrize("do_zero_padding", [False, True])
def test_alignment_gaps(do_zero_padding: bool, buffer: ElasticBuffer) -> None:
    x, _, _ = inputs_here(UNEVEN[buffer.rank_idx], buffer.rank_idx)
    sf = torch.full((len(x), 4), 1.0)
    (codes, recv_sf), _, weights, handle, _ = dispatch(
        buffer,
        (x.to(torch.float8_e4m3fn), sf),
        do_expand=True,
        do_cpu_sync=False,
        expert_alignment=16,
        do_zero_padding=do_zero_padding,
    )
    # 4 ranks of 8 tokens, 2 experts of each here at most, 15 rows of padding for each expert.
    assert len(codes) == handle.num_expanded_tokens == 96
    is_gap = torch.ones(len(codes), dtype=torch.bool)
    ends = handle.psum_num_recv_tokens_per_expert.tolist()
    for end, count in zip(ends, handle.num_unaligned_recv_tokens_per_expert.tolist(), strict=True):
        is_gap[end - count : end] = False
    is_past_all = torch.arange(len(codes)) >= -(-ends[-1] // 16) * 16
    assert is_past_all.any()
    code_bytes = codes.view(torch.uint8)
    assert (code_bytes[is_past_all] == 0x7F).all()
    assert recv_sf[is_past_all].isnan().all()
    assert weights[is_past_all].isnan().all()
    gap = is_gap & ~is_past_all
    assert gap.any()
    assert (code_bytes[gap] == (0 if do_zero_padding else 0x7F)).all()
    for tensor in (recv_sf, weights):
        is_expected = tensor[gap] == 0 if do_zero_padding else tensor[gap].isnan()
        assert is_expected.all()
        assert not tensor[~is_gap].isnan().any()


@pytest.mark.parametrize("do_expand", [False, True])
def test_open_orders_differ_unless_deterministic(do_expand: bool, make_buffer: BufferMaker) -> None:
    seen = [dispatch(make_buffer(), do_expand=do_expand)[0].tolist()]
    buffer = make_buffer()
    seen += [dispatch(buffer, do_expand=do_expand)[0].tolist() for _ in range(3)]
    # The first calls of two buffers draw the same numbers, later ones do not.
    assert seen[0] == seen[1]
    assert len({str(rows) for rows in seen}) > 1
    if do_expand:
        # Within an expert, rows of different ranks mix; the first column is the rank.
        num_rows = UNEVEN[buffer.rank_idx]["handle"]["num_recv_tokens_per_expert_list"][0]
        ranks = [[row[0] for row in rows[:num_rows]] for rows in seen]
        assert any(order != sorted(order) for order in ranks)
    ordered = make_buffer(deterministic=True)
    for _ in range(3):
        recv_x, _, _, handle, _ = dispatch(ordered, do_expand=do_expand)
        # The third column is 8 * rank + token, as the source index is.
        values = recv_x[:, 2].tolist()
        ends = handle.psum_num_recv_tokens_per_expert.tolist() if do_expand else [len(values)]
        starts = [0, *ends[:-1]]
        for start, end in zip(starts, ends, strict=True):
            assert values[start:end] == sorted(values[start:end])


def test_results_of_an_asynchronous_call_are_poison_until_waited_for(buffer: ElasticBuffer) -> None:
    recv_x, _, _, handle, event = dispatch(
        buffer,
        previous_event=buffer.capture(),
        async_with_compute_stream=True,
        allocate_on_comm_stream=True,
    )
    assert recv_x.isnan().all()
    event.current_stream_wait()
    assert not recv_x.isnan().any()
    combined, _, event = buffer.combine(recv_x, handle, async_with_compute_stream=True)
    with event:
        assert combined.isnan().all()
    assert not combined.isnan().any()
    _, _, _, _, event = dispatch(buffer)
    with pytest.raises(AssertionError):
        event.current_stream_wait()


def test_what_dispatch_refuses(buffer: ElasticBuffer) -> None:
    x, topk_idx, _ = inputs_here(UNEVEN[buffer.rank_idx], buffer.rank_idx)
    handle = dispatch(buffer)[3]

    def refuse(kind: type[Exception], words: str, **options: Any) -> None:  # noqa: ANN401
        with pytest.raises(kind, match=words):
            dispatch(buffer, **options)

    wide = torch.full((len(x), 33), -1)
    refuse(RuntimeError, "kNumTopk <= 32", topk_idx=wide, topk_weights=None)
    refuse(RuntimeError, "sizeof.int4", x=x[:, :4].contiguous())
    many = torch.zeros(9, HIDDEN, dtype=torch.bfloat16)
    refuse(RuntimeError, "num_tokens <= num_max", x=many)
    refuse(RuntimeError, "topk_idx_t", topk_idx=topk_idx.int())
    refuse(RuntimeError, "num_experts % num_ranks", num_experts=NUM_EXPERTS + 1)
    refuse(RuntimeError, "is_contiguous", x=x[:, ::2])
    refuse(RuntimeError, "get_dispatch_buffer_size", num_max_tokens_per_rank=1 << 12)
    refuse(RuntimeError, "allocate_on_comm_stream", previous_event=buffer.capture())
    refuse(TypeError, "EventOverlap", previous_event=EventOverlap(buffer.capture()))
    refuse(TypeError, "num_experts", num_experts=None)
    refuse(RuntimeError, "do_expand", do_zero_padding=True)
    refuse(AssertionError, "", handle=handle, topk_idx=topk_idx)
    refuse(RuntimeError, "have one shape", handle=handle, topk_weights=torch.zeros(1))
    refuse(AssertionError, "CPU sync", handle=handle, do_cpu_sync=True)
    refuse(AssertionError, "", handle=handle, expert_alignment=16)
    refuse(RuntimeError, "handle.do_expand", handle=handle, do_expand=True)
    # A trap of the package: with cached routes it learns num_experts too late.
    refuse(TypeError, "NoneType", handle=handle, num_experts=None, num_sms=0)
    dispatch(buffer, handle=handle, num_experts=None, num_sms=handle.num_sms)


def test_what_combine_refuses(make_buffer: BufferMaker) -> None:
    buffer = make_buffer()
    recv_x, _, weights, handle, _ = dispatch(buffer)
    expanded_x, _, _, expanded, _ = dispatch(buffer, do_expand=True)
    faults: list[tuple[str, dict[str, Any]]] = [
        ("kHidden % 256", {"x": recv_x[:, :128].contiguous()}),
        ("kBFloat16", {"x": recv_x.float()}),
        ("num_reduced_tokens", {"x": recv_x[1:]}),
        ("get_combine_buffer_size", {"x": recv_x.repeat(1, 1 << 9)}),
        ("bias", {"bias": torch.zeros(9, HIDDEN).bfloat16()}),
        ("allocate_on_comm_stream", {"previous_event": buffer.capture()}),
    ]
    for words, changes in faults:
        with pytest.raises(RuntimeError, match=words):
            buffer.combine(**{"x": recv_x, "handle": handle, **changes})
    with pytest.raises(RuntimeError, match="num_tokens == num_tokens__"):
        buffer.combine(expanded_x, expanded, topk_weights=weights)
    once = make_buffer(allow_multiple_reduction=False)
    expanded_x, _, weights, expanded, _ = dispatch(once, do_expand=True)
    with pytest.raises(RuntimeError, match="must not be backward"):
        once.combine(expanded_x, expanded, topk_weights=weights)


def test_an_expert_chosen_twice_and_ranks_that_disagree_are_found(buffer: ElasticBuffer) -> None:
    x = torch.ones(1, HIDDEN, dtype=torch.bfloat16)
    own = 2 * buffer.rank_idx
    with pytest.raises(RuntimeError, match="deduplicate"):
        dispatch(buffer, x, topk_idx=torch.tensor([[own, own, -1]]), topk_weights=None)
    with pytest.raises(RuntimeError, match="same on all ranks"):
        dispatch(buffer, num_max_tokens_per_rank=MAX_TOKENS + buffer.rank_idx % 2)
