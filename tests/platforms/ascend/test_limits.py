import sys
from types import SimpleNamespace

import pytest
import torch

from epcomm import WireFormat
from epcomm.buffers.ascend.packed import AscendBuffer
from epcomm.platforms.ascend.chip import Soc, current_soc, device_name, soc_of
from epcomm.platforms.ascend.environment import (
    Rounds,
    int8_reasons,
    rounds_of,
    rounds_reasons,
    variable_reasons,
    window_reasons,
)
from epcomm.platforms.machine import this_machine
from epcomm.quantization import INT8_PER_TOKEN
from fakes.ascend.limits import soc
from fakes.deep_ep import install

BF16 = WireFormat.of(torch.bfloat16)
ROUND = "DEEPEP_NORMAL_LONG_SEQ_ROUND"
TOKENS = "DEEPEP_NORMAL_LONG_SEQ_PER_ROUND_TOKENS"
COMBINE = "DEEPEP_NORMAL_COMBINE_ENABLE_LONG_SEQ"
INT8 = "DEEP_NORMAL_MODE_USE_INT8_QUANT"


@pytest.mark.parametrize(
    ("name", "chip"),
    [
        ("Ascend910B1", Soc.A2),
        ("Ascend910_9392", Soc.A3),
        ("Ascend950DT_9591", Soc.A5),
        ("ascend950", Soc.A5),
        ("Ascend910A", None),
        ("Ascend310P3", None),
        ("NVIDIA H200", None),
    ],
)
def test_chips_by_the_names_of_their_devices(name: str, chip: Soc | None) -> None:
    assert soc_of(name) is chip


def torch_npu_with(name: str | None) -> SimpleNamespace:
    """Imitate torch_npu with a device of this name; None: without a device."""

    def get_device_name() -> str:
        assert name is not None, "without a device the real one raises"
        return name

    npu = SimpleNamespace(is_available=lambda: name is not None, get_device_name=get_device_name)
    return SimpleNamespace(npu=npu)


def test_the_chip_is_that_of_torch_npu_or_of_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    assert device_name() is None, "nobody imports it to ask"
    assert "torch_npu" not in sys.modules
    monkeypatch.setitem(sys.modules, "torch_npu", torch_npu_with(None))
    assert current_soc() is None
    monkeypatch.setitem(sys.modules, "torch_npu", torch_npu_with("Ascend910B3"))
    assert current_soc() is Soc.A2
    with install("ascend"):
        assert current_soc() is None, "a stand-in for no chip yet"
        for chip in Soc:
            with soc(chip):
                assert current_soc() is chip
    with install("v1"):
        assert current_soc() is Soc.A2


@pytest.mark.parametrize(
    ("variables", "mib", "reason"),
    [
        ({}, 200, None),
        ({}, 201, "needs a window of 201 MiB, but HCCL_BUFFSIZE is 200; set it to 201 on all"),
        ({"HCCL_BUFFSIZE": "300"}, 300, None),
        ({"HCCL_BUFFSIZE": "300"}, 301, "but HCCL_BUFFSIZE is 300; set it to 301"),
        ({"HCCL_BUFFSIZE": "9", "DEEPEP_HCCL_BUFFSIZE": "400"}, 400, None),
        (
            {"HCCL_BUFFSIZE": "999", "DEEPEP_HCCL_BUFFSIZE": "400"},
            401,
            "DEEPEP_HCCL_BUFFSIZE is 400",
        ),
        ({"HCCL_BUFFSIZE": "1G"}, 1, "HCCL_BUFFSIZE is '1G', expected 1 to 2147483647; correct it"),
        ({"DEEPEP_HCCL_BUFFSIZE": ""}, 1, "DEEPEP_HCCL_BUFFSIZE is '', expected 1 to"),
    ],
)
def test_the_window_is_compared_with_its_variable(
    variables: dict[str, str], mib: int, reason: str | None
) -> None:
    found = window_reasons(mib << 20, variables)
    assert_reason(found, reason)
    if reason is None:
        assert window_reasons((mib << 20) + 1, variables), "one byte more does not fit"


def assert_reason(found: list[str], wanted: str | None) -> None:
    """Check that there is exactly one reason, which contains `wanted`; or none."""
    assert len(found) == (wanted is not None), found
    assert wanted is None or wanted in found[0], found


