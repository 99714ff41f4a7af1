"""V1 over the kernels of NVLink, which are interpreted on CPU ranks: the recording again."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from epcomm.config import Mode
from epcomm.integrations.deep_ep import Buffer
from epcomm.integrations.deep_ep.ranks import Ranks
from tests.integrations.deep_ep.test_v1_low_latency import COMBINED, FORMATS, by_source
from tests.integrations.deep_ep.v1_ranks import (
    LL_H,
    H,
    LowLatencyOptions,
    agrees,
    dispatch_low_latency,
    dispatch_normal,
    experts,
    inputs_of,
    recorded_case,
    recorded_sms,
    world,
)

pytestmark = [pytest.mark.ranks(4), pytest.mark.slow]
__all__ = ["recorded_sms"]

CLASSES = {Mode.NORMAL: "NVLinkBuffer", Mode.LOW_LATENCY: "NVLinkMaskedBuffer"}


@pytest.fixture(autouse=True)
def over_nvlink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the buffers of GPUs, whose kernels an interpreter runs here."""
    monkeypatch.setattr(Ranks, "_choose", lambda self, mode, names: CLASSES[mode])


# An interpreter takes seconds for a slab, so not every format with every case.
@pytest.mark.parametrize(
    ("name", "case"),
    [("bf16", "low_latency_uneven"), ("fp8_ue8m0", "low_latency_empty_rank")],
)
def test_low_latency_equals_the_recording(name: str, case: str) -> None:
    recorded, inputs = recorded_case(case)[name], inputs_of(case, LL_H)
    buffer = Buffer(world(), low_latency_mode=True)
    options: LowLatencyOptions = {**FORMATS[name], "return_recv_hook": True}
    received = dispatch_low_latency(buffer, inputs, **options)
    received.receive()
    assert list(received.x.shape) == recorded["recv_shape"]
    assert received.x.is_contiguous()
    assert received.count.tolist() == recorded["recv_count"]
    assert list(received.handle[2:]) == recorded["handle_tail"]
    if received.scales is not None:
        assert list(received.scales.stride()) == recorded["scales"]["stride"]
        assert str(received.scales.dtype) == recorded["scales"]["dtype"]
    src_info, layout_range = received.handle[:2]
    for expert, num_rows in enumerate(recorded["recv_count"]):
        found = [received.x[expert, :num_rows, :3].float().tolist()]
        found.append(src_info[expert, :num_rows].tolist())
        expected = [recorded["rows"][expert]["values"], recorded["src_info"][expert]]
        if received.scales is not None:
            found.append(received.scales[expert, :num_rows, :2].tolist())
            expected.append(recorded["scales"]["first"][expert])
        ranges = [[value >> 32, value & 0xFFFFFFFF] for value in layout_range[expert].tolist()]
        expected_rows = by_source(recorded["layout_range"][expert], *expected)
        assert by_source(ranges, *found) == expected_rows
    if name == "bf16":
        y = experts(received.x)
        combined, _, hook = buffer.low_latency_combine(
            y, inputs.ids.int(), inputs.weights, received.handle, return_recv_hook=True
        )
        assert hook is not None
        hook()
        agrees(combined, recorded[COMBINED])


@pytest.mark.parametrize("case", ["normal_uneven", "normal_empty_rank"])
def test_normal_mode_equals_the_recording(case: str) -> None:
    recorded, inputs = recorded_case(case), inputs_of(case, H)
    buffer = Buffer(world())
    received = dispatch_normal(buffer, inputs, expert_alignment=16)
    expected = recorded["dispatch_alignment_16"]
    agrees(received.x, expected["recv_x"])
    agrees(received.ids, expected["recv_topk_idx"])
    agrees(received.weights, expected["recv_topk_weights"])
    assert received.counts == expected["num_recv_tokens_per_expert_list"]
    agrees(received.handle[0], expected["handle_0_rank_prefix_matrix"])
    agrees(received.handle[3], expected["handle_3_recv_src_idx"])
    for _ in range(2):
        combined, weights, _ = buffer.combine(received.x * 2, received.handle, received.weights)
        agrees(combined, recorded["combine_of_2x"]["combined_x"])
        agrees(weights, recorded["combine_of_2x"]["combined_topk_weights"])
        recv_x, *_ = buffer.dispatch(inputs.x + 1, handle=received.handle)
        assert isinstance(recv_x, torch.Tensor)
        agrees(recv_x, recorded["cached_dispatch_of_x_plus_1"]["recv_x"])
    scales = 1 + 2.0 * torch.arange(len(inputs.x)).unsqueeze(1) + torch.arange(2.0)
    scales += 100.0 * world().rank()
    x = (inputs.x.float() / 16).to(torch.float8_e4m3fn)
    quantized = dispatch_normal(buffer, inputs, (x, scales.T.contiguous().T))
    agrees(quantized.x, recorded["fp8_tuple"]["recv_x"])
    agrees(quantized.scales, recorded["fp8_tuple"]["recv_scales"])
