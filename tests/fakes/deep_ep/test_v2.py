from __future__ import annotations

import ast
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from epcomm.platforms.deep_ep import DeepEPKind, deep_ep_kind
from fakes.deep_ep import install
from fakes.deep_ep.limits import limits_off
from fakes.deep_ep.v2 import ElasticBuffer, EPHandle, EventOverlap
from tests.integrations.deep_ep.golden_v2 import (
    CASES,
    EXACT_FIELDS,
    EXACT_TENSORS,
    HIDDEN,
    MAX_TOKENS,
    NUM_EXPERTS,
    NUM_SMS,
    NUM_TOPK,
    SIGNATURES,
    inputs_of,
    num_messages,
    recorded,
    recorded_handle,
    rows_by_choice,
    rows_by_source,
)

BUFFER_METHODS = (
    "__init__",
    "destroy",
    "get_buffer_size_hint",
    "barrier",
    "capture",
    "get_comm_stream",
    "get_physical_domain_size",
    "get_logical_domain_size",
    "get_theoretical_num_sms",
    "get_theoretical_num_qps",
    "dispatch",
    "combine",
)
UNEVEN = CASES["v2_rows_uneven"]
TWO_MB = 1 << 21

BufferMaker = Callable[..., ElasticBuffer]


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


@pytest.fixture
def make_buffer() -> Iterator[BufferMaker]:
    made: list[ElasticBuffer] = []

    def make(**options: Any) -> ElasticBuffer:  # noqa: ANN401 - any of the constructor
        sizes: dict[str, Any] = {
            "num_max_tokens_per_rank": MAX_TOKENS,
            "hidden": HIDDEN,
            "num_topk": NUM_TOPK,
        }
        made.append(ElasticBuffer(world(), **(sizes | {"explicitly_destroy": True} | options)))
        return made[-1]

    yield make
    for buffer in made:
        buffer.destroy()


