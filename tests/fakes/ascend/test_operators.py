from typing import Any

import pytest
import torch

from epcomm.types import Int8Profile
from fakes.ascend.int8 import quantize_rows
from fakes.ascend.undefined import UNDEFINED_INT, UNDEFINED_INT8
from tests.fakes.ascend.recorded import assert_equals, golden, optional_tensor, tensor_of

ROUTING, GATING = golden("ascend_init_routing"), golden("ascend_gating_top_k")
PROFILES = golden("ascend_quant_profiles")
# Header of the golden file: the order of a float32 softmax sum is free.
RTOL = 1e-6
FINALIZE_TENSORS = [
    *("expanded_permuted_rows", "skip1", "skip2", "bias"),
    *("scales", "expanded_src_to_dst_row", "export_for_source_row"),
]


@pytest.mark.parametrize("case", ROUTING["init_routing_v2"], ids=lambda case: case["id"])
def test_init_routing(case: dict[str, Any]) -> None:
    found = torch.ops.npu.npu_moe_init_routing_v2(
        tensor_of(case["x"]),
        tensor_of(case["expert_idx"]),
        scale=optional_tensor(case["scale"]),
        **{"expert_num": 4, "expert_tokens_num_flag": True, **case["call"]},
    )
    names = ["expanded_x", "expanded_row_idx", "tokens", "expanded_scale"]
    for name, tensor in zip(names, found, strict=True):
        assert_equals(tensor, case["expected"][name])
    if case["call"]["row_idx_type"] == 0:
        assert int((found[1] >= 0).sum()) == case["expected"]["active_rows"]


@pytest.mark.parametrize("case", ROUTING["finalize_routing"], ids=lambda case: case["id"])
def test_finalize_routing(case: dict[str, Any]) -> None:
    out = torch.ops.npu.npu_moe_finalize_routing(
        *[optional_tensor(case[name]) for name in FINALIZE_TENSORS], **case["call"]
    )
    assert_equals(out, case["expected"]["out"])


def test_finalize_routing_refuses() -> None:
    (case,) = ROUTING["must_raise"]
    tensors = {
        **dict.fromkeys(FINALIZE_TENSORS),
        "expanded_permuted_rows": torch.zeros(10, 2),
        "expanded_src_to_dst_row": tensor_of(case["expanded_src_to_dst_row"]),
        "scales": torch.ones(5, 2),
    }
    with pytest.raises(RuntimeError, match=r"mode=2.* holds \[-1\], expected 0 to 9"):
        torch.ops.npu.npu_moe_finalize_routing(**tensors, drop_pad_mode=case["drop_pad_mode"])


@pytest.mark.parametrize("case", GATING["gating_top_k"], ids=lambda case: case["id"])
def test_gating(case: dict[str, Any]) -> None:
    x = tensor_of(case["x"])
    y, ids, norm = torch.ops.npu.npu_moe_gating_top_k(
        x, bias=optional_tensor(case["bias"]), **case["call"]
    )
    expected = case["expected"]
    assert_equals(ids, expected["expert_ids"])
    assert_equals(y, expected["y"], rtol=0.0 if case["y_exact"] else RTOL)
    assert norm.shape == x.shape
    assert norm.dtype == torch.float32
    if case["call"]["out_flag"]:
        assert_equals(norm, expected["norm"], rtol=RTOL)
    else:
        assert norm.isnan().all()


def test_gating_of_rows_with_nan_is_undefined_and_that_of_others_is_not() -> None:
    logits = torch.zeros(3, 8)
    logits[1, 5] = float("nan")
    for norm_type, group_count in [(0, 1), (1, 1), (1, 2)]:
        y, ids, _ = torch.ops.npu.npu_moe_gating_top_k(
            logits, 2, norm_type=norm_type, group_count=group_count
        )
        assert y.isnan().any(1).tolist() == [False, True, False]
        assert (ids == UNDEFINED_INT).all(1).tolist() == [False, True, False]
        assert ids[0].tolist() == [0, 1]


@pytest.mark.parametrize("profile", list(Int8Profile))
def test_profiles_with_undefined_rows_poisoned(profile: Int8Profile) -> None:
    x = tensor_of(PROFILES["x"])
    codes, scales = quantize_rows(x, profile)
    expected = PROFILES["profiles"][profile.value]
    found_bits = [f"{bits & 0xFFFFFFFF:08x}" for bits in scales.view(torch.int32).tolist()]
    for row, bits in enumerate(expected["scale"]["bits"]):
        if bits is None:
            assert codes[row].tolist() == [UNDEFINED_INT8] * x.shape[1]
            assert scales[row] == 0
        else:
            assert codes[row].tolist() == expected["codes"]["values"][row], f"row {row}"
            assert found_bits[row] == bits, f"row {row}"
