from collections.abc import Mapping
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epcomm.fuseep import ascend
from epcomm.fuseep.ascend import DispatchFFNCombine, FusedDeepMoE, MegaMoE
from epcomm.platforms.ascend.chip import Soc
from epcomm.platforms.machine import this_machine
from epcomm.quantization import INT8_PER_TOKEN
from epcomm.spec import BufferSpec
from epcomm.types import WireDtype, WireFormat

MODES = {"mode 1": FusedDeepMoE, "mode 2": DispatchFFNCombine, "mode 3": MegaMoE}
every_mode = pytest.mark.parametrize("mode", MODES)
WORLD_SIZE = 8
SPEC = BufferSpec(
    dispatch_format=INT8_PER_TOKEN,
    hidden_format=WireFormat(dtype=WireDtype.BF16),
    hidden_size=2048,
    intermediate_size=1024,
    num_local_experts=16,
    top_k=8,
    max_tokens_per_rank=128,
)
# Mode 1 needs 8 * 128 * 16 * 2048 * 4 B = 128 MiB of the 200 MiB that are the default.
NOTHING: Mapping[str, str] = {}
TWICE_I = "2 * intermediate_size"
LARGE_WINDOW = {"HCCL_BUFFSIZE": "9000"}


def reasons_of(
    mode: str,
    spec: BufferSpec = SPEC,
    *,
    world_size: int = WORLD_SIZE,
    soc: Soc | None = Soc.A3,
    environment: Mapping[str, str] = NOTHING,
) -> list[str]:
    machine = replace(this_machine(), environment=environment)
    with patch.object(ascend, "current_soc", lambda: soc):
        return list(MODES[mode].lacks_with(machine, spec, world_size))


@every_mode
@pytest.mark.parametrize("soc", [None, Soc.A3])
def test_sizes_of_a_real_model_are_served(mode: str, soc: Soc | None) -> None:
    assert reasons_of(mode, soc=soc) == []


@every_mode
def test_other_processors_are_refused(mode: str) -> None:
    assert reasons_of(mode, soc=Soc.A2) == [
        "the chip is A2, expected A3: FuseEP is not built for it"
    ]
    on_a5 = {
        "mode 1": "fused_deep_moe takes MX weights there, not INT8",
        "mode 2": "dispatch_ffn_combine does not exist there",
        "mode 3": "mega_moe of deep_ep is documented for A3 alone",
    }
    assert reasons_of(mode, soc=Soc.A5) == [f"the chip is A5, expected A3: {on_a5[mode]}"]


@pytest.mark.parametrize(
    ("field", "fits", "breaks", "reason"),
    [
        ("hidden_size", 512, 496, "hidden_size is 496, expected 512 to 7168"),
        ("hidden_size", 7168, 7184, "hidden_size is 7184, expected 512 to 7168"),
        ("hidden_size", 2064, 2056, "hidden_size is 2056, expected a multiple of 16"),
        ("intermediate_size", 512, 448, f"{TWICE_I} is 896, expected 1024 to 6144"),
        ("intermediate_size", 3072, 3136, f"{TWICE_I} is 6272, expected 1024 to 6144"),
        ("intermediate_size", 832, 800, f"{TWICE_I} is 1600, expected a multiple of 128"),
        ("top_k", 12, 13, "top_k is 13, at most 12"),
        ("num_local_experts", 24, 25, "num_local_experts is 25, at most 24"),
    ],
)
def test_mode_1_ends_where_its_tiling_says(field: str, fits: int, breaks: int, reason: str) -> None:
    for value, expected in ((fits, []), (breaks, [reason])):
        spec = replace(SPEC, **{field: value})
        assert reasons_of("mode 1", spec, environment=LARGE_WINDOW) == expected


def test_mode_1_ends_at_512_experts_and_at_its_window() -> None:
    for num_local, reasons in ((16, []), (17, ["num_experts is 544, at most 512"])):
        spec = replace(SPEC, num_local_experts=num_local)
        found = reasons_of("mode 1", spec, world_size=32, environment=LARGE_WINDOW)
        assert found == reasons
    too_small = "needs a window of 201 MiB, but HCCL_BUFFSIZE is 200; set it to 201 on all ranks"
    for hidden_size, reasons in ((3200, []), (3216, [too_small])):
        assert reasons_of("mode 1", replace(SPEC, hidden_size=hidden_size)) == reasons


