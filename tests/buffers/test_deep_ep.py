"""The deep_ep buffers pass the buffer suite on stand-ins for the package, over CPU ranks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from epcomm import EPGroup, Mode
from epcomm.quantization import FP8_FLOAT32_SCALES, FP8_POWER_OF_TWO_SCALES
from epcomm.testing import buffer_suite
from epcomm.testing.deep_ep import install
from epcomm.testing.deep_ep.v1 import buffer as v1_buffer


@dataclass(frozen=True, kw_only=True)
class Case:
    """A buffer, and sizes that its package takes."""

    package: str
    backend: str
    mode: Mode
    hidden_size: int
    token_multiple: int | None = None


CASES = {
    case.backend: case
    for case in (
        Case(package="v1", backend="deep_ep_v1", mode=Mode.NORMAL, hidden_size=256),
        Case(package="v1", backend="deep_ep_v1_static", mode=Mode.NORMAL, hidden_size=256),
        Case(
            package="v1",
            backend="deep_ep_v1_low_latency",
            mode=Mode.LOW_LATENCY,
            hidden_size=2048,
            token_multiple=4,
        ),
        Case(
            package="v2", backend="deep_ep_v2", mode=Mode.NORMAL, hidden_size=256, token_multiple=1
        ),
        Case(package="v2", backend="deep_ep_v2_static", mode=Mode.NORMAL, hidden_size=256),
        Case(
            package="v2",
            backend="deep_ep_v2_expand",
            mode=Mode.NORMAL,
            hidden_size=256,
            token_multiple=1,
        ),
        Case(
            package="v2", backend="deep_ep_v2_low_latency", mode=Mode.LOW_LATENCY, hidden_size=256
        ),
    )
}
WIRES = {"bf16": None, "fp8": FP8_FLOAT32_SCALES, "fp8_powers_of_two": FP8_POWER_OF_TWO_SCALES}
# Rows are of one size and bfloat16 here, whatever a batch says, and rooms of one size are not
# aligned any further.
SCENARIOS = [name for name in buffer_suite.SCENARIOS if name not in ("fp16", "bf16", "odd_hidden")]
ALIGNED = ("aligned", "aligned_holes")


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    ("backend", "scenario"),
    [
        (backend, scenario)
        for backend in CASES
        for scenario in SCENARIOS
        if not (scenario in ALIGNED and backend == "deep_ep_v1_low_latency")
    ],
)
def test_deep_ep_buffer_keeps_its_contract(
    backend: str, scenario: str, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[backend]
    # The real package refuses torch's poison, for it fills beside its stream; a CPU has none.
    monkeypatch.setattr(v1_buffer, "_check_torch_deterministic", lambda: None)
    with install(case.package), EPGroup() as group:
        env = buffer_suite.BufferEnv(
            group=group,
            backend=backend,
            mode=case.mode,
            wire=WIRES[wire],
            hidden_size=case.hidden_size,
            dtype=torch.bfloat16,
            token_multiple=case.token_multiple,
        )
        buffer_suite.run_scenario(scenario, env)
