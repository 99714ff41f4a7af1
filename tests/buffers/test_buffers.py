"""Run the buffer suite on every buffer that runs on a CPU, on 1 to 8 ranks and under MPI."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import pytest

from epcomm import EPGroup, Mode
from epcomm.quantization import FP8_FLOAT32_SCALES, FP8_POWER_OF_TWO_SCALES, INT8_PER_TOKEN
from epcomm.testing import buffer_suite

if TYPE_CHECKING:
    from mpi4py import MPI


class Case(NamedTuple):
    """A buffer and the mode it serves."""

    backend: str
    mode: Mode


CASES = {
    "normal": Case("CollectiveBuffer", Mode.NORMAL),
    "shared_memory": Case("SharedMemoryBuffer", Mode.NORMAL),
    "standard": Case("AllGatherBuffer", Mode.STANDARD),
    "normal_budget": Case("StaticCollectiveBuffer", Mode.NORMAL),
    "low_latency": Case("StaticCollectiveBuffer", Mode.LOW_LATENCY),
}


# Eight bits on the wire, everywhere. They change what a row looks like, and nothing between ranks:
# the contract is kept on two, and one batch crosses four.
QUANTIZED = {
    "fp8": FP8_FLOAT32_SCALES,
    "fp8_powers_of_two": FP8_POWER_OF_TWO_SCALES,
    "int8": INT8_PER_TOKEN,
}
# Shared memory carries the same messages as the collective buffer.
QUANTIZED_CASES = [name for name in CASES if name != "shared_memory"]
# A batch whose rows are of several blocks, the last one short.
BLOCKS = replace(buffer_suite.BATCH_SPECS["bf16"], hidden_size=300)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wire", QUANTIZED)
@pytest.mark.parametrize("case", QUANTIZED_CASES)
@pytest.mark.parametrize("scenario", buffer_suite.SCENARIOS)
def test_quantized_rows_keep_the_contract(scenario: str, case: str, wire: str) -> None:
    with EPGroup() as group:
        env = buffer_suite.BufferEnv(
            group=group,
            backend=CASES[case].backend,
            mode=CASES[case].mode,
            wire=QUANTIZED[wire],
        )
        buffer_suite.run_scenario(scenario, env)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("wire", QUANTIZED)
@pytest.mark.parametrize("case", QUANTIZED_CASES)
def test_rows_of_several_blocks_arrive_bit_equal(case: str, wire: str) -> None:
    with EPGroup() as group:
        env = buffer_suite.BufferEnv(
            group=group,
            backend=CASES[case].backend,
            mode=CASES[case].mode,
            wire=QUANTIZED[wire],
        )
        buffer_suite.check_batch(env, BLOCKS)


@pytest.mark.ranks(1, 2, 3, 4, 8)
@pytest.mark.mpi_ranks(2, 4)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("scenario", buffer_suite.SCENARIOS)
def test_buffer_keeps_its_contract(scenario: str, case: str, ep_ranks: MPI.Comm | None) -> None:
    with EPGroup(ep_ranks) as group:
        env = buffer_suite.BufferEnv(
            group=group, backend=CASES[case].backend, mode=CASES[case].mode
        )
        buffer_suite.run_scenario(scenario, env)