def dispatch(
    buffer: ElasticBuffer,
    x: Tensor | tuple[Tensor, Tensor] | None = None,
    **options: Any,  # noqa: ANN401 - any of dispatch
) -> tuple[Any, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
    """Dispatch this rank's tokens of the uneven case, or x over its routes."""
    own_x, topk_idx, weights = inputs_of(UNEVEN[buffer.rank_idx], buffer.rank_idx)
    own_routes: dict[str, Any] = {"topk_idx": topk_idx, "topk_weights": weights}
    routes = {} if "handle" in options else own_routes
    defaults: dict[str, Any] = {"num_experts": NUM_EXPERTS, "num_sms": NUM_SMS}
    return buffer.dispatch(own_x if x is None else x, **(defaults | routes | options))


@pytest.mark.parametrize("method", BUFFER_METHODS)
def test_signatures_are_those_of_the_package(method: str) -> None:
    described = json.loads(SIGNATURES.read_text("utf-8"))["methods"][method]
    found = inspect.getattr_static(ElasticBuffer, method)
    assert isinstance(found, staticmethod) is described["static"]
    parameters = inspect.signature(getattr(ElasticBuffer, method)).parameters
    expected = {
        each["name"]: ast.literal_eval(each["default"])
        if "default" in each
        else inspect.Parameter.empty
        for each in described["parameters"]
    }
    assert {name: each.default for name, each in parameters.items()} == expected
    assert list(parameters) == list(expected)


def test_install_gives_a_package_that_is_recognised_as_v2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    with install("v2") as module:
        assert importlib.import_module("deep_ep") is module
        assert module.ElasticBuffer is ElasticBuffer
        assert module.CPU_RANKS is True
        assert module.__spec__ is not None
        locations = module.__spec__.submodule_search_locations
        assert locations is not None
        assert deep_ep_kind(Path(locations[0])) is DeepEPKind.V2


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", CASES)
def test_recorded_case(name: str, make_buffer: BufferMaker) -> None:
    buffer = make_buffer()
    rank = buffer.rank_idx
    case = CASES[name][rank]
    x, topk_idx, weights = inputs_of(case, rank)
    recv_x, recv_idx, recv_weights, handle, _ = buffer.dispatch(
        x,
        topk_idx,
        weights,
        num_experts=NUM_EXPERTS,
        expert_alignment=case["handle"]["expert_alignment"],
        num_sms=NUM_SMS,
        do_cpu_sync="no_cpu_sync" not in name,
        do_expand="expand" in name,
    )
    assert isinstance(recv_x, Tensor)
    assert recv_weights is not None
    found = {"recv_x": recv_x, "recv_topk_idx": recv_idx, "recv_topk_weights": recv_weights}
    for key, tensor in found.items():
        check_shape(tensor, case[key])
    check_handle(handle, case["handle"])
    check_rows(recv_x, recv_idx, recv_weights, handle, case)
    combined, _, _ = buffer.combine(2 * recv_x, handle)
    check_shape(combined, case["combine_of_2x"])
    assert combined[:, :3].tolist() == case["combine_of_2x"]["values"]


def check_shape(tensor: Tensor | None, entry: dict[str, Any] | None) -> None:
    if entry is None or tensor is None:
        assert entry is tensor
        return
    assert list(tensor.shape) == entry["shape"]
    assert list(tensor.stride()) == entry["stride"]
    assert str(tensor.dtype) == f"torch.{entry['dtype']}"


def check_handle(handle: EPHandle, entry: dict[str, Any]) -> None:
    assert {key: getattr(handle, key) for key in EXACT_FIELDS} == {
        key: entry[key] for key in EXACT_FIELDS
    }
    for key in EXACT_TENSORS:
        check_shape(getattr(handle, key), entry[key])
        assert getattr(handle, key).tolist() == entry[key]["values"]
    check_shape(handle.recv_src_metadata, entry["recv_src_metadata"])


def check_rows(
    recv_x: Tensor,
    recv_idx: Tensor | None,
    weights: Tensor,
    handle: EPHandle,
    case: dict[str, Any],
) -> None:
    """Compare with the recorded rows, in any order that the package may give."""
    expected = recorded_handle(case["handle"])
    count, metadata = num_messages(handle), expected["recv_src_metadata"]
    recorded_x, recorded_weights = recorded(case["recv_x"]), recorded(case["recv_topk_weights"])
    # Source ranks follow one another.
    sources = handle.recv_src_metadata[:count, 0] // MAX_TOKENS
    assert sources.tolist() == sorted(sources.tolist())
    if recv_idx is not None:
        recorded_idx = recorded(case["recv_topk_idx"])
        assert rows_by_source(
            recv_x, recv_idx, weights, handle.recv_src_metadata, count
        ) == rows_by_source(recorded_x, recorded_idx, recorded_weights, metadata, count)
        return
    # Starts of experts after the first tell to which one a row belongs.
    ends = handle.psum_num_recv_tokens_per_expert
    starts = (ends - handle.num_unaligned_recv_tokens_per_expert)[1:]
    assert rows_by_choice(
        recv_x, weights, handle.recv_src_metadata, starts, count
    ) == rows_by_choice(recorded_x, recorded_weights, metadata, starts, count)


@pytest.mark.ranks(4)
def test_rows_past_the_count_are_poison_without_cpu_sync(make_buffer: BufferMaker) -> None:
    buffer = make_buffer()
    recv_x, recv_idx, weights, handle, _ = dispatch(buffer, do_cpu_sync=False)
    assert recv_idx is not None
    assert weights is not None
    count = num_messages(handle)
    assert count < len(recv_x) == 4 * MAX_TOKENS
    assert recv_x[count:].isnan().all()
    assert weights[count:].isnan().all()
    assert not recv_x[:count].isnan().any()
    garbage = handle.recv_src_metadata[count:]
    # Far out of range and valid to the eye, both.
    assert garbage.unique().tolist() == [0, 0x7F7F7F7F]
    assert recv_idx[count:].unique().tolist() == [0, 0x7F7F7F7F7F7F7F7F]
    # Reduction columns of rows that are not expanded are never written.
    assert set(handle.recv_src_metadata[:count, 2:].unique().tolist()) <= {0, 0x7F7F7F7F}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("do_zero_padding", [False, True])
def test_alignment_gaps(do_zero_padding: bool, make_buffer: BufferMaker) -> None:
    buffer = make_buffer()
    x, _, _ = inputs_of(UNEVEN[buffer.rank_idx], buffer.rank_idx)
    sf = torch.full((len(x), 4), 1.0)
    (codes, recv_sf), _, weights, handle, _ = dispatch(
        buffer,
        (x.to(torch.float8_e4m3fn), sf),
        do_expand=True,
        do_cpu_sync=False,
        expert_alignment=16,
        do_zero_padding=do_zero_padding,
    )
    assert weights is not None
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


@pytest.mark.ranks(4)
@pytest.mark.parametrize("is_col_major", [False, True])
def test_scales_are_opaque_words_of_any_strides(
    is_col_major: bool, make_buffer: BufferMaker
) -> None:
    buffer = make_buffer()
    x, _, _ = inputs_of(UNEVEN[buffer.rank_idx], buffer.rank_idx)
    words = torch.arange(4 * len(x), dtype=torch.int32).reshape(4, len(x))
    words = (words + 1000 * buffer.rank_idx).T
    (codes, recv_sf), _, _, handle, _ = dispatch(
        buffer,
        (x.to(torch.float8_e4m3fn), words),
        do_expand=True,
        use_tma_aligned_col_major_sf=is_col_major,
    )
    num_rows = len(codes)
    aligned = -(-num_rows // 4) * 4
    assert recv_sf.stride() == ((1, aligned) if is_col_major else (4, 1))
    assert recv_sf.dtype == torch.int32
    for source, _, *slots in handle.recv_src_metadata.tolist():
        src_rank, token = divmod(source, MAX_TOKENS)
        num_tokens = UNEVEN[src_rank]["inputs"]["T"]
        expected = [1000 * src_rank + token + word * num_tokens for word in range(4)]
        for slot in slots:
            if slot >= 0:
                assert recv_sf[slot].tolist() == expected
                assert codes[slot].float()[0] == src_rank


@pytest.mark.ranks(4)
@pytest.mark.parametrize("do_expand", [False, True])
def test_open_orders_are_shuffled_unless_deterministic(
    do_expand: bool, make_buffer: BufferMaker
) -> None:
    seen = [dispatch(make_buffer(), do_expand=do_expand)[0].tolist()]
    buffer = make_buffer()
    seen += [dispatch(buffer, do_expand=do_expand)[0].tolist() for _ in range(5)]
    # The first calls of two buffers draw alike, later ones do not.
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


@pytest.mark.ranks(4)
@pytest.mark.parametrize("do_cpu_sync", [False, True])
@pytest.mark.parametrize("do_expand", [False, True])
def test_cached_routes_keep_every_row(
    do_expand: bool, do_cpu_sync: bool, make_buffer: BufferMaker
) -> None:
    buffer = make_buffer()
    first_x, first_idx, _, handle, _ = dispatch(
        buffer, do_expand=do_expand, do_cpu_sync=do_cpu_sync
    )
    x, _, _ = inputs_of(UNEVEN[buffer.rank_idx], buffer.rank_idx)
    for _ in range(2):
        again_x, again_idx, weights, again, _ = dispatch(
            buffer, x * 2, handle=handle, do_expand=do_expand
        )
        assert again is handle
        assert weights is None
        assert torch.equal(again_x.nan_to_num(7.0), (first_x * 2).nan_to_num(7.0))
        if not do_expand:
            assert first_idx is not None
            assert again_idx is not None
            count = num_messages(handle)
            assert torch.equal(first_idx[:count], again_idx[:count])


@pytest.mark.ranks(4)
def test_weights_and_biases_of_combine(make_buffer: BufferMaker) -> None:
    buffer = make_buffer()
    x, topk_idx, weights = inputs_of(UNEVEN[buffer.rank_idx], buffer.rank_idx)
    recv_x, recv_idx, recv_weights, handle, _ = dispatch(buffer)
    assert recv_idx is not None
    assert recv_weights is not None
    # Only the rank of an expert has a say about its weight.
    own = torch.where(recv_idx >= 0, recv_weights, float("nan"))
    bias = torch.full_like(x, 3.0)
    combined, back, _ = buffer.combine(recv_x, handle, topk_weights=own, bias=(bias, bias))
    num_ranks = torch.tensor([len({e // 2 for e in row if e >= 0}) for row in topk_idx.tolist()])
    assert torch.equal(combined, x * num_ranks.unsqueeze(1).bfloat16() + 6)
    assert back is not None
    assert torch.equal(back, torch.where(topk_idx >= 0, weights, 0.0))


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("is_allowed", "expected"), [(True, 256.0), (False, 258.0)])
def test_expanded_rows_are_rounded_at_their_rank_if_allowed(
    is_allowed: bool, expected: float, make_buffer: BufferMaker
) -> None:
    buffer = make_buffer(allow_multiple_reduction=is_allowed)
    # Experts 0 and 1 live on rank 0, 2 on rank 1: 256 + 1 is rounded to 256 in bfloat16.
    topk_idx = torch.tensor([[0, 1, 2]])
    x = torch.ones(1, HIDDEN, dtype=torch.bfloat16)
    recv_x, _, _, handle, _ = dispatch(
        buffer, x, topk_idx=topk_idx, topk_weights=None, do_expand=True
    )
    if buffer.rank_idx == 0:
        end = int(handle.psum_num_recv_tokens_per_expert[0])
        recv_x[:end] = 256.0
    combined, _, _ = buffer.combine(recv_x, handle)
    assert combined.unique().tolist() == [expected]


@pytest.mark.ranks(4)
def test_results_of_an_asynchronous_call_are_poison_until_waited_for(
    make_buffer: BufferMaker,
) -> None:
    buffer = make_buffer()
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


@pytest.mark.ranks(4)
def test_a_handle_keeps_a_copy_of_the_routes_unless_told_otherwise(
    make_buffer: BufferMaker,
) -> None:
    buffer = make_buffer()
    _, topk_idx, _ = inputs_of(UNEVEN[buffer.rank_idx], buffer.rank_idx)
    assert dispatch(buffer, topk_idx=topk_idx)[3].topk_idx is not topk_idx
    assert dispatch(buffer, topk_idx=topk_idx, do_handle_copy=False)[3].topk_idx is topk_idx


@pytest.mark.ranks(4)
def test_counts_are_added_to_the_statistics(make_buffer: BufferMaker) -> None:
    buffer = make_buffer()
    stats = torch.full((2,), 10, dtype=torch.int32)
    handle = dispatch(buffer, cumulative_local_expert_recv_stats=stats, expert_alignment=16)[3]
    assert torch.equal(stats, handle.num_unaligned_recv_tokens_per_expert + 10)


@pytest.mark.ranks(4)
def test_what_dispatch_refuses(make_buffer: BufferMaker) -> None:
    buffer = make_buffer()
    x, topk_idx, _ = inputs_of(UNEVEN[buffer.rank_idx], buffer.rank_idx)
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
    refuse(AssertionError, "topk_weights", handle=handle, topk_weights=torch.zeros(1))
    refuse(AssertionError, "CPU sync", handle=handle, do_cpu_sync=True)
    refuse(AssertionError, "", handle=handle, expert_alignment=16)
    refuse(RuntimeError, "handle.do_expand", handle=handle, do_expand=True)
    # The trap of the package: cached routes do not tell it num_experts in time.
    refuse(TypeError, "NoneType", handle=handle, num_experts=None, num_sms=0)
    dispatch(buffer, handle=handle, num_experts=None, num_sms=handle.num_sms)


@pytest.mark.ranks(4)
def test_what_combine_refuses(make_buffer: BufferMaker) -> None:
    buffer = make_buffer()
    recv_x, _, weights, handle, _ = dispatch(buffer)
    expanded_x, _, _, expanded, _ = dispatch(buffer, do_expand=True)
    with pytest.raises(RuntimeError, match="kHidden % 256"):
        buffer.combine(recv_x[:, :128].contiguous(), handle)
    with pytest.raises(RuntimeError, match="kBFloat16"):
        buffer.combine(recv_x.float(), handle)
    with pytest.raises(RuntimeError, match="num_reduced_tokens"):
        buffer.combine(recv_x[1:], handle)
    with pytest.raises(RuntimeError, match="not topk_weights"):
        buffer.combine(expanded_x, expanded, topk_weights=weights)
    with pytest.raises(RuntimeError, match="bias"):
        buffer.combine(recv_x, handle, bias=torch.zeros(9, HIDDEN).bfloat16())
    wide = recv_x.repeat(1, 1 << 9)
    with pytest.raises(RuntimeError, match="get_combine_buffer_size"):
        buffer.combine(wide, handle)
    with pytest.raises(RuntimeError, match="allocate_on_comm_stream"):
        buffer.combine(recv_x, handle, previous_event=buffer.capture())


@pytest.mark.ranks(4)
def test_limits_of_devices_can_be_off(make_buffer: BufferMaker) -> None:
    buffer = make_buffer()
    x, _, _ = inputs_of(UNEVEN[buffer.rank_idx], buffer.rank_idx)
    narrow = x[:, :4].contiguous()
    with limits_off():
        recv_x, _, _, handle, _ = dispatch(buffer, narrow)
        combined, _, _ = buffer.combine(recv_x, handle)
    assert combined.shape == narrow.shape


@pytest.mark.ranks(4)
def test_an_expert_chosen_twice_and_ranks_that_disagree_are_found(make_buffer: BufferMaker) -> None:
    buffer = make_buffer()
    x = torch.ones(1, HIDDEN, dtype=torch.bfloat16)
    own = 2 * buffer.rank_idx
    with pytest.raises(RuntimeError, match="deduplicate"):
        dispatch(buffer, x, topk_idx=torch.tensor([[own, own, -1]]), topk_weights=None)
    with pytest.raises(RuntimeError, match="same on all ranks"):
        dispatch(buffer, num_max_tokens_per_rank=MAX_TOKENS + buffer.rank_idx % 2)


@pytest.mark.ranks(4)
def test_ranks_without_tokens_and_tokens_without_experts(make_buffer: BufferMaker) -> None:
    buffer = make_buffer()
    num_tokens = 2 if buffer.rank_idx == 1 else 0
    x = torch.ones(num_tokens, HIDDEN, dtype=torch.bfloat16)
    nowhere = torch.full((num_tokens, NUM_TOPK), -1)
    for do_expand in (False, True):
        recv_x, _, _, handle, _ = dispatch(
            buffer, x, topk_idx=nowhere, topk_weights=None, do_expand=do_expand, num_sms=0
        )
        assert handle.num_sms == buffer.get_theoretical_num_sms(NUM_EXPERTS, NUM_TOPK)
        assert recv_x.shape == (0, HIDDEN)
        combined, _, _ = buffer.combine(recv_x, handle)
        assert torch.equal(combined, torch.zeros_like(x))


@pytest.mark.ranks(4)
def test_sizes_domains_and_the_end(make_buffer: BufferMaker) -> None:
    group = world()

    def hint(max_tokens: int, hidden: int, num_topk: int = 0, **options: bool) -> int:
        size = ElasticBuffer.get_buffer_size_hint(group, max_tokens, hidden, num_topk, **options)
        assert size % TWO_MB == 0
        return size

    assert hint(1, 256) == TWO_MB
    assert hint(4096, 7168) > hint(2048, 7168) > hint(2048, 4096)
    assert hint(4096, 7168) > hint(4096, 7168, use_fp8_dispatch=True)
    assert hint(4096, 7168, 8, allow_multiple_reduction=False) > hint(4096, 7168, 8)
    assert hint(4096, 7168, 0) == hint(4096, 7168, 32)
    with pytest.raises(RuntimeError, match="hidden > 0"):
        hint(8, 0)
    with pytest.raises(RuntimeError, match="kNumAlignmentBytes"):
        ElasticBuffer(group, num_bytes=TWO_MB + 1)
    buffer = make_buffer()
    assert buffer.get_physical_domain_size() == buffer.get_logical_domain_size() == (1, 4)
    num_sms = buffer.get_theoretical_num_sms(256, 8)
    assert num_sms % 2 == 0
    assert 4 <= num_sms <= 132
    assert buffer.get_theoretical_num_qps(num_sms) <= buffer.num_allocated_qps
    buffer.barrier()
    assert buffer.get_comm_stream() is not None
    buffer.destroy()
    with pytest.raises(AttributeError):
        dispatch(buffer)
    with pytest.raises(AssertionError):
        ElasticBuffer(group, num_bytes=TWO_MB).destroy()
