"""The registry: schemas bind every call, signatures repeat them, shapes agree with results."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fakes.ascend import limits, registry
from fakes.ascend.dtypes import DTYPES

OWN = [
    "npu_dynamic_quant",
    "npu_moe_finalize_routing",
    "npu_moe_gating_top_k",
    "npu_moe_gating_top_k_softmax",
    "npu_moe_init_routing_v2",
    "npu_moe_token_permute",
    "npu_moe_token_unpermute",
]


def arguments(operator: str, device: str = "cpu") -> tuple[Any, ...]:
    """Positional arguments of a valid call, but for those of `OPTIONS`."""
    x = torch.zeros(3, 8, device=device, dtype=torch.bfloat16)
    ids = torch.zeros(3, 2, device=device, dtype=torch.int32)
    positions = torch.zeros(6, device=device, dtype=torch.int32)
    rows = torch.zeros(6, 8, device=device, dtype=torch.bfloat16)
    weights = torch.zeros(3, 2, device=device)
    table: dict[str, tuple[Any, ...]] = {
        "npu_dynamic_quant": (x,),
        "npu_moe_finalize_routing": (rows, None, None, None, weights, positions, ids),
        "npu_moe_gating_top_k": (x, 2),
        "npu_moe_gating_top_k_softmax": (x,),
        "npu_moe_init_routing_v2": (x, ids),
        "npu_moe_token_permute": (x, ids),
        "npu_moe_token_unpermute": (rows, positions, weights),
    }
    return table[operator]


OPTIONS: dict[str, dict[str, Any]] = {
    "npu_moe_init_routing_v2": {"expert_num": 4, "expert_tokens_num_flag": True}
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *[(operator, {}) for operator in OWN],
    ("npu_moe_gating_top_k", {"out_flag": True}),
    ("npu_moe_init_routing_v2", {"quant_mode": 1}),
    ("npu_moe_init_routing_v2", {"expert_tokens_num_type": 2}),
    ("npu_moe_init_routing_v2", {"active_expert_range": [1, 3]}),
    ("npu_moe_finalize_routing", {"drop_pad_mode": 2}),
    ("npu_moe_gating_top_k_softmax", {"k": 0}),
]
# Of each operator something that shapes alone tell to be wrong or not modelled.
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("npu_dynamic_quant", {"dst_type": torch.float8_e4m3fn}),
    ("npu_dynamic_quant", {"quant_mode": "perchannel"}),
    ("npu_moe_finalize_routing", {"drop_pad_mode": 3}),
    ("npu_moe_gating_top_k", {"bias": torch.zeros(1, 8, dtype=torch.bfloat16)}),
    ("npu_moe_gating_top_k", {"input_ids": torch.zeros(3)}),
    ("npu_moe_gating_top_k_softmax", {"k": 9}),
    ("npu_moe_init_routing_v2", {"active_num": 3}),
    ("npu_moe_init_routing_v2", {"active_expert_range": [3, 1]}),
    ("npu_moe_init_routing_v2", {"drop_pad_mode": 1}),
    ("npu_moe_init_routing_v2", {"expert_tokens_num_flag": False}),
    ("npu_moe_init_routing_v2", {"quant_mode": 0}),
    ("npu_moe_token_permute", {"num_out_tokens": 3}),
    ("npu_moe_token_unpermute", {"restore_shape": [3, 8]}),
]


def call(operator: str, device: str = "cpu", **options: Any) -> list[Tensor]:  # noqa: ANN401
    options = {**OPTIONS.get(operator, {}), **options}
    result = getattr(torch.ops.npu, operator)(*arguments(operator, device), **options)
    return [result] if isinstance(result, Tensor) else list(result)


@pytest.mark.parametrize("operator", OWN)
def test_misspelt_arguments_do_not_bind(operator: str) -> None:
    call(operator)
    with pytest.raises(RuntimeError, match="Unknown keyword argument 'kgroup'"):
        call(operator, kgroup=1)


@pytest.mark.parametrize("operator", OWN)
def test_missing_arguments_do_not_bind(operator: str) -> None:
    with pytest.raises(RuntimeError, match="missing value for argument"):
        getattr(torch.ops.npu, operator)()


@pytest.mark.parametrize(("operator", "options"), VARIANTS, ids=str)
def test_shapes_without_memory_are_those_of_results(operator: str, options: dict[str, Any]) -> None:
    for fake, real in zip(
        call(operator, "meta", **options), call(operator, **options), strict=True
    ):
        assert fake.device.type == "meta"
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype)


@pytest.mark.parametrize(("operator", "options"), REFUSED, ids=str)
def test_tensors_without_memory_are_refused_as_others(
    operator: str, options: dict[str, Any]
) -> None:
    with pytest.raises(RuntimeError) as expected:
        call(operator, **options)
    there = {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in options.items()}
    with pytest.raises(type(expected.value), match=re.escape(str(expected.value))):
        call(operator, "meta", **there)


@pytest.mark.parametrize(("operator", "options"), VARIANTS, ids=str)
def test_results_are_new_and_arguments_unchanged(operator: str, options: dict[str, Any]) -> None:
    """Check the schema's promises about memory, by torch's own check."""
    torch.library.opcheck(
        getattr(torch.ops.npu, operator).default,
        arguments(operator),
        {**OPTIONS.get(operator, {}), **options},
        test_utils=("test_schema", "test_faketensor"),
    )


def test_register_happens_once() -> None:
    assert registry.register() is registry.register()


def test_operators_without_an_implementation_are_defined() -> None:
    x = torch.zeros(2, 2)
    with pytest.raises(NotImplementedError, match="Could not run 'npu::npu_quantize'"):
        torch.ops.npu.npu_quantize(x, torch.ones(2), None, 1)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda input, axis=-1: None, "parameters are"),
        (lambda input, dim=0: None, "dim has 0, the schema -1"),
        (lambda input, *, dim=-1: None, "by keyword or not"),
    ],
)
def test_signatures_repeat_the_schema(function: Callable[..., None], message: str) -> None:
    registry._check_signature("npu_swiglu", lambda input, dim=-1: None)
    with pytest.raises(AssertionError, match=message):
        registry._check_signature("npu_swiglu", function)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_dtypes_arrive_as_these_numbers(dtype: torch.dtype) -> None:
    arrived: list[int | None] = []
    library = torch.library.Library("epcomm_dtype_probe", "FRAGMENT")
    library.define("probe(Tensor x, int? dtype=None) -> ()")
    library.impl("probe", lambda x, dtype=None: arrived.append(dtype), "CPU")
    torch.ops.epcomm_dtype_probe.probe(torch.zeros(1), dtype)
    library._destroy()
    assert [DTYPES[number] for number in arrived if number is not None] == [dtype]


def test_a_chip_must_be_chosen_and_known() -> None:
    with (
        pytest.raises(ValueError, match="name is 'A4', expected one of A2, A3, A5"),
        limits.soc("A4"),
    ):
        pass
    with limits.soc("A2") as outer:
        with limits.soc("A5", size_limits=False) as inner:
            assert limits.current_machine() is inner
        assert limits.current_machine() is outer
    assert outer.size_limits


ALONE = """
import sys
import torch
import epcomm
assert not any(name.startswith("fakes") for name in sys.modules)
import fakes.ascend.operators.gating
from fakes.ascend import registry
assert not hasattr(torch.ops.npu, "npu_moe_gating_top_k"), "registered at import"
sys.modules["torch_npu"] = None
try:
    registry.register()
except RuntimeError as error:
    assert "torch_npu is loaded" in str(error)
else:
    raise AssertionError("register() beside torch_npu")
del sys.modules["torch_npu"]
registry.register()
try:
    torch.ops.npu.npu_moe_gating_top_k(torch.zeros(1, 4), 2)
except RuntimeError as error:
    assert "no chip is chosen" in str(error)
else:
    raise AssertionError("a call on no chip")
"""


def test_nothing_is_registered_at_import() -> None:
    subprocess.run([sys.executable, "-c", ALONE], check=True, timeout=60)
