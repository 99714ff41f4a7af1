"""The fake of deep_ep V1 against a recording of the real one, its signatures and its limits."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from epcomm.deep_ep_facts import DeepEPKind, deep_ep_kind
from epcomm.testing.deep_ep import install
from epcomm.testing.deep_ep.limits import limits_off
from epcomm.testing.deep_ep.v1 import Buffer, Config, EventOverlap
from epcomm.testing.deep_ep.v1.undefined import undefined_integer

CONTRACTS = Path(__file__).parents[2] / "contracts"
CASES = json.loads((CONTRACTS / "deep_ep_v1_recording.json").read_text("utf-8"))["cases"]
SIGNATURES = json.loads((CONTRACTS / "deep_ep_v1_signatures.json").read_text("utf-8"))

# Of the recording.
E, K, M, H, LL_H = 8, 3, 16, 256, 2048
NUM_SMS = 8
# For normal mode with NUM_SMS channels on 4 ranks.
NVL_BYTES = 1 << 26
# There is no stream and no memory behind a fake.
LEFT_OUT = {"get_comm_stream", "get_local_buffer_tensor"}
UNDEFINED_INT32 = undefined_integer(torch.int32)

ranks4 = pytest.mark.ranks(4)


# --- signatures and installation -------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(SIGNATURES["methods"]) - LEFT_OUT))
def test_signatures_equal_the_real_ones(name: str) -> None:
    expected = SIGNATURES["methods"][name]
    parameters = inspect.signature(getattr(Buffer, name)).parameters
    found = [
        (parameter.name, None if parameter.default is parameter.empty else str(parameter.default))
        for parameter in parameters.values()
    ]
    assert found == [(entry["name"], entry.get("default")) for entry in expected["parameters"]]
    assert isinstance(inspect.getattr_static(Buffer, name), staticmethod) is expected["static"]


def test_exports_equal_the_real_ones() -> None:
    with install("v1") as module:
        assert set(SIGNATURES["module"]["exports"]) == set(module.__all__) - {"CPU_RANKS"}
        assert str(module.topk_idx_t) == SIGNATURES["module"]["topk_idx_t"]
        assert module.CPU_RANKS is True
        assert (
            f"Config{inspect.signature(module.Config)}".replace(": 'int'", "")
            .replace(" = ", "=")
            .removesuffix(" -> 'None'")
            == (SIGNATURES["module"]["Config"]["init"])
        )


def test_installed_as_deep_ep_and_removed() -> None:
    assert "deep_ep" not in sys.modules
    with install("v1"):
        import deep_ep  # type: ignore[import-not-found]

        assert deep_ep.Buffer is Buffer
        spec = find_spec("deep_ep")
        assert spec is not None
        assert spec.submodule_search_locations is not None
        assert deep_ep_kind(Path(spec.submodule_search_locations[0])) is DeepEPKind.V1
    assert "deep_ep" not in sys.modules
    with pytest.raises(ValueError, match=r"'v3', expected one of v1, v2"), install("v3"):
        pass


def test_sizes_and_configs() -> None:
    for case in ("low_latency_uneven", "low_latency_empty_rank"):
        for recorded in CASES[case]:
            hint = Buffer.get_low_latency_rdma_size_hint(M, LL_H, 4, E)
            assert hint == recorded["size_hint_bytes"]
    with pytest.raises(AssertionError, match="Unsupported number of EP ranks: 3"):
        Buffer.get_dispatch_config(3)
    with pytest.raises(AssertionError, match="must be even"):
        Buffer.set_num_sms(3)
    with pytest.raises(RuntimeError, match="Assertion exception"):
        Config(20, 300, 256)
    assert Config(2).get_nvl_buffer_size_hint(2 * H, 4) % 128 == 0
    with limits_off():
        assert isinstance(Buffer.get_combine_config(3), Config)


# --- helpers of the ranks --------------------------------------------------------------------


@pytest.fixture(autouse=True)
def recorded_sms() -> Iterator[None]:
    before = Buffer.num_sms
    Buffer.set_num_sms(NUM_SMS)
    yield
    Buffer.set_num_sms(before)


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def normal_buffer() -> Buffer:
    return Buffer(world(), num_nvl_bytes=NVL_BYTES)


def low_latency_buffer(num_nvl_bytes: int = 0) -> Buffer:
    num_bytes = Buffer.get_low_latency_rdma_size_hint(M, LL_H, 4, E)
    return Buffer(world(), num_nvl_bytes, num_bytes, low_latency_mode=True)


@dataclass(frozen=True)
class Inputs:
    x: Tensor
    ids: Tensor
    weights: Tensor


def inputs_of(recorded: dict[str, Any], hidden_size: int) -> Inputs:
    rank, num_tokens = dist.get_rank(), recorded["inputs"]["T"]
    tokens = torch.arange(num_tokens)
    x = (8.0 * rank + tokens).unsqueeze(1).repeat(1, hidden_size).to(torch.bfloat16)
    x[:, 0], x[:, 1] = rank, tokens.to(torch.bfloat16)
    ids = torch.tensor(recorded["inputs"]["topk_idx"], dtype=torch.int64).view(num_tokens, K)
    weights = torch.tensor(recorded["inputs"]["topk_weights"]).view(num_tokens, K)
    return Inputs(x, ids, weights)


def agrees(tensor: Tensor, recorded: dict[str, Any]) -> None:
    """Shape, strides, dtype and values, of the columns that are recorded."""
    assert str(tensor.dtype) == f"torch.{recorded['dtype']}"
    assert list(tensor.shape) == recorded["shape"]
    assert list(tensor.stride()) == recorded["stride"]
    columns = recorded.get("first_columns")
    values = tensor if columns is None else tensor[..., :columns]
    # The first columns are all that differ: the further ones equal the last.
    if columns is not None:
        assert torch.equal(tensor.float()[:, columns:], tensor.float()[:, columns - 1 : -1])
    if tensor.dtype.is_floating_point:
        values = values.float()
    assert values.tolist() == recorded["values"]


@contextmanager
def refused(match: str) -> Iterator[None]:
    """An argument that every rank refuses before it sends anything."""
    with pytest.raises(RuntimeError, match=match):
        yield


# --- normal mode -----------------------------------------------------------------------------


def dispatch_normal(buffer: Buffer, inputs: Inputs, x: Any = None, **options: Any) -> Any:
    per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(inputs.ids, E)
    return buffer.dispatch(
        inputs.x if x is None else x,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=is_in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=inputs.ids,
        topk_weights=inputs.weights,
        **options,
    )


@ranks4
@pytest.mark.parametrize("case", ["normal_uneven", "normal_empty_rank"])
def test_normal_mode_equals_the_recording(case: str) -> None:
    recorded = CASES[case][dist.get_rank()]
    inputs, buffer = inputs_of(recorded, H), normal_buffer()
    per_rank, per_rdma, per_expert, is_in_rank, event = buffer.get_dispatch_layout(inputs.ids, E)
    agrees(per_rank, recorded["layout"]["num_tokens_per_rank"])
    agrees(per_expert, recorded["layout"]["num_tokens_per_expert"])
    agrees(is_in_rank, recorded["layout"]["is_token_in_rank"])
    assert per_rdma is None
    assert event.event is None
    for alignment in (1, 16):
        expected = recorded[f"dispatch_alignment_{alignment}"]
        recv_x, ids, weights, counts, handle, _ = dispatch_normal(
            buffer, inputs, expert_alignment=alignment
        )
        agrees(recv_x, expected["recv_x"])
        agrees(ids, expected["recv_topk_idx"])
        agrees(weights, expected["recv_topk_weights"])
        assert counts == expected["num_recv_tokens_per_expert_list"]
        kinds = [[str(part.dtype).removeprefix("torch."), list(part.shape)] for part in handle]
        assert kinds == expected["handle_types"]
        agrees(handle[0], expected["handle_0_rank_prefix_matrix"])
        agrees(handle[3], expected["handle_3_recv_src_idx"])
    combined_x, combined_weights, _ = buffer.combine(recv_x * 2, handle, topk_weights=weights)
    agrees(combined_x, recorded["combine_of_2x"]["combined_x"])
    assert combined_weights is not None
    agrees(combined_weights, recorded["combine_of_2x"]["combined_topk_weights"])
    cached = buffer.dispatch(inputs.x + 1, handle=handle)
    assert isinstance(cached[0], Tensor)
    agrees(cached[0], recorded["cached_dispatch_of_x_plus_1"]["recv_x"])
    assert cached[1:5] == (None, None, None, None)


@ranks4
@pytest.mark.parametrize("case", ["normal_uneven", "normal_empty_rank"])
def test_worst_case_rows_are_undefined_but_for_their_ids(case: str) -> None:
    recorded = CASES[case][dist.get_rank()]["num_worst_tokens_32"]
    inputs, buffer = inputs_of(CASES[case][dist.get_rank()], H), normal_buffer()
    recv_x, ids, weights, counts, handle, _ = dispatch_normal(buffer, inputs, num_worst_tokens=32)
    assert list(recv_x.shape) == recorded["recv_x_shape"]
    num_rows = recorded["first_rows"]["shape"][0]
    agrees(recv_x[:num_rows], recorded["first_rows"])
    agrees(ids, recorded["recv_topk_idx"])
    assert counts == recorded["counts"]
    assert recv_x[num_rows:].isnan().all()
    assert weights[num_rows:].isnan().all()
    assert weights[:num_rows].isfinite().all()
    assert (handle[3][num_rows:] == UNDEFINED_INT32).all()
    combined_x, _, _ = buffer.combine(recv_x, handle)
    assert combined_x.isfinite().all()
    with refused("rows <= num_worst_tokens"):
        dispatch_normal(buffer, inputs, num_worst_tokens=5)


@ranks4
@pytest.mark.parametrize("case", ["normal_uneven", "normal_empty_rank"])
@pytest.mark.parametrize("column_major", [False, True], ids=["rows", "columns"])
def test_fp8_rows_take_their_scales_along(case: str, column_major: bool) -> None:
    recorded = CASES[case][dist.get_rank()]
    inputs, buffer = inputs_of(recorded, H), normal_buffer()
    x = (inputs.x.float() / 16).to(torch.float8_e4m3fn)
    tokens = 2.0 * torch.arange(x.shape[0]).unsqueeze(1)
    scales = 1 + tokens + torch.arange(2.0) + 100.0 * dist.get_rank()
    if column_major:
        scales = scales.T.contiguous().T
    (recv_x, recv_scales), *_ = dispatch_normal(buffer, inputs, (x, scales))
    agrees(recv_x, recorded["fp8_tuple"]["recv_x"])
    agrees(recv_scales, recorded["fp8_tuple"]["recv_scales"])
    worst = dispatch_normal(buffer, inputs, (x, scales.int()), num_worst_tokens=32)
    num_rows = recv_x.shape[0]
    assert worst[0][1].dtype == torch.int32
    assert (worst[0][0][num_rows:].view(torch.uint8) == 0x7F).all()
    assert (worst[0][1][num_rows:] == UNDEFINED_INT32).all()


@ranks4
def test_biases_are_added_and_asynchronous_results_are_undefined_before_the_wait() -> None:
    inputs = inputs_of(CASES["normal_uneven"][dist.get_rank()], H)
    buffer = normal_buffer()
    layout = buffer.get_dispatch_layout(
        inputs.ids, E, Buffer.capture(), async_finish=True, allocate_on_comm_stream=True
    )
    per_rank, event = layout[0], layout[-1]
    assert (per_rank == UNDEFINED_INT32).all()
    with event:
        pass
    assert (per_rank <= inputs.x.shape[0]).all()
    recv_x, ids, _, _, handle, event = dispatch_normal(buffer, inputs, async_finish=True)
    assert recv_x.isnan().all()
    event.current_stream_wait()
    assert recv_x.isfinite().all()
    assert (ids < E // 4).all()
    bias = torch.ones_like(inputs.x)
    combined_x, _, event = buffer.combine(recv_x, handle, bias=(bias, bias), async_finish=True)
    assert combined_x.isnan().all() or not len(inputs.x)
    event.current_stream_wait()
    num_copies = handle[4].sum(1, keepdim=True)
    assert torch.equal(combined_x.float(), inputs.x.float() * num_copies + 2)
    with pytest.raises(AssertionError):
        EventOverlap().current_stream_wait()


@ranks4
def test_normal_mode_refuses_what_the_real_one_refuses() -> None:
    inputs = inputs_of(CASES["normal_uneven"][dist.get_rank()], H)
    buffer = normal_buffer()

    def dispatch(x: Any = None, **options: Any) -> Callable[[], object]:
        return lambda: dispatch_normal(buffer, inputs, x, **options)

    with refused("x.size.1. "):
        dispatch(inputs.x[:, :4].contiguous())()
    with refused("is_contiguous"):
        dispatch(inputs.x.T.contiguous().T if len(inputs.x) > 1 else inputs.x[:, ::2])()
    with refused("x is bfloat16"):
        dispatch(inputs.x.float())()
    with refused("element_size"):
        dispatch((inputs.x, torch.ones(len(inputs.x), 2)))()
    with refused("previous_event"):
        dispatch(allocate_on_comm_stream=True, async_finish=True)()
    with refused("queues <= num_nvl_bytes"):
        dispatch_normal(Buffer(world(), num_nvl_bytes=1 << 10), inputs)
    _, _, weights, _, handle, _ = dispatch()()
    rows = torch.zeros(handle[3].shape[0], H, dtype=torch.bfloat16)
    with refused("x is bfloat16"):
        buffer.combine(rows.float(), handle)
    with refused("src_idx.size"):
        buffer.combine(rows[1:], handle)
    with refused("topk_weights is float32"):
        buffer.combine(rows, handle, topk_weights=weights.double())
    with refused("== num_channels"):
        buffer.combine(rows, handle, config=Config(6))
    with pytest.raises(AssertionError):
        buffer.dispatch(inputs.x)
    with refused("topk_idx_t"):
        buffer.get_dispatch_layout(inputs.ids.int(), E)
    with refused("topk_idx < num_experts"):
        buffer.get_dispatch_layout(inputs.ids + E, E)
    with refused("one host"):
        buffer.internode_combine(rows, handle)
    with refused("low_latency_mode"):
        buffer.clean_low_latency_buffer(M, LL_H, E)
    with pytest.raises(RuntimeError, match="low_latency_mode"):
        Buffer(world(), num_rdma_bytes=1 << 10)
    with pytest.raises(AssertionError, match="explicitly_destroy"):
        buffer.destroy()


@ranks4
def test_a_destroyed_buffer_refuses_every_call() -> None:
    buffer = Buffer(world(), NVL_BYTES, explicitly_destroy=True)
    buffer.destroy()
    with refused("destroyed"):
        buffer.get_dispatch_layout(torch.zeros(1, K, dtype=torch.int64), E)


# --- low latency -----------------------------------------------------------------------------

FORMATS = {
    "bf16": {"use_fp8": False},
    "fp8": {},
    "fp8_ue8m0": {"round_scale": True, "use_ue8m0": True},
}


def by_source(expert: int, sources: list[list[Any]], rows: list[Any]) -> list[list[Any]]:
    """Rows of an expert, sorted within each source: what does not depend on the order."""
    return [sorted(rows[first : first + count], key=str) for first, count in sources[expert]]


@ranks4
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("case", ["low_latency_uneven", "low_latency_empty_rank"])
def test_low_latency_equals_the_recording_but_for_the_order(case: str, name: str) -> None:
    recorded = CASES[case][dist.get_rank()][name]
    inputs = inputs_of(CASES[case][dist.get_rank()], LL_H)
    stats = torch.zeros(2, dtype=torch.int32)
    recv_x, count, handle, _, hook = low_latency_buffer().low_latency_dispatch(
        inputs.x, inputs.ids, M, E, cumulative_local_expert_recv_stats=stats, **FORMATS[name]
    )
    assert hook is None
    data, scales = recv_x if isinstance(recv_x, tuple) else (recv_x, None)
    assert list(data.shape) == recorded["recv_shape"]
    assert str(data.dtype) == recorded["recv_dtype"]
    assert count.dtype == torch.int32
    assert count.tolist() == recorded["recv_count"]
    assert stats.tolist() == recorded["stats"]
    assert list(handle[2:]) == recorded["handle_tail"]
    ranges = [[[v >> 32, v & 0xFFFFFFFF] for v in values] for values in handle[1].tolist()]
    for expert, num_rows in enumerate(count.tolist()):
        expected = recorded["layout_range"]
        pairs = [
            (data[expert, :num_rows, :3].float().tolist(), recorded["rows"][expert]["values"]),
            (handle[0][expert, :num_rows].tolist(), recorded["src_info"][expert]),
        ]
        if scales is not None:
            first = recorded["scales"]["first"][expert]
            pairs.append((scales[expert, :num_rows, :2].tolist(), first))
        for found, rows in pairs:
            assert by_source(expert, ranges, found) == by_source(expert, expected, rows)
        # A row, its scales and its source stay together.
        assert len({str(row) for row in zip(*(found for found, _ in pairs), strict=True)}) == (
            len({str(row) for row in zip(*(rows for _, rows in pairs), strict=True)})
        )
        beyond = data[expert, num_rows:]
        assert beyond.float().isnan().all()
        assert (handle[0][expert, num_rows:] == UNDEFINED_INT32).all()
    if scales is not None:
        assert list(scales.shape) == recorded["scales"]["shape"]
        assert list(scales.stride()) == recorded["scales"]["stride"]
        assert str(scales.dtype) == recorded["scales"]["dtype"]


def experts(recv_x: Tensor) -> Tensor:
    """Rows times 1 + global expert, as in the recording."""
    factors = 1 + 2 * dist.get_rank() + torch.arange(2).view(2, 1, 1)
    return (recv_x * factors).to(torch.bfloat16)


def dispatch_bf16(buffer: Buffer, inputs: Inputs, **options: Any) -> Any:
    return buffer.low_latency_dispatch(inputs.x, inputs.ids, M, E, use_fp8=False, **options)


@ranks4
@pytest.mark.parametrize("how", ["at once", "zero_copy", "out", "asynchronous"])
@pytest.mark.parametrize("case", ["low_latency_uneven", "low_latency_empty_rank"])
def test_low_latency_combine_equals_the_recording(case: str, how: str) -> None:
    recorded = CASES[case][dist.get_rank()]
    inputs, buffer = inputs_of(recorded, LL_H), low_latency_buffer()
    recv_x, _, handle, event, _ = dispatch_bf16(buffer, inputs, async_finish=how == "asynchronous")
    if how == "asynchronous":
        assert recv_x.isnan().all()
        event.current_stream_wait()
    y, options = experts(recv_x), {}
    if how == "zero_copy":
        place = buffer.get_next_low_latency_combine_buffer(handle)
        assert place.stride() == (4 * M * 2080, 2080, 1)
        place.copy_(y)
        y, options = torch.full_like(y, float("nan")), {"zero_copy": True}
    elif how == "out":
        # Memory of what is sent: it has left before it is written.
        options = {"out": y.flatten()[: inputs.x.numel()].view(inputs.x.shape)}
    elif how == "asynchronous":
        options = {"async_finish": True}
    combined_x, event, hook = buffer.low_latency_combine(
        y, inputs.ids, inputs.weights, handle, **options
    )
    assert hook is None
    if how == "asynchronous":
        assert combined_x.isnan().all()
        event.current_stream_wait()
    agrees(combined_x, recorded["bf16"]["combine_of_row_times_1_plus_global_expert"])
    assert "out" not in options or combined_x is options["out"]


@ranks4
def test_nothing_is_there_before_the_hook() -> None:
    recorded = CASES["low_latency_uneven"][dist.get_rank()]
    inputs, buffer = inputs_of(recorded, LL_H), low_latency_buffer()
    recv_x, count, handle, event, hook = dispatch_bf16(buffer, inputs, return_recv_hook=True)
    assert event.event is None
    assert recv_x.isnan().all()
    assert (count == UNDEFINED_INT32).all()
    with refused("handle is undefined"):
        buffer.low_latency_combine(recv_x, inputs.ids, inputs.weights, handle)
    hook()
    assert count.tolist() == recorded["bf16"]["recv_count"]
    with refused("received twice"):
        hook()
    combined_x, _, hook = buffer.low_latency_combine(
        experts(recv_x), inputs.ids, inputs.weights, handle, return_recv_hook=True
    )
    assert combined_x.isnan().all()
    assert hook is not None
    hook()
    agrees(combined_x, recorded["bf16"]["combine_of_row_times_1_plus_global_expert"])
    with refused("received twice"):
        hook()


@ranks4
def test_hooks_may_be_called_in_any_order_on_each_rank() -> None:
    recorded = CASES["low_latency_uneven"][dist.get_rank()]
    inputs, buffer = inputs_of(recorded, LL_H), low_latency_buffer()
    results = [dispatch_bf16(buffer, inputs, return_recv_hook=True) for _ in range(2)]
    for place in (0, 1) if dist.get_rank() % 2 else (1, 0):
        results[place][-1]()
    for recv_x, _, handle, _, _ in results:
        combined_x, _, _ = buffer.low_latency_combine(
            experts(recv_x), inputs.ids, inputs.weights, handle
        )
        agrees(combined_x, recorded["bf16"]["combine_of_row_times_1_plus_global_expert"])


@ranks4
def test_a_third_dispatch_overwrites_the_first_result() -> None:
    inputs = inputs_of(CASES["low_latency_uneven"][dist.get_rank()], LL_H)
    buffer = low_latency_buffer()
    first = buffer.low_latency_dispatch(inputs.x, inputs.ids, M, E)
    second = dispatch_bf16(buffer, inputs, return_recv_hook=True)
    assert first[1].sum() < 4 * M
    third = dispatch_bf16(buffer, inputs)
    assert isinstance(first[0], tuple)
    assert first[0][0].float().isnan().all()
    assert first[0][1].isnan().all()
    assert (first[1] == UNDEFINED_INT32).all()
    with refused("handle is undefined"):
        buffer.low_latency_combine(third[0], inputs.ids, inputs.weights, first[2])
    fourth = dispatch_bf16(buffer, inputs)
    with refused("overwritten by a third dispatch"):
        second[-1]()
    # A combined result takes no place.
    buffer.low_latency_combine(third[0], inputs.ids, inputs.weights, third[2])
    dispatch_bf16(buffer, inputs)
    assert fourth[1].tolist() == third[1].tolist()


@ranks4
def test_the_order_of_sources_differs_between_calls_and_repeats_in_a_new_buffer() -> None:
    inputs = inputs_of(CASES["low_latency_uneven"][dist.get_rank()], LL_H)

    def orders() -> list[list[int]]:
        buffer = low_latency_buffer()
        return [dispatch_bf16(buffer, inputs)[2][1].flatten().tolist() for _ in range(4)]

    once = orders()
    assert len({str(order) for order in once}) > 1
    assert orders() == once


@ranks4
def test_normal_kernels_soil_the_buffer_and_other_sizes_need_a_clean_one() -> None:
    inputs = inputs_of(CASES["low_latency_uneven"][dist.get_rank()], LL_H)
    buffer = low_latency_buffer(num_nvl_bytes=1 << 28)
    dispatch_normal(buffer, inputs)
    with refused("call clean_low_latency_buffer"):
        dispatch_bf16(buffer, inputs)
    buffer.clean_low_latency_buffer(M, LL_H, E)
    _, _, handle, _, _ = dispatch_bf16(buffer, inputs)
    with refused(r"max_tokens=8.*max_tokens=16"):
        buffer.low_latency_dispatch(inputs.x, inputs.ids, 8, E)
    buffer.clean_low_latency_buffer(8, LL_H, E)
    buffer.low_latency_dispatch(inputs.x, inputs.ids, 8, E)
    with refused("M, H, E differ"):
        buffer.clean_low_latency_buffer(8 + 4 * (dist.get_rank() == 0), LL_H, E)
    rows = torch.zeros(2, 4 * M, LL_H, dtype=torch.bfloat16)
    with refused("max_tokens=16"):
        buffer.low_latency_combine(rows, inputs.ids, inputs.weights, handle)


@ranks4
def test_low_latency_refuses_what_the_real_one_refuses() -> None:
    inputs = inputs_of(CASES["low_latency_uneven"][dist.get_rank()], LL_H)
    buffer = low_latency_buffer()

    def dispatch(
        x: Tensor | None = None, ids: Tensor | None = None, m: int = M, e: int = E, **options: Any
    ) -> None:
        x, ids = inputs.x if x is None else x, inputs.ids if ids is None else ids
        buffer.low_latency_dispatch(x, ids, m, e, **options)

    num_tokens = inputs.x.shape[0]
    with refused("kBFloat16"):
        dispatch(inputs.x.float())
    with refused("x.size.1. % 128"):
        dispatch(inputs.x[:, :64].contiguous())
    with refused("Unsupported hidden"):
        dispatch(inputs.x[:, :1024].contiguous())
    with refused("hidden % 512"):
        dispatch(inputs.x[:, :1152].contiguous())
    with refused("topk_idx_t"):
        dispatch(ids=inputs.ids.int())
    with refused("kNumMaxTopK"):
        dispatch(ids=torch.zeros(num_tokens, 12, dtype=torch.int64))
    with refused("x.size.0. == topk_idx"):
        dispatch(ids=torch.zeros(num_tokens + 1, K, dtype=torch.int64))
    with refused("num_experts % num_ranks"):
        dispatch(e=10)
    with refused("x.size.0. <= num_max"):
        dispatch(torch.zeros(20, LL_H, dtype=torch.bfloat16), torch.zeros(20, K).long())
    with refused("nvshmem_qp_depth"):
        dispatch(m=512)
    with refused("total_bytes <= num_rdma_bytes"):
        dispatch(m=32)
    with refused("round_scale=True"):
        dispatch(use_ue8m0=True)
    with refused("async and return_recv_hook"):
        dispatch(async_finish=True, return_recv_hook=True)
    with refused("stats"):
        dispatch(cumulative_local_expert_recv_stats=torch.zeros(2))
    recv_x, _, handle, _, _ = dispatch_bf16(buffer, inputs)

    def combine(x: Tensor, weights: Tensor = inputs.weights, **options: Any) -> None:
        buffer.low_latency_combine(x, inputs.ids, weights, handle, **options)

    with refused("kBFloat16"):
        combine(recv_x.float())
    with refused("x.size.1. == num_ranks"):
        combine(recv_x[:, 4:].contiguous())
    with refused("kFloat32"):
        combine(recv_x, inputs.weights.double())
    with refused("zero_copy and use_logfmt"):
        combine(recv_x, use_logfmt=True, zero_copy=True)
    with refused("out->size"):
        combine(recv_x, out=recv_x[0])
    with refused("async and return_recv_hook"):
        combine(recv_x, async_finish=True, return_recv_hook=True)
    with refused("Shrink mode"):
        buffer.low_latency_clean_mask_buffer()


@ranks4
def test_limits_may_be_switched_off() -> None:
    rank = dist.get_rank()
    with limits_off():
        buffer = Buffer(world(), low_latency_mode=True)
        x = torch.full((3, 40), rank + 1.0, dtype=torch.bfloat16)
        ids = torch.tensor([[rank, 3], [0, -1], [-1, -1]])
        (recv_x, scales), count, handle, _, _ = buffer.low_latency_dispatch(
            x, ids, 3, 4, round_scale=True, use_ue8m0=True
        )
        assert isinstance(recv_x, Tensor)
        assert scales.shape == (1, 12, 1)
        num_rows = int(count[0])
        # Rank 3 names its own expert twice and sends it two copies.
        assert num_rows == 1 + 4 * (rank in (0, 3))
        with pytest.raises(RuntimeError, match="kFloat32"):
            buffer.low_latency_combine(
                torch.zeros(1, 12, 40, dtype=torch.bfloat16), ids, ids, handle
            )
        normal = Buffer(world())
        inputs = Inputs(x[:, :5].contiguous(), ids, torch.ones(3, 2))
        per_rank, _, per_expert, is_in_rank, _ = normal.get_dispatch_layout(ids, 4)
        rows, *_, made, _ = normal.dispatch(
            inputs.x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
        )
        assert isinstance(rows, Tensor)
        assert made is not None
        combined_x, _, _ = normal.combine(rows, made)
        assert torch.equal(combined_x, inputs.x * is_in_rank.sum(1, keepdim=True))


@ranks4
def test_masks_are_kept_and_refused() -> None:
    num_bytes = Buffer.get_low_latency_rdma_size_hint(M, LL_H, 4, E)
    buffer = Buffer(world(), 0, num_bytes, low_latency_mode=True, enable_shrink=True)
    buffer.low_latency_update_mask_buffer(2, True)
    status = torch.full((4,), -1, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0, 0, 1, 0]
    inputs = inputs_of(CASES["low_latency_uneven"][dist.get_rank()], LL_H)
    with refused("masked rank"):
        dispatch_bf16(buffer, inputs)
    buffer.low_latency_clean_mask_buffer()
    dispatch_bf16(buffer, inputs)
