"""V1 over the kernels of NVLink, interpreted on CPU ranks: the recording, masks, refusals."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("triton")
from epcomm.buffers.nvlink.normal import NVLinkBuffer
from epcomm.collectives.torch_dist import TorchDistCollectives
from epcomm.errors import CapacityError, EPError
from epcomm.integrations.deep_ep import Buffer, ranks
from epcomm.registry import buffer_class
from tests.integrations.deep_ep.devices import here, on_gpus
from tests.integrations.deep_ep.test_v1_calls import (
    RAISED,
    Batch,
    check_reported,
    check_sums_of_weights,
    too_many_tokens_of_a_new_shape,
    unknown_top_k_of_a_new_shape,
    wrong_cached_rows,
    wrong_ids_of_a_new_shape,
)
from tests.integrations.deep_ep.test_v1_calls import there_and_back as low_latency
from tests.integrations.deep_ep.test_v1_strict import COMBINED, FORMATS
from tests.integrations.deep_ep.v1_ranks import (
    CASES,
    LL_H,
    H,
    Inputs,
    agrees,
    check_along,
    check_dispatch,
    check_slabs,
    dispatch_low_latency,
    dispatch_normal,
    experts,
    inputs_of,
    recorded_case,
    recorded_fp8,
    recorded_sms,
    world,
)

pytestmark = [pytest.mark.ranks(4), pytest.mark.slow]
__all__ = ["recorded_sms"]

UNEVEN = "low_latency_uneven"
# The rank that is lost.
LOST = 3
# Seconds for the others to go on without it.
GOING_ON = timedelta(seconds=60)

CLASSES = {
    ranks.Service.NORMAL: "NVLinkBuffer",
    ranks.Service.LOW_LATENCY: "NVLinkMaskedBuffer",
    ranks.Service.ROW_BUDGET: "NVLinkRowBudgetBuffer",
}


@pytest.fixture(autouse=True)
def over_nvlink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open the buffers of GPUs on CPU ranks, where an interpreter runs their kernels."""
    if not on_gpus():
        monkeypatch.setattr(
            ranks.Ranks, "_choose", lambda self, service: buffer_class(CLASSES[service])
        )
        monkeypatch.setattr(ranks.Ranks, "reads_faults", False)


# An interpreter takes seconds for a slab, so not every format with every case.
@pytest.mark.parametrize(
    ("name", "case"), [("bf16", "low_latency_uneven"), ("fp8_ue8m0", "low_latency_empty_rank")]
)
def test_low_latency_equals_the_recording(name: str, case: str) -> None:
    recorded, inputs = recorded_case(case)[name], inputs_of(case, LL_H)
    buffer = Buffer(world(), low_latency_mode=True)
    received = dispatch_low_latency(buffer, inputs, **FORMATS[name], return_recv_hook=True)
    received.receive()
    check_slabs(received, recorded)
    assert received.x.is_contiguous()
    if name == "bf16":
        y = experts(received.x)
        combined, _, hook = buffer.low_latency_combine(
            y, inputs.ids.int(), inputs.weights, received.handle, return_recv_hook=True
        )
        hook()
        agrees(combined, recorded[COMBINED])


@pytest.mark.parametrize("case", ["normal_uneven", "normal_empty_rank"])
def test_normal_mode_equals_the_recording(case: str) -> None:
    recorded, inputs = recorded_case(case), inputs_of(case, H)
    buffer = Buffer(world())
    received = dispatch_normal(buffer, inputs, expert_alignment=16)
    check_dispatch(received, recorded["dispatch_alignment_16"])
    for _ in range(2):
        check_along(buffer, inputs, received, recorded)
    x, scales = recorded_fp8(inputs)
    quantized = dispatch_normal(buffer, inputs, (x, scales.T.contiguous().T))
    agrees(quantized.x, recorded["fp8_tuple"]["recv_x"])
    agrees(quantized.scales, recorded["fp8_tuple"]["recv_scales"])


