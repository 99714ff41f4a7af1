"""The calls of vLLM, SGLang and later Megatrons, with their arguments, in their order.

Their packages do not import without a GPU. Source: the wheels vllm 0.33.0 and sglang 0.5.23, and
Megatron-LM's branch dev, in the modules that the tests are named after.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from epcomm.integrations.deep_ep import Buffer, Config, ElasticBuffer, EPHandle
from tests.integrations.deep_ep.clients.batches import HIDDEN, NUM_EXPERTS, TOP_K, Batch
from tests.integrations.deep_ep.devices import here
from tests.integrations.deep_ep.v2_ranks import world

NUM_RANKS = 2
NUM_LOCAL = NUM_EXPERTS // NUM_RANKS
MAX_TOKENS = 16

# Each engine is a whole call sequence: make test has no room for them.
pytestmark = [pytest.mark.ranks(NUM_RANKS), pytest.mark.slow]


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def batch_of_rank() -> Batch:
    return Batch.of_rank(3 + 2 * dist.get_rank())


def first_expert() -> int:
    return NUM_LOCAL * dist.get_rank()


def factors_of_rank() -> Tensor:
    """Return the factor of each expert of this rank, [L]."""
    return 1.0 + first_expert() + torch.arange(NUM_LOCAL, device=here())


def as_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise small integers: their codes are exact, and every scale is a half."""
    return (2 * x).to(torch.float8_e4m3fn), torch.full((len(x), 1), 0.5, device=x.device)