def test_windows_by_hand() -> None:
    # 8 ranks * 128 tokens * 16 experts * 2048 elements * 2 B, in dispatch and combine.
    assert FusedDeepMoE.window_bytes(SPEC, 8) == 134_217_728
    # 3 B * 128 tokens * 8 * 2048 + 10 * 1048576.
    assert DispatchFFNCombine.window_bytes(SPEC, 8) == 6_291_456 + 10_485_760
    # Longer batches take several calls of 256 tokens.
    long = replace(SPEC, max_tokens_per_rank=5000)
    assert FusedDeepMoE.max_call_tokens(long) == 256
    assert FusedDeepMoE.window_bytes(long, 8) == 2 * 134_217_728
    assert DispatchFFNCombine.window_bytes(long, 8) == 2 * 6_291_456 + 10_485_760


def test_a_budget_that_would_lose_rows_is_refused() -> None:
    """With two experts per rank, at most 128 tokens * 8 ranks * 2 rows arrive, although K is 8."""
    spec = replace(SPEC, num_local_experts=2)
    assert reasons_of("mode 2", replace(spec, max_recv_slots=2048)) == []
    # 128 is what another framework passes for the tokens of a rank.
    for too_few in (128, 2047):
        assert reasons_of("mode 2", replace(spec, max_recv_slots=too_few)) == [
            f"max_recv_slots is {too_few}, but a rank may receive 2048 rows (128 tokens * 8 ranks "
            "* 2 experts of a rank), and rows beyond it would vanish silently; set it to 2048 or "
            "leave it None"
        ]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    num_local_experts=st.integers(1, 5),
    top_k=st.integers(1, 6),
    world_size=st.integers(1, 4),
    num_tokens=st.integers(1, 300),
)
def test_the_safe_budget_holds_the_worst_routing_and_no_row_more(
    num_local_experts: int, top_k: int, world_size: int, num_tokens: int
) -> None:
    """In the worst routing every token of every rank uses all experts of rank 0 that it can."""
    num_experts = num_local_experts * world_size
    top_k = min(top_k, num_experts)
    spec = replace(
        SPEC, num_local_experts=num_local_experts, top_k=top_k, max_tokens_per_rank=num_tokens
    )
    call = min(num_tokens, 256)
    ids = torch.arange(top_k).expand(world_size * call, top_k)
    most = DispatchFFNCombine.max_received_rows(spec, world_size)
    assert most == int((ids < num_local_experts).sum())


@pytest.mark.parametrize(
    ("mode", "changes", "world_size", "reason"),
    [
        ("mode 2", {"hidden_size": 1024, "intermediate_size": 3072}, 64, None),
        ("mode 2", {"hidden_size": 8192, "num_local_experts": 40, "top_k": 16}, 8, None),
        ("mode 2", {"hidden_size": 512}, 8, "is 512, expected 1024 to 8192"),
        ("mode 2", {"hidden_size": 2304}, 8, "is 2304, expected a multiple of 512"),
        ("mode 2", {"intermediate_size": 512}, 8, "is 1024, expected 2048 to 6144"),
        ("mode 2", {"intermediate_size": 1280}, 8, "is 2560, expected a multiple of"),
        ("mode 2", {}, 65, "serves 1 to 64 ranks, not 65"),
        ("mode 3", {"hidden_size": 1536}, 2, None),
        ("mode 3", {"hidden_size": 1280}, 2, "hidden_size is 1280, expected a multiple"),
        ("mode 3", {"hidden_size": 8704}, 2, "hidden_size is 8704, expected 1024 to 8192"),
        ("mode 3", {"intermediate_size": 3584}, 2, "is 7168, expected 1024 to 6144"),
        ("mode 3", {}, 1, "serves 2 to 128 ranks, not 1"),
        ("mode 3", {"top_k": 17}, 2, "top_k is 17, at most 16"),
    ],
)
def test_sizes_of_later_modes(
    mode: str, changes: dict[str, int], world_size: int, reason: str | None
) -> None:
    spec = replace(SPEC, **changes)
    found = reasons_of(mode, spec, world_size=world_size, environment=LARGE_WINDOW)
    assert found == [] if reason is None else [reason in text for text in found] == [True]
