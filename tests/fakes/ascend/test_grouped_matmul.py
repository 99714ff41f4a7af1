from itertools import product
from typing import Any

import pytest
import torch

from fakes.ascend.formats import ACL_FORMAT_ND, ACL_FORMAT_NZ, format_of, nz_pack, nz_unpack
from fakes.ascend.limits import Soc, soc
from fakes.ascend.operators.grouped_matmul import scale_values
from fakes.ascend.registry import register
from tests.fakes.ascend.recorded import assert_equals, golden, tensor_of

register()
npu = torch.ops.npu

GOLDEN = golden("ascend_grouped_matmul")
INPUTS = GOLDEN["grouped_matmul_inputs"]
# How far a scale may be that went through exp.
SCALE_RTOL = 1e-6
UNALIGNED = (6, 6)


def ids(cases: list[dict[str, Any]]) -> list[str]:
    return [case["id"] for case in cases]


def grouped_call(case: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of a golden grouped_matmul, without group_list."""
    call = {key: value for key, value in case["call"].items() if key != "group_list_type"}
    if "output_dtype" in call:
        call["output_dtype"] = getattr(torch, call["output_dtype"])
    for name in ("scale", "per_token_scale"):
        if case.get(name) is not None:
            call[name] = [tensor_of(case[name])]
    for name in ("x", "weight"):
        call[name] = [tensor_of(case.get(name, INPUTS[name]))]
    return call


@pytest.mark.parametrize("layout", [ACL_FORMAT_ND, ACL_FORMAT_NZ])
@pytest.mark.parametrize("case", GOLDEN["grouped_matmul"], ids=ids(GOLDEN["grouped_matmul"]))
def test_grouped_matmul_equals_the_golden_values(case: dict[str, Any], layout: int) -> None:
    """Check chips that take the case; others refuse the dtype of its scale."""
    types = case["call"]["group_list_type"]
    call = grouped_call(case)
    call["weight"] = [npu.npu_format_cast(call["weight"][0], layout)]
    for list_type, chip in product(types if isinstance(types, list) else [types], Soc):
        group_list = tensor_of(INPUTS["group_list"][str(list_type)])
        options = call | {"group_list": group_list, "group_list_type": list_type}
        with soc(chip, size_limits=False):
            if chip in case.get("chips", list(Soc)):
                (y,) = npu.npu_grouped_matmul(**options)
                assert_equals(y, case["expected"]["y"])
            else:
                rule = "a bfloat16 scale for a bfloat16 result and a float32 one for float16, got "
                with pytest.raises(RuntimeError, match=f"{rule}{call['scale'][0].dtype} for"):
                    npu.npu_grouped_matmul(**options)


def test_int64_scales_keep_the_upper_19_bits() -> None:
    scales = torch.tensor([0.1, -0.1, 0.0, 1.0])
    bits = scales.view(torch.int32).to(torch.int64)
    cut = scale_values(bits)
    assert (scales - cut).abs().max() < 2**-10 * 0.1
    assert torch.equal(cut, scale_values(bits & 0xFFFFFFFF))
    assert cut[3] == 1.0


@pytest.mark.parametrize(
    ("call", "match"),
    [
        ({"group_type": -1}, "group_type=-1, or a list of tensors, is not modelled"),
        ({"split_item": 0}, "split_item=0, .* is not modelled"),
        ({"output_dtype": None}, "an INT8 result, which is the default, is not modelled"),
        (
            {"group_list": torch.tensor([3]), "group_list_type": 1},
            r"group_list_type 1 \(counts\) is of several groups; pass the end of one group, type 0",
        ),
        ({"group_list": torch.tensor([3, 3, 10])}, "ends within the rows"),
        ({"group_list": torch.tensor([3, 0, 4])}, "goes forwards"),
        ({"group_list": torch.tensor([3, 3])}, "entr"),
        ({"group_list": torch.tensor([3, 3, 7]).int()}, "int64"),
        ({"output_dtype": torch.bfloat16}, "int32"),
        ({"per_token_scale": [torch.ones(9)]}, "comes with scale"),
        ({"scale": [torch.ones(3, 5)], "output_dtype": torch.float16}, r"scale \[E, N\]"),
    ],
)
def test_grouped_matmul_refuses(call: dict[str, Any], match: str) -> None:
    plain = grouped_call(GOLDEN["grouped_matmul"][0]) | {"group_list": torch.tensor([3, 3, 7])}
    with pytest.raises(RuntimeError, match=match):
        npu.npu_grouped_matmul(**plain | call)


@pytest.mark.parametrize(
    "case", GOLDEN["dequant_swiglu_quant"], ids=ids(GOLDEN["dequant_swiglu_quant"])
)
def test_dequant_swiglu_quant_equals_the_golden_values(case: dict[str, Any]) -> None:
    y, scale = npu.npu_dequant_swiglu_quant(
        tensor_of(case["x"]),
        weight_scale=tensor_of(case["weight_scale"]),
        activation_scale=tensor_of(case["activation_scale"]),
        group_index=tensor_of(case["group_index"]),
        **case["call"],
    )
    assert_equals(y, case["expected"]["y"])
    rtol = 0.0 if case["scale_exact"] else SCALE_RTOL
    assert_equals(scale, case["expected"]["scale"], rtol=rtol)


@pytest.mark.parametrize("layout", [ACL_FORMAT_ND, ACL_FORMAT_NZ])
def test_grouped_matmul_swiglu_quant_equals_the_golden_values(layout: int) -> None:
    for case in GOLDEN["grouped_matmul_swiglu_quant"]:
        x, weight, *others = (
            tensor_of(case[name])
            for name in ("x", "weight", "group_list", "weight_scale", "x_scale")
        )
        weight = npu.npu_format_cast(weight, layout)
        y, scale, offset = npu.npu_grouped_matmul_swiglu_quant(x, weight, *others)
        assert offset.shape == ()
        assert_equals(y, case["expected"]["y"])
        assert_equals(scale, case["expected"]["scale"], rtol=SCALE_RTOL)


def test_codes_of_the_fused_operator_are_quotients_by_the_scale() -> None:
    """Rows that distinguish the profiles: silu(64) * x is exactly 64 * x."""
    profiles = golden("ascend_quant_profiles")
    rows, expected = tensor_of(profiles["x"]).float(), profiles["profiles"]["div"]
    x, x_scale, groups = torch.ones(1, 3, dtype=torch.int8), torch.ones(1), torch.tensor([1])
    for row in profiles["where_they_differ"]["rint127/div"]["rows_with_other_codes"]:
        fraction, exponent = torch.frexp(rows[row])
        # bfloat16 has 8 bits; three codes add up to them, and the scale is the power of two.
        mantissa, power = (fraction * 2**8).int(), 2.0 ** (exponent - 8)
        assert torch.equal(mantissa * power, rows[row])
        third = mantissa // 3
        up = torch.stack([third, third, mantissa - 2 * third])
        gate = torch.tensor([32, 32, 0])[:, None].expand_as(up)
        weight = torch.cat([gate, up], dim=1).to(torch.int8)[None]
        scale = torch.cat([torch.ones_like(power), power])[None]
        y, y_scale, _ = npu.npu_grouped_matmul_swiglu_quant(x, weight, groups, scale, x_scale)
        assert y[0].tolist() == expected["codes"]["values"][row]
        wanted = int(expected["scale"]["bits"][row], 16)
        assert (y_scale / 64).view(torch.int32).item() == wanted


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
@pytest.mark.parametrize("shape", [UNALIGNED, (3, 17, 33), (2, 16, 32), (16, 16)])
def test_values_survive_nz_and_row_major_readers_get_nonsense(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    matrix = torch.randint(1, 100, shape).to(dtype)
    assert torch.equal(nz_unpack(nz_pack(matrix), *shape[-2:]), matrix)
    tiled = npu.npu_format_cast(matrix, ACL_FORMAT_NZ)
    assert format_of(tiled) == ACL_FORMAT_NZ
    assert (tiled.shape, tiled.dtype) == (matrix.shape, matrix.dtype)
    assert not (tiled == matrix).any()
    # A tensor that shares the memory keeps the format.
    parameter = torch.nn.Parameter(tiled, requires_grad=False)
    assert torch.equal(npu.npu_format_cast(parameter, ACL_FORMAT_ND), matrix)
    assert format_of(tiled.clone()) == ACL_FORMAT_ND
    with pytest.raises(RuntimeError, match="not as a view"):
        npu.npu_format_cast(tiled[:1], ACL_FORMAT_ND)
