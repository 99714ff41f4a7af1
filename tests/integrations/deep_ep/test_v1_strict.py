"""The drop-in for V1 in strict mode: recording, undefined memory, hooks, lifetimes, refusals."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from epcomm import ConfigError
from epcomm.testing.poison import poisoned_memory
from fakes.deep_ep.limits import limits_off
from fakes.deep_ep.strict_v1 import Buffer, Config, EventOverlap
from tests.integrations.deep_ep.devices import here, on_gpus
from tests.integrations.deep_ep.v1_ranks import (
    LL_H,
    NVL_BYTES,
    UNDEFINED_INT32,
    E,
    H,
    Inputs,
    K,
    M,
    agrees,
    check_along,
    check_dispatch,
    check_slabs,
    dispatch_low_latency,
    dispatch_normal,
    experts,
    inputs_of,
    low_latency_buffer,
    normal_buffer,
    recorded_case,
    recorded_fp8,
    recorded_sms,
    refused,
    world,
)

pytestmark = pytest.mark.ranks(4)
__all__ = ["recorded_sms"]

in_both_normal_cases = pytest.mark.parametrize("case", ["normal_uneven", "normal_empty_rank"])


@in_both_normal_cases
def test_layout_equals_the_recording(case: str) -> None:
    recorded, inputs = recorded_case(case)["layout"], inputs_of(case, H)
    layout = normal_buffer().get_dispatch_layout(inputs.ids, E)
    per_rank, per_rdma_rank, per_expert, is_in_rank, event = layout
    agrees(per_rank, recorded["num_tokens_per_rank"])
    agrees(per_expert, recorded["num_tokens_per_expert"])
    agrees(is_in_rank, recorded["is_token_in_rank"])
    assert per_rdma_rank is None
    assert event.event is None


@in_both_normal_cases
@pytest.mark.parametrize("alignment", [1, 16])
def test_dispatch_equals_the_recording(case: str, alignment: int) -> None:
    recorded = recorded_case(case)[f"dispatch_alignment_{alignment}"]
    received = dispatch_normal(normal_buffer(), inputs_of(case, H), expert_alignment=alignment)
    check_dispatch(received, recorded)
    kinds = [[str(part.dtype), list(part.shape)] for part in received.handle]
    assert kinds == [[f"torch.{dtype}", shape] for dtype, shape in recorded["handle_types"]]


@in_both_normal_cases
def test_combine_and_cached_dispatch_equal_the_recording(case: str) -> None:
    inputs, buffer = inputs_of(case, H), normal_buffer()
    check_along(buffer, inputs, dispatch_normal(buffer, inputs), recorded_case(case))


@in_both_normal_cases
def test_worst_case_rows_are_undefined_but_for_their_ids(case: str) -> None:
    recorded = recorded_case(case)["num_worst_tokens_32"]
    inputs, buffer = inputs_of(case, H), normal_buffer()
    received = dispatch_normal(buffer, inputs, num_worst_tokens=32)
    assert list(received.x.shape) == recorded["recv_x_shape"]
    num_rows = recorded["first_rows"]["shape"][0]
    agrees(received.x[:num_rows], recorded["first_rows"])
    agrees(received.ids, recorded["recv_topk_idx"])
    assert received.counts == recorded["counts"]
    assert received.x[num_rows:].isnan().all()
    assert received.weights[num_rows:].isnan().all()
    assert received.weights[:num_rows].isfinite().all()
    assert received.handle[3].shape == (32,)
    combined_x, _, _ = buffer.combine(received.x, received.handle)
    assert combined_x.isfinite().all()
    if not on_gpus():
        # On GPUs the host does not wait for other ranks; test_v1_nvlink.py has these cases.
        with refused("num_worst_tokens = 5"):
            dispatch_normal(buffer, inputs, num_worst_tokens=5)


@pytest.mark.parametrize(
    ("case", "order"), [("normal_uneven", "rows"), ("normal_empty_rank", "columns")]
)
def test_fp8_rows_take_their_scales_along(case: str, order: str) -> None:
    recorded = recorded_case(case)["fp8_tuple"]
    inputs, buffer = inputs_of(case, H), normal_buffer()
    x, scales = recorded_fp8(inputs)
    if order == "columns":
        scales = scales.T.contiguous().T
    received = dispatch_normal(buffer, inputs, (x, scales))
    agrees(received.x, recorded["recv_x"])
    agrees(received.scales, recorded["recv_scales"])
    packed = dispatch_normal(buffer, inputs, (x, scales.int()), num_worst_tokens=32)
    num_rows = received.x.shape[0]
    assert packed.scales.dtype == torch.int32
    assert (packed.x[num_rows:].view(torch.uint8) == 0x7F).all()
    assert (packed.scales[num_rows:] == UNDEFINED_INT32).all()


def test_asynchronous_results_are_undefined_before_the_wait() -> None:
    inputs, buffer = inputs_of("normal_uneven", H), normal_buffer()
    per_rank, *_, event = buffer.get_dispatch_layout(
        inputs.ids, E, Buffer.capture(), async_finish=True, allocate_on_comm_stream=True
    )
    assert (per_rank == UNDEFINED_INT32).all()
    with event:
        pass
    assert (per_rank <= inputs.x.shape[0]).all()
    received = dispatch_normal(buffer, inputs, async_finish=True)
    assert received.x.isnan().all()
    assert (received.handle[0] == UNDEFINED_INT32).all()
    received.event.current_stream_wait()
    bias = torch.ones_like(inputs.x)
    combined_x, _, event = buffer.combine(
        received.x, received.handle, bias=(bias, bias), async_finish=True
    )
    assert combined_x.isnan().all()
    event.current_stream_wait()
    num_copies = received.handle[4].sum(1, keepdim=True)
    assert torch.equal(combined_x.float(), inputs.x.float() * num_copies + 2)
    with pytest.raises(AssertionError):
        EventOverlap().current_stream_wait()


@pytest.mark.parametrize("num_biases", [1, 2])
def test_biases_and_rows_of_all_ranks_are_rounded_once(num_biases: int) -> None:
    inputs, buffer = inputs_of("normal_uneven", H), normal_buffer()
    generator = torch.Generator().manual_seed(dist.get_rank())
    x, *biases = torch.randn(3, *inputs.x.shape, generator=generator).to(inputs.x).unbind(0)
    biases = biases[:num_biases]
    received = dispatch_normal(buffer, inputs, x)
    rows = (received.x.float() * (dist.get_rank() + 1) / 7).bfloat16()
    given = biases[0] if num_biases == 1 else (biases[0], biases[1])
    combined_x, weights, _ = buffer.combine(rows, received.handle, received.weights, bias=given)
    total = torch.stack(biases).float().sum(0)
    for rank in range(4):
        is_sent = (inputs.ids // 2 == rank).any(1, keepdim=True)
        total += torch.where(is_sent, (x.float() * (rank + 1) / 7).bfloat16().float(), 0.0)
    assert torch.equal(combined_x, total.bfloat16())
    assert torch.equal(weights, inputs.weights.masked_fill(inputs.ids < 0, 0))


def test_normal_dispatch_refuses_what_the_real_one_refuses() -> None:
    inputs, buffer = inputs_of("normal_uneven", H), normal_buffer()
    for rule, x in (
        (r"x.size\(1\) \* x.element_size", inputs.x[:, :4].contiguous()),
        ("x.is_contiguous", inputs.x.repeat(1, 2)[:, ::2]),
        ("x is bfloat16", inputs.x.float()),
        ("element_size", (inputs.x, inputs.weights.new_ones(len(inputs.x), 2))),
    ):
        with refused(rule):
            dispatch_normal(buffer, inputs, x)
    with refused("previous_event"):
        dispatch_normal(buffer, inputs, allocate_on_comm_stream=True, async_finish=True)
    with refused("queues <= num_nvl_bytes"):
        dispatch_normal(Buffer(world(), num_nvl_bytes=1 << 10), inputs)
    with pytest.raises(AssertionError):
        buffer.dispatch(inputs.x)
    with refused("topk_idx_t"):
        buffer.get_dispatch_layout(inputs.ids.int(), E)
    with refused("topk_idx < num_experts"):
        buffer.get_dispatch_layout(inputs.ids + E, E)
    with poisoned_memory(), refused("do not fill"):
        dispatch_normal(buffer, inputs)


@pytest.mark.parametrize(
    ("ids_have_memory", "weights_have_memory"), [(False, False), (True, True), (True, False)]
)
def test_ids_and_weights_without_tokens_have_both_a_pointer_or_neither(
    ids_have_memory: bool, weights_have_memory: bool
) -> None:
    # A slice without rows keeps the pointer of its tensor; a new tensor without rows has none.
    inputs = Inputs(
        torch.zeros(0, H, dtype=torch.bfloat16, device=here()),
        torch.zeros(int(ids_have_memory), K, dtype=torch.int64, device=here())[:0],
        torch.zeros(int(weights_have_memory), K, device=here())[:0],
    )
    buffer = normal_buffer()
    if ids_have_memory == weights_have_memory:
        assert dispatch_normal(buffer, inputs).x.shape == (0, H)
        return
    with refused(r"\(topk_idx == nullptr\) == \(topk_weights == nullptr\)"):
        dispatch_normal(buffer, inputs)


def test_normal_combine_refuses_what_the_real_one_refuses() -> None:
    inputs, buffer = inputs_of("normal_uneven", H), normal_buffer()
    received = dispatch_normal(buffer, inputs)
    rows, handle = torch.zeros_like(received.x), received.handle
    faults: list[tuple[str, dict[str, Any]]] = [
        ("x is bfloat16", {"x": rows.float()}),
        ("src_idx.size", {"x": rows[1:]}),
        ("topk_weights is float32", {"topk_weights": received.weights.double()}),
        ("== num_channels", {"config": Config(6)}),
        ("bias.size", {"bias": rows.repeat(2, 1)}),
    ]
    for rule, changes in faults:
        with refused(rule):
            buffer.combine(**{"x": rows, "handle": handle, **changes})
    with refused("one host"):
        buffer.internode_combine(rows, handle)


def test_construction_and_modes_refuse_what_the_real_ones_refuse() -> None:
    buffer = normal_buffer()
    with refused("low_latency_mode"):
        buffer.clean_low_latency_buffer(M, LL_H, E)
    with refused("low_latency_mode"):
        Buffer(world(), num_rdma_bytes=1 << 10)
    with refused("NUM_BUFFER_ALIGNMENT_BYTES"):
        Buffer(world(), num_nvl_bytes=100)
    with pytest.raises(ValueError, match="'group' or 'comm'"):
        Buffer(None)
    with pytest.raises(AssertionError, match="explicitly_destroy"):
        buffer.destroy()
    destroyed = Buffer(world(), NVL_BYTES, explicitly_destroy=True)
    destroyed.destroy()
    with refused("destroyed"):
        destroyed.get_dispatch_layout(torch.zeros(1, K, dtype=torch.int64, device=here()), E)


def test_limits_may_be_switched_off() -> None:
    with limits_off(), poisoned_memory():
        buffer = Buffer(world())
        x = torch.full((3, 5), dist.get_rank() + 1.0, dtype=torch.bfloat16, device=here())
        ids = torch.tensor([[dist.get_rank(), 3], [0, -1], [-1, -1]], device=here())
        per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(ids, 4)
        rows, ids, *_, handle, _ = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
        )
        assert ids is None
        combined_x, _, _ = buffer.combine(rows, handle)
    assert torch.equal(combined_x, x * is_in_rank.sum(1, keepdim=True))


BF16: dict[str, Any] = {"use_fp8": False}
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": BF16,
    "fp8": {},
    "fp8_ue8m0": {"round_scale": True, "use_ue8m0": True},
}
COMBINED = "combine_of_row_times_1_plus_global_expert"

in_both_low_latency_cases = pytest.mark.parametrize(
    "case", ["low_latency_uneven", "low_latency_empty_rank"]
)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("low_latency_uneven", "bf16"),
        ("low_latency_uneven", "fp8"),
        ("low_latency_empty_rank", "fp8_ue8m0"),
    ],
)
def test_dispatch_equals_the_recording_but_for_the_order(case: str, name: str) -> None:
    recorded, inputs = recorded_case(case)[name], inputs_of(case, LL_H)
    stats = torch.zeros(2, dtype=torch.int32, device=here())
    options = {**FORMATS[name], "cumulative_local_expert_recv_stats": stats}
    received = dispatch_low_latency(low_latency_buffer(), inputs, **options)
    assert received.hook is None
    check_slabs(received, recorded)
    assert stats.tolist() == recorded["stats"]
    # Everything after the rows is undefined.
    for expert, num_rows in enumerate(recorded["recv_count"]):
        assert received.x[expert, num_rows:].float().isnan().all()
        assert (received.handle[0][expert, num_rows:] == UNDEFINED_INT32).all()
        if received.scales is not None:
            beyond = received.scales[expert, num_rows:]
            assert (beyond.isnan() if name == "fp8" else beyond == UNDEFINED_INT32).all()


@in_both_low_latency_cases
def test_combine_equals_the_recording(case: str) -> None:
    recorded, inputs = recorded_case(case)["bf16"], inputs_of(case, LL_H)
    buffer = low_latency_buffer()
    received = dispatch_low_latency(buffer, inputs, use_fp8=False, async_finish=True)
    assert received.x.isnan().all()
    received.event.current_stream_wait()
    combined_x, event, hook = buffer.low_latency_combine(
        experts(received.x), inputs.ids, inputs.weights, received.handle, async_finish=True
    )
    assert hook is None
    assert combined_x.isnan().all()
    event.current_stream_wait()
    agrees(combined_x, recorded[COMBINED])


@in_both_low_latency_cases
def test_zero_copy_sends_the_next_buffer(case: str) -> None:
    recorded, inputs = recorded_case(case)["bf16"], inputs_of(case, LL_H)
    buffer = low_latency_buffer()
    received = dispatch_low_latency(buffer, inputs, **BF16)
    place = buffer.get_next_low_latency_combine_buffer(received.handle)
    # A row of a message is 2 * 2048 bytes and 4 * 16 more.
    assert place.stride() == (4 * M * 2080, 2080, 1)
    place.copy_(experts(received.x))
    ignored = torch.full_like(received.x, float("nan"))
    combined_x, _, _ = buffer.low_latency_combine(
        ignored, inputs.ids, inputs.weights, received.handle, zero_copy=True
    )
    agrees(combined_x, recorded[COMBINED])
    assert place.isnan().all()


@in_both_low_latency_cases
def test_out_may_be_memory_of_what_is_sent(case: str) -> None:
    recorded, inputs = recorded_case(case)["bf16"], inputs_of(case, LL_H)
    buffer = low_latency_buffer()
    received = dispatch_low_latency(buffer, inputs, **BF16)
    y = experts(received.x)
    out = y.flatten()[: inputs.x.numel()].view(inputs.x.shape)
    combined_x, _, _ = buffer.low_latency_combine(
        y, inputs.ids, inputs.weights, received.handle, out=out
    )
    assert combined_x is out
    agrees(out, recorded[COMBINED])


def test_nothing_is_there_before_the_hook() -> None:
    recorded = recorded_case("low_latency_uneven")["bf16"]
    inputs, buffer = inputs_of("low_latency_uneven", LL_H), low_latency_buffer()
    received = dispatch_low_latency(buffer, inputs, use_fp8=False, return_recv_hook=True)
    assert received.event.event is None
    assert received.x.isnan().all()
    assert (received.count == UNDEFINED_INT32).all()
    with refused("handle is undefined"):
        buffer.low_latency_combine(received.x, inputs.ids, inputs.weights, received.handle)
    received.receive()
    assert received.count.tolist() == recorded["recv_count"]
    with refused("called twice|already completed"):
        received.receive()
    combined_x, _, hook = buffer.low_latency_combine(
        experts(received.x), inputs.ids, inputs.weights, received.handle, return_recv_hook=True
    )
    assert combined_x.isnan().all()
    hook()
    agrees(combined_x, recorded[COMBINED])
    with refused("called twice|already completed"):
        hook()


def test_a_send_waits_for_nobody_and_a_hook_for_the_late_rank() -> None:
    recorded = recorded_case("low_latency_uneven")["bf16"]
    inputs, buffer = inputs_of("low_latency_uneven", LL_H), low_latency_buffer()
    # The first call finds that all ranks have the same sizes, so it does wait.
    dispatch_low_latency(buffer, inputs, **BF16)
    store, rank = world().get_group_store(), dist.get_rank()
    if rank == 0:
        # This loop would not end if a dispatch of the others waited for this rank.
        store.wait([f"has sent {other}" for other in (1, 2, 3)])
    received = dispatch_low_latency(buffer, inputs, use_fp8=False, return_recv_hook=True)
    store.set(f"has sent {rank}", "1")
    received.receive()
    assert received.count.tolist() == recorded["recv_count"]


def test_a_send_clears_the_counts_of_a_call_that_is_not_received() -> None:
    inputs, buffer = inputs_of("low_latency_uneven", LL_H), low_latency_buffer()
    first = dispatch_low_latency(buffer, inputs, use_fp8=False, return_recv_hook=True)
    with refused("the call before is not received"):
        dispatch_low_latency(buffer, inputs, **BF16)
    first.receive()
    second = dispatch_low_latency(buffer, inputs, **BF16)
    args = (inputs.ids, inputs.weights)
    _, _, hook = buffer.low_latency_combine(
        experts(first.x), *args, first.handle, return_recv_hook=True
    )
    with refused("the call before is not received"):
        buffer.low_latency_combine(experts(second.x), *args, second.handle)
    hook()
    buffer.low_latency_combine(experts(second.x), *args, second.handle)


def test_a_third_dispatch_overwrites_the_first_result() -> None:
    inputs, buffer = inputs_of("low_latency_uneven", LL_H), low_latency_buffer()
    first = dispatch_low_latency(buffer, inputs)
    dispatch_low_latency(buffer, inputs, **BF16)
    assert first.count.sum() < 4 * M
    third = dispatch_low_latency(buffer, inputs, **BF16)
    assert first.x.float().isnan().all()
    assert first.scales.isnan().all()
    assert (first.count == UNDEFINED_INT32).all()
    with refused("handle is undefined"):
        buffer.low_latency_combine(third.x, inputs.ids, inputs.weights, first.handle)


def test_the_order_of_sources_differs_between_calls_and_repeats_in_a_new_buffer() -> None:
    inputs = inputs_of("low_latency_uneven", LL_H)

    def orders() -> list[list[int]]:
        buffer = low_latency_buffer()
        results = [dispatch_low_latency(buffer, inputs, **BF16) for _ in range(2)]
        results += [dispatch_low_latency(low_latency_buffer(), inputs, **BF16)]
        return [result.handle[1].flatten().tolist() for result in results]

    first, second, of_new_buffer = orders()
    assert first != second
    assert first == of_new_buffer


def test_normal_kernels_soil_the_buffer() -> None:
    inputs = inputs_of("low_latency_uneven", LL_H)
    buffer = low_latency_buffer(num_nvl_bytes=1 << 28)
    dispatch_normal(buffer, inputs)
    with refused("call clean_low_latency_buffer"):
        dispatch_low_latency(buffer, inputs)
    buffer.clean_low_latency_buffer(M, LL_H, E)
    dispatch_low_latency(buffer, inputs)


def test_other_sizes_need_a_clean_buffer() -> None:
    inputs, buffer = inputs_of("low_latency_uneven", LL_H), low_latency_buffer()
    handle = dispatch_low_latency(buffer, inputs).handle
    with refused(r"max_tokens=8.*max_tokens=16"):
        buffer.low_latency_dispatch(inputs.x, inputs.ids, 8, E)
    buffer.clean_low_latency_buffer(8, LL_H, E)
    buffer.low_latency_dispatch(inputs.x, inputs.ids, 8, E)
    rows = torch.zeros(2, 4 * M, LL_H, dtype=torch.bfloat16, device=here())
    with refused("max_tokens=16"):
        buffer.low_latency_combine(rows, inputs.ids, inputs.weights, handle)
    with refused("M, H, E differ"):
        buffer.clean_low_latency_buffer(8 + 4 * (dist.get_rank() == 0), LL_H, E)


def test_low_latency_dispatch_refuses_what_the_real_one_refuses() -> None:
    inputs, buffer = inputs_of("low_latency_uneven", LL_H), low_latency_buffer()
    x, ids = inputs.x, inputs.ids
    num_tokens = x.shape[0]

    def columns(num_columns: int) -> Tensor:
        return x[:, :num_columns].contiguous()

    many_ids = ids.new_zeros(num_tokens, 12)
    faults = [
        ("kBFloat16", x.float(), ids, M, E),
        ("x.is_contiguous", x.repeat(1, 2)[:, ::2], ids, M, E),
        (r"x.size\(1\) % 128", columns(64), ids, M, E),
        ("hidden % 512", columns(1152), ids, M, E),
        ("Unsupported hidden", columns(1024), ids, M, E),
        ("topk_idx_t", x, ids.int(), M, E),
        ("topk_idx < num_experts", x, ids + E, M, E),
        ("kNumMaxTopK", x, many_ids, M, E),
        (r"x.size\(0\) == topk_idx", x, ids.new_zeros(num_tokens + 1, K), M, E),
        (r"x.size\(0\) <= num_max", x.new_zeros(20, LL_H), ids.new_zeros(20, K), M, E),
        ("num_experts % num_ranks", x, ids, M, 10),
        ("nvshmem_qp_depth", x, ids, 512, E),
        ("total_bytes <= num_rdma_bytes", x, ids, 32, E),
    ]
    for rule, rows, chosen, max_tokens, num_experts in faults:
        with refused(rule):
            buffer.low_latency_dispatch(rows, chosen, max_tokens, num_experts)
    with refused("round_scale=True"):
        dispatch_low_latency(buffer, inputs, use_ue8m0=True)
    with refused("async and return_recv_hook"):
        dispatch_low_latency(buffer, inputs, async_finish=True, return_recv_hook=True)
    with refused("stats"):
        stats = torch.zeros(2, device=here())
        dispatch_low_latency(buffer, inputs, cumulative_local_expert_recv_stats=stats)


def test_low_latency_combine_refuses_what_the_real_one_refuses() -> None:
    inputs, buffer = inputs_of("low_latency_uneven", LL_H), low_latency_buffer()
    received = dispatch_low_latency(buffer, inputs, **BF16)
    right = {
        "x": received.x,
        "topk_idx": inputs.ids,
        "topk_weights": inputs.weights,
        "handle": received.handle,
    }
    faults: list[tuple[str, dict[str, Any]]] = [
        ("kBFloat16", {"x": received.x.float()}),
        (r"x.size\(1\) == num_ranks", {"x": received.x[:, 4:].contiguous()}),
        ("kFloat32", {"topk_weights": inputs.weights.double()}),
        ("zero_copy and use_logfmt", {"use_logfmt": True, "zero_copy": True}),
        ("out->size", {"out": received.x[0]}),
        ("async and return_recv_hook", {"async_finish": True, "return_recv_hook": True}),
    ]
    for rule, changes in faults:
        with refused(rule):
            buffer.low_latency_combine(**(right | changes))


def test_masks_are_kept_and_masked_ranks_refused() -> None:
    inputs = inputs_of("low_latency_uneven", LL_H)
    with pytest.raises(ConfigError, match="enable_shrink=True"):
        low_latency_buffer().low_latency_clean_mask_buffer()
    buffer = low_latency_buffer(enable_shrink=True)
    dispatch_low_latency(buffer, inputs)
    buffer.low_latency_update_mask_buffer(2, True)
    status = torch.full((4,), -1, dtype=torch.int32, device=here())
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0, 0, 1, 0]
    if not on_gpus():
        with refused("expected buffers over NVLink"):
            buffer.low_latency_dispatch(inputs.x, inputs.ids, M, E)
    buffer.low_latency_clean_mask_buffer()
