"""Every buffer that runs on a CPU passes the whole buffer suite on 2 ranks.

Other numbers of ranks and MPI run the scenarios that can fail there but not on 2 ranks.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch

from epcomm import EPGroup, Mode, WireDtype, WireFormat
from epcomm.quantization import FP8_FLOAT32_SCALES, FP8_POWER_OF_TWO_SCALES, INT8_PER_TOKEN
from epcomm.registry import buffer_class
from epcomm.spec import HostLayout
from epcomm.testing import buffer_suite
from epcomm.types import SUM_DTYPES

if TYPE_CHECKING:
    from mpi4py import MPI


class Case(NamedTuple):
    """A buffer and its mode."""

    backend: str
    mode: Mode


CASES = {
    "normal": Case("CollectiveBuffer", Mode.NORMAL),
    "shared_memory": Case("SharedMemoryBuffer", Mode.NORMAL),
    "standard": Case("AllGatherBuffer", Mode.STANDARD),
    "normal_budget": Case("StaticCollectiveBuffer", Mode.NORMAL),
    "low_latency": Case("StaticCollectiveBuffer", Mode.LOW_LATENCY),
}


# Scenarios that depend on the transport and the number of ranks.
ON_ONE = ("faults",)
ON_THREE = ("stand_alone", "faults")
OVER_MPI = ("uneven", "all_empty", "faults", "combine_faults")
ON_FOUR = ("uneven", "holes", "stand_alone", "combine_faults", "budget", "repeated_ids")
ON_EIGHT = ("uneven", "holes")


def run(scenario: str, case: str, ep_ranks: "MPI.Comm | None" = None) -> None:
    with EPGroup(ep_ranks) as group:
        buffer_suite.run_scenario(scenario, format_env(group, case))


def cases_of(*scenarios: str) -> list[tuple[str, str]]:
    """Return the scenarios, each with the buffers for which it tests something."""
    return [
        (scenario, name)
        for scenario in scenarios
        for name, case in CASES.items()
        if buffer_suite.tests_anything(scenario, buffer_class(case.backend).caps(case.mode))
    ]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("scenario", "case"), cases_of(*buffer_suite.SCENARIOS))
def test_buffer_keeps_its_contract(scenario: str, case: str) -> None:
    run(scenario, case)


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize(("scenario", "case"), cases_of(*ON_FOUR))
def test_buffer_of_four_ranks_keeps_its_contract(scenario: str, case: str) -> None:
    run(scenario, case)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(("scenario", "case"), cases_of(*ON_ONE))
def test_buffer_of_one_rank_keeps_its_contract(scenario: str, case: str) -> None:
    run(scenario, case)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("scenario", "case"), cases_of(*ON_THREE))
def test_buffer_of_three_ranks_keeps_its_contract(scenario: str, case: str) -> None:
    run(scenario, case)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("case", ["normal", "standard", "low_latency"])
def test_bytes_between_hosts_are_those_predicted(case: str, group: EPGroup) -> None:
    # All hosts have different numbers of ranks, and the ranks of a host are not contiguous.
    hosts = HostLayout(host_of_rank=(0, 1, 0))
    buffer_suite.run_scenario("traffic", replace(format_env(group, case), hosts=hosts))
    sent = group.traffic()["collective"]
    assert sent.bytes_between > 0
    # Rank 1 is alone on its host.
    is_all = sent.bytes_between == sent.dispatch_bytes + sent.combine_bytes
    assert is_all == (group.rank == 1)


@pytest.mark.slow
@pytest.mark.ranks(8)
@pytest.mark.parametrize(("scenario", "case"), cases_of(*ON_EIGHT))
def test_buffer_of_eight_ranks_keeps_its_contract(scenario: str, case: str) -> None:
    run(scenario, case)


@pytest.mark.mpi_ranks(2, 4)
@pytest.mark.parametrize(("scenario", "case"), cases_of(*OVER_MPI))
def test_buffer_over_mpi_keeps_its_contract(scenario: str, case: str, ep_ranks: "MPI.Comm") -> None:
    run(scenario, case, ep_ranks)


# Eight or four bits on the wire change the rows, but not the exchange.
FORMATS = {
    "bf16": None,
    "fp8": FP8_FLOAT32_SCALES,
    "fp8_powers_of_two": FP8_POWER_OF_TWO_SCALES,
    "int8": INT8_PER_TOKEN,
    "mxfp8": WireFormat(dtype=WireDtype.MXFP8),
    "mxfp4": WireFormat(dtype=WireDtype.MXFP4),
    "nvfp4": WireFormat(dtype=WireDtype.NVFP4),
}
# Formats that EPConfig.combine_dtype names.
SUMS = [
    name
    for name, each in FORMATS.items()
    if each is None or (each.dtype in SUM_DTYPES and each == WireFormat(dtype=each.dtype))
]
FORMAT_CASES = {**CASES, "shared_memory_low": Case("SharedMemoryBuffer", Mode.LOW_LATENCY)}
# Shared memory sends the same messages as the collective buffer.
QUANTIZED_CASES = [name for name in CASES if name != "shared_memory"]
# Rows of several scale blocks with a short last block, and padding slots.
BLOCKS = replace(buffer_suite.BATCH_SPECS["holes"], hidden_size=300, dtype=torch.bfloat16)


def format_env(
    group: EPGroup, case: str, *, wire: str = "bf16", combine: str = "bf16"
) -> buffer_suite.BufferEnv:
    return buffer_suite.BufferEnv(
        group=group,
        backend=FORMAT_CASES[case].backend,
        mode=FORMAT_CASES[case].mode,
        wire=FORMATS[wire],
        combine=FORMATS[combine],
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", QUANTIZED_CASES)
@pytest.mark.parametrize(("scenario", "wire"), [("aligned", "int8"), ("traffic", "fp8")])
def test_quantized_rows_keep_the_contract(
    scenario: str, case: str, wire: str, group: EPGroup
) -> None:
    buffer_suite.run_scenario(scenario, format_env(group, case, wire=wire))


@pytest.mark.ranks(2, slow=(4,))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("combine", SUMS[1:])
@pytest.mark.parametrize("scenario", ["holes", "traffic", "stand_alone", "combine_faults"])
def test_quantised_sums_keep_the_contract(scenario: str, combine: str, case: str) -> None:
    with EPGroup() as group:
        env = format_env(group, case, combine=combine)
        if env.combine.dtype in env.caps.backward_dtypes:
            env = replace(env, backward=env.combine)
        buffer_suite.run_scenario(scenario, env)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wire", FORMATS)
@pytest.mark.parametrize("case", FORMAT_CASES)
def test_rows_of_several_blocks_arrive_bit_equal_also_if_quantised_already(
    case: str, wire: str, group: EPGroup
) -> None:
    env = format_env(group, case, wire=wire)
    buffer_suite.check_batch(env, BLOCKS)
    buffer_suite.check_wire_tensors(env, BLOCKS)