@pytest.mark.ranks(2)
def test_combine_sums_weights_over_the_ranks_of_a_token() -> None:
    check_sums_of_weights(Buffer(world()))


@pytest.fixture
def host_reads(over_nvlink: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Use static sizes on CPU ranks too, and list what the host reads from other ranks."""
    asked: list[str] = []
    if not on_gpus():
        monkeypatch.setattr(ranks.Ranks, "has", lambda self, service: True)
    for kind, name in (
        (NVLinkBuffer, "_read_counts"),
        (TorchDistCollectives, "all_gather"),
        (TorchDistCollectives, "all_to_all"),
        (TorchDistCollectives, "gather_records"),
    ):
        monkeypatch.setattr(kind, name, noted(asked, name, getattr(kind, name)))
    return asked


def noted(asked: list[str], name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - of any method
        asked.append(name)
        return method(*args, **options)

    return call


@pytest.mark.parametrize("case", ["normal_uneven"])
def test_worst_case_rows_need_no_host(case: str, host_reads: list[str]) -> None:
    recorded, inputs = recorded_case(case)["num_worst_tokens_32"], inputs_of(case, H)
    buffer = Buffer(world())
    exact = dispatch_normal(buffer, inputs)
    y, y_weights, _ = buffer.combine(exact.x * 2, exact.handle, exact.weights)
    dispatch_normal(buffer, inputs, num_worst_tokens=32)
    assert host_reads
    host_reads.clear()
    received = dispatch_normal(buffer, inputs, num_worst_tokens=32)
    combined_x, weights, _ = buffer.combine(received.x * 2, received.handle, received.weights)
    again, *_ = buffer.dispatch(inputs.x + 1, handle=received.handle)
    assert not host_reads
    num_rows = recorded["first_rows"]["shape"][0]
    assert list(received.x.shape) == recorded["recv_x_shape"]
    agrees(received.x[:num_rows], recorded["first_rows"])
    agrees(received.ids, recorded["recv_topk_idx"])
    assert received.counts == recorded["counts"]
    assert torch.equal(received.weights[:num_rows], exact.weights)
    assert torch.equal(combined_x, y)
    assert torch.equal(weights, y_weights)
    agrees(again[:num_rows], recorded_case(case)["cached_dispatch_of_x_plus_1"]["recv_x"])
    for made, expected in zip(received.handle[:3], exact.handle[:3], strict=True):
        assert torch.equal(made, expected)
    assert len(received.handle[3]) == 32


@pytest.fixture(params=[False] if on_gpus() else [True, False])
def reads_faults(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether hosts read faults of static sizes in the call; those of GPUs do not."""
    monkeypatch.setattr(ranks.Ranks, "reads_faults", request.param)
    return request.param


@pytest.mark.parametrize(
    ("too_small", "is_new"),
    [(4, False), (7, False), (4, True)],
    ids=["for a sender", "for a receiver", "for a sender, new"],
)
def test_more_than_the_worst_case_is_reported_everywhere(
    too_small: int, is_new: bool, reads_faults: bool, host_reads: list[str]
) -> None:
    inputs, buffer = inputs_of("normal_uneven", H), Buffer(world())
    few = Inputs(inputs.x[:1], inputs.ids[:1], inputs.weights[:1])
    # This call opens buffers for these sizes or for others.
    dispatch_normal(buffer, few, num_worst_tokens=6 if is_new else too_small)
    if reads_faults:
        with pytest.raises(CapacityError):
            dispatch_normal(buffer, inputs, num_worst_tokens=too_small)
    elif len(inputs.x) <= too_small:
        received = dispatch_normal(buffer, inputs, num_worst_tokens=too_small)
        assert (received.ids == -1).all()
        combined_x, _, _ = buffer.combine(received.x, received.handle)
        assert combined_x.isnan().all()
    else:
        with pytest.raises(CapacityError, match="expected at most num_worst_tokens"):
            dispatch_normal(buffer, inputs, num_worst_tokens=too_small)
    # The next call would release the other ranks that wait in this one.
    dist.barrier()
    received = dispatch_normal(buffer, few, num_worst_tokens=too_small)
    combined_x, _, _ = buffer.combine(received.x, received.handle)
    assert torch.equal(combined_x, few.x * received.handle[4].sum(1, keepdim=True))


def there_and_back(buffer: Buffer, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return the counts of a dispatch, and y of experts that multiply by 1 + their number."""
    received = dispatch_low_latency(buffer, inputs, use_fp8=False, return_recv_hook=True)
    received.receive()
    is_row = torch.arange(received.x.shape[1], device=here()) < received.count.unsqueeze(1)
    results = experts(received.x).masked_fill(~is_row.unsqueeze(2), float("nan"))
    y, _, _ = buffer.low_latency_combine(results, inputs.ids, inputs.weights, received.handle)
    return received.count, y


def test_a_masked_rank_is_left_out() -> None:
    inputs, rank, store = inputs_of(UNEVEN, LL_H), world().rank(), world().get_group_store()
    buffer = Buffer(world(), low_latency_mode=True, enable_shrink=True)
    _, y = there_and_back(buffer, inputs)
    agrees(y, recorded_case(UNEVEN)["bf16"][COMBINED])
    left = [other for other in range(world().size()) if other != LOST]
    if rank == LOST:
        store.wait([f"went on {other}" for other in left], GOING_ON)
        return
    buffer.low_latency_update_mask_buffer(LOST, True)
    status = torch.full((world().size(),), -1, dtype=torch.int32, device=here())
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0, 0, 0, 1]
    chosen = [e for r in left for row in CASES[UNEVEN][r]["inputs"]["topk_idx"] for e in row]
    of_left = inputs.weights.masked_fill(inputs.ids // 2 == LOST, 0) * (1 + inputs.ids)
    expected = inputs.x.float() * of_left.masked_fill(inputs.ids < 0, 0).sum(1, keepdim=True)
    # One test takes an interpreter half a minute.
    for _ in range(5 if on_gpus() else 1):
        counts, y = there_and_back(buffer, inputs)
        assert counts.tolist() == [chosen.count(2 * rank), chosen.count(2 * rank + 1)]
        # The error of one rounding to bfloat16.
        torch.testing.assert_close(y.float(), expected, rtol=2**-8, atol=0)
    with pytest.raises(NotImplementedError, match=r"cannot be taken back; make a new Buffer"):
        buffer.low_latency_clean_mask_buffer()
    store.set(f"went on {rank}", "")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "call",
    [
        wrong_cached_rows,
        too_many_tokens_of_a_new_shape,
        wrong_ids_of_a_new_shape,
        unknown_top_k_of_a_new_shape,
    ],
)
def test_call_one_rank_refuses_leaves_none_waiting(call: Callable[[Buffer, Batch], Tensor]) -> None:
    buffer = Buffer(world(), low_latency_mode=True)
    batch = Batch(buffer.rank, (32, 2, 4))
    batch.dispatch(buffer)
    low_latency(buffer, batch, batch.x, batch.weights)
    check_reported(call, buffer, batch, by_nan=call not in RAISED)


@pytest.mark.ranks(2)
def test_ranks_that_refuse_a_call_for_different_reasons_wait_for_nobody() -> None:
    buffer = Buffer(world(), low_latency_mode=True)
    batch = Batch(buffer.rank, (128, 2, 4))
    low_latency(buffer, batch, batch.x, batch.weights)
    many = Batch(buffer.rank, (128, 2, 4), num_tokens=9 if buffer.rank == 0 else 3)
    with pytest.raises(EPError, match="low_latency_dispatch"):
        buffer.low_latency_dispatch(
            many.x, many.ids, 8, 4, use_fp8=True, use_ue8m0=True, return_recv_hook=True
        )
    dist.barrier()
    assert torch.equal(low_latency(buffer, batch, batch.x, batch.weights), batch.x)