@pytest.mark.parametrize(
    ("variables", "rounds", "max_tokens", "window_tokens"),
    [
        ({}, Rounds(), 8192, 8192),
        ({ROUND: "2", TOKENS: "32"}, Rounds(num_rounds=2, tokens_per_round=32), 64, 64),
        # By default combine has one round of 8192 tokens.
        ({ROUND: "16", TOKENS: "2048"}, Rounds(num_rounds=16, tokens_per_round=2048), 8192, 8192),
        (
            {ROUND: "16", TOKENS: "8192", COMBINE: "1"},
            Rounds(num_rounds=16, tokens_per_round=8192, in_combine=True),
            131072,
            8192,
        ),
        ({COMBINE: "1"}, Rounds(in_combine=True), 8192, 8192),
        ({ROUND: "2", TOKENS: "many"}, Rounds(), 8192, 8192),
    ],
)
def test_rounds_decide_the_limit_of_tokens_and_the_window(
    variables: dict[str, str], rounds: Rounds, max_tokens: int, window_tokens: int
) -> None:
    found = rounds_of(variables)
    assert found == rounds
    assert found.max_tokens == max_tokens
    assert found.window_tokens(None) == window_tokens
    assert found.window_tokens(10**6) == window_tokens
    assert found.window_tokens(16) == 16


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({ROUND: "1", TOKENS: "32"}, None),
        ({ROUND: "256", TOKENS: "512"}, None),
        ({ROUND: "2"}, f"{ROUND} is set and {TOKENS} is not; set both or neither"),
        ({TOKENS: "64"}, f"{TOKENS} is set and {ROUND} is not; set both or neither"),
        ({ROUND: "257", TOKENS: "32"}, f"{ROUND} is '257', expected 1 to 256"),
        ({ROUND: "1", TOKENS: "8193"}, f"{TOKENS} is '8193', expected 32 to 8192"),
        ({ROUND: "1", TOKENS: "8k"}, f"{TOKENS} is '8k', expected 32 to 8192"),
        ({ROUND: "17", TOKENS: "8192"}, f"{ROUND} * {TOKENS} is 139264, at most 131072"),
        ({COMBINE: "yes"}, f"{COMBINE} is 'yes', expected 0 to 1"),
    ],
)
def test_rounds_that_the_package_refuses(variables: dict[str, str], reason: str | None) -> None:
    assert_reason(rounds_reasons(variables), reason)


ON_A2 = {"HCCL_INTRA_PCIE_ENABLE": "1", "HCCL_INTRA_ROCE_ENABLE": "0"}
# Variables, the chip, and the reason that the buffers of both modes give.
VARIABLES = [
    ({}, Soc.A2, None),
    ({"DEEP_USE_MODE": "default"}, Soc.A3, None),
    ({"DEEP_USE_MODE": "ops"}, Soc.A3, "DEEP_USE_MODE is ops, expected default; unset it"),
    ({"DEEP_USE_MODE": "alltoall"}, None, "DEEP_USE_MODE is alltoall, expected default"),
    ({"MOE_EXPERT_TOKEN_NUMS_TYPE": "1"}, None, None),
    ({"MOE_EXPERT_TOKEN_NUMS_TYPE": "0"}, None, "MOE_EXPERT_TOKEN_NUMS_TYPE is 0, expected 1"),
    ({"MOE_SHARED_EXPERT_RANK_NUM": "2"}, None, "MOE_SHARED_EXPERT_RANK_NUM is 2, expected 0"),
    # Entries of -1 are replaced before they are sent.
    ({"MOE_ENABLE_TOPK_NEG_ONE": "1"}, Soc.A3, None),
    ({"MOE_ENABLE_CCU": "1"}, Soc.A3, "MOE_ENABLE_CCU is 1, but only A5 has it and this is A3"),
    ({"MOE_ENABLE_CCU": "1"}, Soc.A5, None),
    ({"MOE_ENABLE_CCU": "1"}, None, None),
    (
        {"HCCL_OP_EXPANSION_MODE": "AIV"},
        Soc.A2,
        "HCCL_OP_EXPANSION_MODE is AIV, which A2 does not support",
    ),
    ({"HCCL_OP_EXPANSION_MODE": "AIV"}, Soc.A3, None),
    (ON_A2, Soc.A2, "HCCL_INTRA_PCIE_ENABLE is 1 and HCCL_INTRA_ROCE_ENABLE is 0, so that A2"),
    (ON_A2, Soc.A3, None),
    (ON_A2 | {"HCCL_INTRA_ROCE_ENABLE": "1"}, Soc.A2, None),
]


@pytest.mark.parametrize(("variables", "chip", "reason"), VARIABLES)
def test_variables_that_the_adapters_refuse(
    variables: dict[str, str], chip: Soc | None, reason: str | None
) -> None:
    assert_reason(variable_reasons(variables, chip), reason)


@pytest.mark.parametrize(
    ("wire", "value", "reason"),
    [
        (BF16, "1", f"{INT8} is 1, but the wire format is bf16; unset it"),
        (BF16, "0", None),
        (INT8_PER_TOKEN, "1", None),
        (INT8_PER_TOKEN, "0", None),
    ],
)
def test_the_switch_for_int8_may_not_contradict_the_rows(
    wire: WireFormat, value: str, reason: str | None
) -> None:
    assert_reason(int8_reasons(wire, {INT8: value}), reason)


def test_a_device_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with install("ascend") as module, soc("A3"):
        assert AscendBuffer.probe(this_machine()).ok
        monkeypatch.setattr(module, "cpu_device_name", lambda: "Ascend310P3")
        (reason,) = AscendBuffer.probe(this_machine()).reasons
    assert reason == (
        "the device is Ascend310P3, expected one of Ascend910B, Ascend910_93, Ascend950"
    )
