from dataclasses import replace
from types import MappingProxyType

import pytest
import torch
from torch import Tensor

from epcomm import EPGroup, Mode, WireDtype, WireFormat
from epcomm.buffers.sizes import CallShape, RowBytes
from epcomm.spec import HostLayout
from epcomm.testing import buffer_suite
from epcomm.testing.data import BatchSpec
from epcomm.types import RowsPer
from tests.buffers.test_buffers import BLOCKS, FORMATS

# Ranks of a host are contiguous, or strided as in a mesh whose first dimension is inside hosts.
LAYOUTS = MappingProxyType(
    {"neighbours": HostLayout.of([0, 0, 1, 1]), "apart": HostLayout.of([0, 1, 0, 1])}
)


def env_of(group: EPGroup, layout: str) -> buffer_suite.BufferEnv:
    # Between GPUs of a host, the kernels for NVLink support no other rows.
    dtype = torch.bfloat16 if group.device.type == "cuda" else None
    return buffer_suite.BufferEnv(
        group=group,
        backend="HierarchicalBuffer",
        mode=Mode.NORMAL,
        hosts=LAYOUTS[layout],
        dtype=dtype,
    )


@pytest.mark.mpi_ranks(4)
@pytest.mark.parametrize("scenario", ["uneven", "faults", "combine_faults"])
def test_two_hosts_over_mpi_keep_the_contract(scenario: str, group: EPGroup) -> None:
    buffer_suite.run_scenario(scenario, env_of(group, "neighbours"))


# Scenarios whose rows and counts the two buffers inside could treat in another way than either of
# them alone.
QUICK = (
    *("uneven", "empty_rank", "holes", "many_experts", "aligned_holes", "stand_alone"),
    *("more_in_flight", "faults", "combine_faults", "repeated_ids"),
)
# A plan predicts the bytes of the largest call, but the scenario "traffic" sends another one.
SCENARIOS = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
    for name in buffer_suite.SCENARIOS
    if name != "traffic"
]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_hosts_of_two_ranks_keep_the_contract(scenario: str, group: EPGroup) -> None:
    env = env_of(group, "apart" if scenario == "uneven" else "neighbours")
    buffer_suite.run_scenario(scenario, env)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("wire", FORMATS)
def test_rows_of_every_format_arrive_as_the_codec_restores_them(wire: str, group: EPGroup) -> None:
    env = replace(env_of(group, "neighbours"), wire=FORMATS[wire])
    buffer_suite.check_batch(env, BLOCKS)
    buffer_suite.check_wire_tensors(env, BLOCKS)


def on_every_rank(num_tokens: int, top_k: int, num_experts: int, _: torch.Generator) -> Tensor:
    """Return ids that choose the first expert of each of K ranks, for all tokens."""
    ids = torch.arange(0, num_experts, num_experts // top_k, device="cpu")
    return ids.repeat(num_tokens, 1)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("combine", [None, WireFormat(dtype=WireDtype.MXFP8)], ids=str)
def test_the_largest_call_sends_the_bytes_that_are_predicted(
    combine: WireFormat | None, layout: str, group: EPGroup
) -> None:
    env = replace(env_of(group, layout), combine=combine)
    spec = env.adapted(BatchSpec(top_k=4, tokens_of_rank=lambda *_: 3, choose_ids=on_every_rank))
    buffer, batches = env.open(spec), env.batches(spec)
    out = buffer.dispatch(buffer_suite.make_call(batches[group.rank]))
    buffer.combine(out.rows.data, out.exchange_plan, rows_per=RowsPer.ROW)
    call = CallShape.most(3, 4, group.world_size, env.hosts)
    predicted = type(buffer).wire_bytes(env.buffer_spec(spec), call)
    # For 3 tokens, one row is sent to the other host, and its sum is returned: quantised, with one
    # scale, in multiples of 16 B. Inside the host, it is not quantised.
    row = RowBytes.of(env.buffer_spec(spec))
    assert row.combine == (spec.hidden_size + 16 if combine else batches[0].x[0].nbytes)
    assert predicted.bytes_between == 3 * (row.dispatch + row.combine)
    assert predicted.combine_bytes == 3 * (row.combine + 2 * batches[0].x[0].nbytes)
    assert buffer.traffic() == predicted
