from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fakes.ascend.deep_ep import Buffer
from fakes.ascend.deep_ep.buffer import FuseMode
from fakes.ascend.formats import ACL_FORMAT_ND
from tests.cases.fuseep_checkpoint import digest
from tests.fakes.ascend import fuseep
from tests.fakes.ascend.fused_calls import MODE1, MODE2, bits, nz, recorded_call

pytestmark = pytest.mark.ranks(2)
RECORDED = fuseep.RECORDED
MODES = pytest.mark.parametrize("mode", [MODE1, MODE2])
W13, S13 = "gmm1_permuted_weight", "gmm1_permuted_weight_scale"
W2, S2 = "gmm2_weight", "gmm2_weight_scale"
LIMIT = "num_max_dispatch_tokens_per_rank"

Call = dict[str, Any]
Change = Callable[[Call], Any]


def buffer_of_all() -> Buffer:
    return Buffer(dist.group.WORLD, low_latency_mode=True)


def my_call(mode: FuseMode) -> Call:
    return recorded_call(mode, dist.get_rank())


def nd(weight: Tensor) -> Tensor:
    return torch.ops.npu.npu_format_cast(weight, ACL_FORMAT_ND)


def expect_refusal(
    buffer: Buffer, call: Call, match: str, kind: type[Exception] = RuntimeError
) -> None:
    with pytest.raises(RuntimeError, match=match) as caught:
        buffer.fused_deep_moe(**call)
    assert type(caught.value) is kind


def test_rows_beyond_max_output_size_are_refused_on_all_ranks() -> None:
    rank, buffer, call = dist.get_rank(), buffer_of_all(), my_call(MODE2)
    sizes = RECORDED["mode2_max_output_size"]
    full, short = sizes["rows_received"][rank], sizes["must_raise_with"]
    expect_refusal(buffer, call | {LIMIT: short}, f"8 rows received, max_output_size .* is {short}")
    # The limit is each rank's own.
    one = short if rank == 1 else full
    expect_refusal(
        buffer, call | {LIMIT: one}, "8 rows received" if rank else r"ranks \[1\] refuse"
    )
    y, _ = buffer.fused_deep_moe(**call | {LIMIT: full})
    assert digest(y) == RECORDED["mode2"]["y_sha256"][rank]


@MODES
def test_a_row_of_zeros_and_a_row_of_nan_stay_alone(mode: FuseMode) -> None:
    buffer, call = buffer_of_all(), my_call(mode)
    expected, _ = buffer.fused_deep_moe(**call)
    call["x"][1], call["x"][2] = 0.0, float("nan")
    y, _ = buffer.fused_deep_moe(**call)
    assert torch.equal(y[0], expected[0])
    assert torch.equal(y[3:], expected[3:])
    assert not y[1].any()
    assert y[2].isnan().all()
    # A dummy row is all that an idle rank passes.
    if dist.get_rank() == 1:
        call["x"] = torch.zeros(1, fuseep.H).bfloat16()
        call["topk_idx"], call["topk_weights"] = torch.tensor([[0, 1]]), torch.zeros(1, 2)
    y, _ = buffer.fused_deep_moe(**call)
    assert not y[1:2].any() if dist.get_rank() == 0 else not y.any()


# The action of one rank in both modes, and the message that it gets.
BOTH: dict[str, Change] = {
    "x is 2-D": lambda call: {"x": call["x"][None]},
    "x is bfloat16, got torch.float16": lambda call: {"x": call["x"].half()},
    "passes a dummy one": lambda call: {
        name: call[name][:0] for name in ("x", "topk_idx", "topk_weights")
    },
    r"topk_idx is int64 \(or int32\)": lambda call: {"topk_idx": call["topk_idx"].float()},
    "topk_weights is torch.float32": lambda call: {"topk_weights": call["topk_weights"].bfloat16()},
    "num_experts is a multiple of 2, got 5": lambda _: {"num_experts": 5},
    "ids are below 4": lambda call: {"topk_idx": call["topk_idx"] + 2},
    "ids are at least 0": lambda call: {"topk_idx": call["topk_idx"] - 4},
    "ids of a row differ": lambda call: {"topk_idx": call["topk_idx"][:, :1].repeat(1, 2)},
    r"quant_mode is 0 or 1, got 2": lambda _: {"quant_mode": 2},
    r"fuse_mode is one of \{1, 2\}, got 3": lambda _: {"fuse_mode": 3},
    "gmm1_permuted_weight is int8, got torch.bfloat16": lambda call: {W13: call[W13].bfloat16()},
    "gmm2_weight is int8, got torch.bfloat16": lambda call: {W2: call[W2].bfloat16()},
    r"gmm1_permuted_weight is \[2, 128, 2I\], got \[384, 128\]": lambda call: {W13: call[W13][0].T},
    r"gmm1_permuted_weight is torch.int8 \[2, 128, 384\]": lambda call: {
        W13: call[W13].repeat(2, 1, 1)
    },
    "used whole, not as a view": lambda call: {W2: nz(nd(call[W2]).repeat(2, 1, 1))[:2]},
    r"gmm2_weight is torch.int8 .*contiguous": lambda call: {W2: call[W2].mT},
}
ONE: dict[str, Change] = {
    "num_max_dispatch_tokens_per_rank is 2, less than 3 tokens": lambda _: {LIMIT: 2},
    "gmm1_permuted_weight is in NZ": lambda call: {W13: nd(call[W13])},
    "gmm2_weight is in NZ": lambda call: {W2: nd(call[W2])},
    r"gmm1_permuted_weight_scale is torch.float32 \[2, 384\]": lambda call: {S13: bits(call[S13])},
    r"gmm2_weight_scale is torch.float32 \[2, 128\]": lambda call: {S2: bits(call[S2])},
    "2I is a multiple of 128, a tile, got 64": lambda call: {
        W13: call[W13][:, :, :64].contiguous()
    },
    r"gmm2_weight is torch.int8 \[2, 128, 192\]": lambda call: {W2: nz(nd(call[W2]).mT)},
}
TWO: dict[str, Change] = {
    "max_output_size is above 0, got 0": lambda _: {LIMIT: 0},
    r"gmm1_permuted_weight_scale is torch.int64 \[768\]": lambda _: {S13: torch.ones(2, 384)},
    r"gmm2_weight_scale is torch.int64 \[256\]": lambda call: {S2: call[S2].view(2, 128)},
    r"gmm2_weight is torch.int8 \[2, 192, 128\]": lambda call: {W2: nz(nd(call[W2]).mT)},
}
RULES = {MODE1: BOTH | ONE, MODE2: BOTH | TWO}


@MODES
def test_what_one_rank_refuses_all_refuse_and_then_compute_a_recorded_layer(mode: FuseMode) -> None:
    buffer, call = buffer_of_all(), my_call(mode)
    for rule, change in RULES[mode].items():
        if dist.get_rank() == 1:
            expect_refusal(buffer, call | change(call), rule)
        else:
            expect_refusal(buffer, call, r"ranks \[1\] refuse")
    # No effect: quant_mode, profile_enable, the integer type of ids.
    others = {"quant_mode": 0, "profile_enable": True, "topk_idx": call["topk_idx"].int()}
    (listed,) = (RECORDED["counts"][key] for key in RECORDED["counts"] if f"mode{mode}" in key)
    for right in (call, call | others):
        y, counts = buffer.fused_deep_moe(**right)
        assert (y.dtype, counts.dtype) == (torch.bfloat16, torch.int32)
        assert digest(y) == RECORDED[f"mode{mode}"]["y_sha256"][dist.get_rank()]
        assert counts.tolist() == listed[dist.get_rank()]