def experts_of_rows(rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Weigh the results of the experts of each row, ids [R, K] of this rank or -1."""
    factors = torch.where(ids >= 0, 1.0 + ids + first_expert(), 0.0)
    weights = torch.where(ids >= 0, weights, 0.0)
    return (rows.float() * (factors * weights).sum(1, keepdim=True)).bfloat16()


def experts_of_segments(rows: Tensor, weights: Tensor, handle: EPHandle) -> Tensor:
    """Weigh the results of rows that are sorted by expert; gaps between experts stay undefined."""
    results = torch.full_like(rows, float("nan"), dtype=torch.bfloat16)
    ends = handle.psum_num_recv_tokens_per_expert
    for local, (end, count) in enumerate(
        zip(ends.tolist(), handle.num_unaligned_recv_tokens_per_expert.tolist(), strict=True)
    ):
        part = slice(end - count, end)
        factors = (1.0 + local + first_expert()) * weights[part]
        results[part] = (rows[part].float() * factors.unsqueeze(1)).bfloat16()
    return results


def elastic_buffer(*, use_fp8_dispatch: bool) -> ElasticBuffer:
    return ElasticBuffer(
        group=world(),
        num_max_tokens_per_rank=MAX_TOKENS,
        hidden=HIDDEN,
        num_topk=TOP_K,
        use_fp8_dispatch=use_fp8_dispatch,
        allow_hybrid_mode=False,
        prefer_overlap_with_compute=True,
        allow_multiple_reduction=False,
        explicitly_destroy=True,
    )


Options = dict[str, Any]


def routes_of(batch: Batch) -> Options:
    """Return the arguments of an elastic dispatch that every engine passes by name."""
    own = {"topk_idx": batch.ids, "topk_weights": batch.weights}
    return own | {"num_experts": NUM_EXPERTS}


def check_normal(
    buffer: Buffer, *, layout: Options, dispatch: Options, combine: Options
) -> list[int]:
    """Make the calls of normal mode as an engine makes them; return the counts."""
    batch = batch_of_rank()
    per_rank, per_rdma_rank, per_expert, is_in_rank, event = buffer.get_dispatch_layout(
        topk_idx=batch.ids, num_experts=NUM_EXPERTS, previous_event=Buffer.capture(), **layout
    )
    (codes, scales), ids, weights, counts, handle, event = buffer.dispatch(
        as_fp8(batch.x),
        topk_idx=batch.ids,
        topk_weights=batch.weights,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_rdma_rank,
        is_token_in_rank=is_in_rank,
        num_tokens_per_expert=per_expert,
        previous_event=event,
        async_finish=True,
        **dispatch,
    )
    event.current_stream_wait()
    assert counts is not None
    results = experts_of_rows(codes.float() * scales, ids, weights)
    y, _, event = buffer.combine(x=results, handle=handle, async_finish=True, **combine)
    event.current_stream_wait()
    batch.check(y)
    return counts


def check_low_latency(
    buffer: Buffer, *, in_flight: int, dispatch: Options, combine: Options
) -> None:
    """Make the calls of low latency as an engine makes them, batches in flight."""
    batch, factors = batch_of_rank(), factors_of_rank()
    sent = [
        buffer.low_latency_dispatch(
            batch.x, batch.ids, MAX_TOKENS, NUM_EXPERTS, return_recv_hook=True, **dispatch
        )
        for _ in range(in_flight)
    ]
    for rows, counts, handle, _, hook in sent:
        hook()
        assert isinstance(rows, Tensor)
        is_row = torch.arange(rows.shape[1], device=here()) < counts.unsqueeze(1)
        results = torch.where(is_row.unsqueeze(2), rows * factors.view(-1, 1, 1), float("nan"))
        y, _, hook = buffer.low_latency_combine(
            x=results.bfloat16(),
            topk_idx=batch.ids,
            topk_weights=batch.weights,
            handle=handle,
            async_finish=False,
            return_recv_hook=True,
            **combine,
        )
        hook()
        batch.check(y)


def test_vllm_deepep_ht() -> None:
    buffer = Buffer(
        group=world(),
        num_nvl_bytes=1 << 30,
        num_rdma_bytes=0,
        low_latency_mode=False,
        num_qps_per_rank=1,
        explicitly_destroy=True,
    )
    Buffer.set_num_sms(20)
    on_this_stream = {"allocate_on_comm_stream": False}
    check_normal(
        buffer,
        layout={"async_finish": False, **on_this_stream},
        dispatch={
            "handle": None,
            "expert_alignment": 1,
            "config": Buffer.get_dispatch_config(NUM_RANKS),
            **on_this_stream,
        },
        combine={
            "topk_weights": None,
            "config": Buffer.get_combine_config(NUM_RANKS),
            "previous_event": None,
            **on_this_stream,
        },
    )
    buffer.destroy()


def test_vllm_deepep_ll() -> None:
    num_bytes = Buffer.get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=MAX_TOKENS,
        hidden=HIDDEN,
        num_ranks=NUM_RANKS,
        num_experts=NUM_EXPERTS,
    )
    buffer = Buffer(
        group=world(),
        num_nvl_bytes=0,
        num_rdma_bytes=num_bytes,
        low_latency_mode=True,
        num_qps_per_rank=NUM_LOCAL,
        allow_nvlink_for_low_latency_mode=True,
        allow_mnnvl=False,
        explicitly_destroy=True,
    )
    check_low_latency(
        buffer,
        in_flight=1,
        dispatch={
            "use_fp8": False,
            "round_scale": False,
            "use_ue8m0": False,
            "async_finish": False,
        },
        combine={"zero_copy": False, "out": torch.empty_like(batch_of_rank().x)},
    )
    buffer.destroy()


def test_sglang_deepep() -> None:
    buffer = Buffer(
        world(), 1 << 30, 1 << 30, low_latency_mode=True, num_qps_per_rank=24, allow_mnnvl=True
    )
    # Two halves of a batch overlap.
    check_low_latency(buffer, in_flight=2, dispatch={"use_fp8": False}, combine={})
    config = Config(
        **{
            "num_sms": 24,
            "num_max_nvl_chunked_send_tokens": 16,
            "num_max_nvl_chunked_recv_tokens": 512,
            "num_max_rdma_chunked_send_tokens": 16,
            "num_max_rdma_chunked_recv_tokens": 512,
        }
    )
    on_its_stream = {"allocate_on_comm_stream": True}
    counts = check_normal(
        buffer,
        layout={"async_finish": True, **on_its_stream},
        dispatch={"expert_alignment": 128, "config": config, **on_its_stream},
        combine={"previous_event": Buffer.capture(), "config": config, **on_its_stream},
    )
    assert all(count % 128 == 0 for count in counts)


def test_vllm_deepep_v2_decode() -> None:
    batch, buffer = batch_of_rank(), elastic_buffer(use_fp8_dispatch=False)
    # Decode passes the largest batch, rounded up to a power of two.
    for max_tokens in (8, 16):
        rows, ids, weights, handle, event = buffer.dispatch(
            x=batch.x,
            **routes_of(batch),
            num_max_tokens_per_rank=max_tokens,
            do_expand=False,
            do_cpu_sync=False,
            async_with_compute_stream=False,
        )
        assert event.event is None
        assert isinstance(rows, Tensor)
        assert ids is not None
        assert handle.num_recv_tokens_per_expert_list == []
        assert len(rows) == NUM_RANKS * max_tokens
        is_row = (
            torch.arange(len(rows), device=here())
            < handle.psum_num_recv_tokens_per_scaleup_rank[-1]
        )
        ids = torch.where(is_row.unsqueeze(1), ids, -1)
        results = experts_of_rows(torch.where(is_row.unsqueeze(1), rows, 0), ids, weights)
        y, _, event = buffer.combine(
            x=results,
            handle=handle,
            topk_weights=None,
            async_with_compute_stream=True,
            allocate_on_comm_stream=True,
        )
        event.current_stream_wait()
        batch.check(y)
    buffer.destroy()


def test_vllm_deepep_v2_prefill() -> None:
    batch, buffer = batch_of_rank(), elastic_buffer(use_fp8_dispatch=True)
    codes = as_fp8(batch.x)[0]
    # Four UE8M0 exponents of MXFP8 to a word: 126 means a half.
    words = torch.full((len(codes), HIDDEN // 32), 126, dtype=torch.uint8, device=here())
    received, ids, weights, handle, _ = buffer.dispatch(
        x=(codes, words.view(torch.int32)),
        **routes_of(batch),
        num_max_tokens_per_rank=None,
        do_expand=True,
        do_cpu_sync=True,
        async_with_compute_stream=False,
    )
    assert ids is None
    rows, scales = received
    assert (scales.contiguous().view(torch.uint8) == 126).all()
    assert len(rows) == sum(handle.num_recv_tokens_per_expert_list)
    y, _, _ = buffer.combine(
        x=experts_of_segments(rows.float() / 2, weights, handle),
        handle=handle,
        topk_weights=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
    )
    batch.check(y)
    buffer.destroy()


@pytest.mark.parametrize("do_cpu_sync", [False, True])
def test_sglang_deepep_v2(do_cpu_sync: bool) -> None:
    batch = batch_of_rank()
    buffer = ElasticBuffer(
        world(),
        num_max_tokens_per_rank=MAX_TOKENS,
        hidden=HIDDEN,
        num_topk=TOP_K,
        use_fp8_dispatch=True,
        allow_hybrid_mode=False,
        sl_idx=0,
        prefer_overlap_with_compute=False,
    )
    (codes, scales), ids, weights, handle, event = buffer.dispatch(
        as_fp8(batch.x),
        **routes_of(batch),
        num_max_tokens_per_rank=MAX_TOKENS,
        expert_alignment=128,
        num_sms=24,
        use_tma_aligned_col_major_sf=True,
        do_cpu_sync=do_cpu_sync,
        do_expand=True,
    )
    assert event.event is None
    assert ids is None
    assert weights.shape == codes.shape[:1]
    assert scales.stride(0) == 1
    y, _, event = buffer.combine(
        experts_of_segments(codes.float() * scales, weights, handle),
        handle=handle,
        topk_weights=None,
    )
    assert event.event is None
    batch.check(y)


def test_megatron_dev_deepep_v2() -> None:
    batch, buffer = batch_of_rank(), elastic_buffer(use_fp8_dispatch=False)
    rows, ids, weights, handle, event = buffer.dispatch(
        batch.x,
        **routes_of(batch),
        num_sms=24,
        num_qps=1,
        previous_event=buffer.capture(),
        async_with_compute_stream=True,
        allocate_on_comm_stream=True,
    )
    event.current_stream_wait()
    # The engine saves the tensors of a handle for backward, and restores them by name.
    saved = handle.psum_num_recv_tokens_per_expert
    handle.psum_num_recv_tokens_per_expert = saved.clone()
    y, _, event = buffer.combine(
        experts_of_rows(rows, ids, weights),
        handle=handle,
        num_sms=24,
        num_qps=1,
        previous_event=buffer.capture(),
        async_with_compute_stream=True,
        allocate_on_comm_stream=True,
    )
    event.current_stream_wait()
    batch.check(y)
    gradients, _, _, _, _ = buffer.dispatch(
        batch.x, handle=handle, num_sms=handle.num_sms, do_cpu_sync=False
    )
    assert torch.equal(gradients, rows)
    buffer.destroy()
