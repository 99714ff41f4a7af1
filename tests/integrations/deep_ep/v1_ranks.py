"""Shared by the tests of the drop-in for deep_ep V1: the recording, its inputs, typed calls."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from epcomm.integrations.deep_ep import Buffer as DropIn
from epcomm.integrations.deep_ep import EventOverlap
from fakes.deep_ep.strict_v1 import Buffer
from fakes.deep_ep.undefined import undefined_integer
from tests.integrations.deep_ep.devices import here, world

CONTRACTS = Path(__file__).parents[2] / "contracts"
CASES = json.loads((CONTRACTS / "deep_ep_v1_recording.json").read_text("utf-8"))["cases"]

# Sizes of the recording: experts, top-k, most tokens, hidden sizes, SMs.
E, K, M, H, LL_H = 8, 3, 16, 256, 2048
NUM_SMS = 8
# Enough for normal mode with NUM_SMS on 4 ranks.
NVL_BYTES = 1 << 26
UNDEFINED_INT32 = undefined_integer(torch.int32)


@pytest.fixture(autouse=True)
def recorded_sms() -> Iterator[None]:
    """Set the number of SMs of the recording, which has 4 channels."""
    before = Buffer.num_sms
    Buffer.set_num_sms(NUM_SMS)
    yield
    Buffer.set_num_sms(before)


def normal_buffer() -> Buffer:
    return Buffer(world(), num_nvl_bytes=NVL_BYTES)


def low_latency_buffer(num_nvl_bytes: int = 0, *, enable_shrink: bool = False) -> Buffer:
    num_bytes = Buffer.get_low_latency_rdma_size_hint(M, LL_H, 4, E)
    return Buffer(
        world(), num_nvl_bytes, num_bytes, low_latency_mode=True, enable_shrink=enable_shrink
    )


@dataclass(frozen=True)
class Inputs:
    """x [T, H], ids [T, K], weights [T, K] of this rank."""

    x: Tensor
    ids: Tensor
    weights: Tensor


def recorded_case(case: str) -> dict[str, Any]:
    return CASES[case][dist.get_rank()]


def inputs_of(case: str, hidden_size: int) -> Inputs:
    recorded = recorded_case(case)["inputs"]
    rank, num_tokens = dist.get_rank(), recorded["T"]
    tokens = torch.arange(num_tokens)
    x = (8.0 * rank + tokens).unsqueeze(1).repeat(1, hidden_size).to(torch.bfloat16)
    x[:, 0], x[:, 1] = rank, tokens.to(torch.bfloat16)
    ids = torch.tensor(recorded["topk_idx"], dtype=torch.int64).view(num_tokens, K)
    weights = torch.tensor(recorded["topk_weights"]).view(num_tokens, K)
    return Inputs(x.to(here()), ids.to(here()), weights.to(here()))


def agrees(tensor: Tensor | None, recorded: dict[str, Any]) -> None:
    """Return whether shape, strides, dtype and the recorded columns agree."""
    assert str(tensor.dtype) == f"torch.{recorded['dtype']}"
    assert list(tensor.shape) == recorded["shape"]
    assert list(tensor.stride()) == recorded["stride"]
    values = tensor.float() if tensor.dtype.is_floating_point else tensor
    columns = recorded.get("first_columns")
    if columns is not None:
        # In these inputs, all columns after the last listed one are equal to it.
        assert torch.equal(values[:, columns:], values[:, columns - 1 : -1])
        values = values[:, :columns]
    assert values.tolist() == recorded["values"]


@contextmanager
def refused(match: str) -> Iterator[None]:
    with pytest.raises(RuntimeError, match=match):
        yield


@dataclass(frozen=True, kw_only=True)
class NormalResult:
    x: Tensor
    scales: Tensor | None
    ids: Tensor
    weights: Tensor
    counts: list[int]
    handle: tuple[Tensor, ...]
    event: EventOverlap


def dispatch_normal(
    buffer: DropIn,
    inputs: Inputs,
    x: Tensor | tuple[Tensor, Tensor] | None = None,
    **options: Any,  # noqa: ANN401 - any of dispatch
) -> NormalResult:
    """Make the layout and the dispatch of `inputs`, or of another x with their ids."""
    per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(inputs.ids, E)
    recv_x, ids, weights, counts, handle, event = buffer.dispatch(
        inputs.x if x is None else x,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=is_in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=inputs.ids,
        topk_weights=inputs.weights,
        **options,
    )
    data, scales = recv_x if isinstance(recv_x, tuple) else (recv_x, None)
    assert handle[4] is is_in_rank
    return NormalResult(
        x=data, scales=scales, ids=ids, weights=weights, counts=counts, handle=handle, event=event
    )


def check_dispatch(received: NormalResult, recorded: dict[str, Any]) -> None:
    agrees(received.x, recorded["recv_x"])
    agrees(received.ids, recorded["recv_topk_idx"])
    agrees(received.weights, recorded["recv_topk_weights"])
    assert received.counts == recorded["num_recv_tokens_per_expert_list"]
    agrees(received.handle[0], recorded["handle_0_rank_prefix_matrix"])


def check_along(
    buffer: DropIn, inputs: Inputs, received: NormalResult, recorded: dict[str, Any]
) -> None:
    """Compare a combine of twice the rows, and a dispatch along the handle, with the recording."""
    combined_x, weights, _ = buffer.combine(received.x * 2, received.handle, received.weights)
    agrees(combined_x, recorded["combine_of_2x"]["combined_x"])
    agrees(weights, recorded["combine_of_2x"]["combined_topk_weights"])
    recv_x, *rest, event = buffer.dispatch(inputs.x + 1, handle=received.handle)
    agrees(recv_x, recorded["cached_dispatch_of_x_plus_1"]["recv_x"])
    assert rest == [None] * 4
    assert event.event is None


def recorded_fp8(inputs: Inputs) -> tuple[Tensor, Tensor]:
    tokens = 2.0 * torch.arange(len(inputs.x), device=here()).unsqueeze(1)
    scales = 1 + tokens + torch.arange(2.0, device=here()) + 100.0 * dist.get_rank()
    return (inputs.x.float() / 16).to(torch.float8_e4m3fn), scales


@dataclass(frozen=True, kw_only=True)
class LowLatencyResult:
    x: Tensor
    scales: Tensor | None
    count: Tensor
    handle: tuple[Tensor, Tensor, int, int, int]
    event: EventOverlap
    hook: Callable[[], object] | None

    def receive(self) -> None:
        self.hook()


def dispatch_low_latency(
    buffer: DropIn,
    inputs: Inputs,
    **options: Any,  # noqa: ANN401 - any of low_latency_dispatch
) -> LowLatencyResult:
    recv_x, count, handle, event, hook = buffer.low_latency_dispatch(
        inputs.x, inputs.ids, M, E, **options
    )
    data, scales = recv_x if isinstance(recv_x, tuple) else (recv_x, None)
    return LowLatencyResult(
        x=data, scales=scales, count=count, handle=handle, event=event, hook=hook
    )


def by_source(ranges: list[list[int]], *columns: list[Any]) -> list[list[str]]:
    """Return the rows of an expert, sorted within each source, whose order is undefined."""
    rows = [str(row) for row in zip(*columns, strict=True)]
    return [sorted(rows[first : first + count]) for first, count in ranges]


def check_slabs(received: LowLatencyResult, recorded: dict[str, Any]) -> None:
    """Compare a low-latency dispatch with the recording, except for the order within a source."""
    assert list(received.x.shape) == recorded["recv_shape"]
    assert str(received.x.dtype) == recorded["recv_dtype"]
    assert received.count.dtype == torch.int32
    assert received.count.tolist() == recorded["recv_count"]
    assert list(received.handle[2:]) == recorded["handle_tail"]
    if received.scales is not None:
        assert list(received.scales.shape) == recorded["scales"]["shape"]
        assert list(received.scales.stride()) == recorded["scales"]["stride"]
        assert str(received.scales.dtype) == recorded["scales"]["dtype"]
    src_info, layout_range = received.handle[:2]
    for expert, num_rows in enumerate(recorded["recv_count"]):
        found = [received.x[expert, :num_rows, :3].float().tolist()]
        found.append(src_info[expert, :num_rows].tolist())
        expected = [recorded["rows"][expert]["values"], recorded["src_info"][expert]]
        if received.scales is not None:
            found.append(received.scales[expert, :num_rows, :2].tolist())
            expected.append(recorded["scales"]["first"][expert])
        ranges = [[value >> 32, value & 0xFFFFFFFF] for value in layout_range[expert].tolist()]
        expected_rows = by_source(recorded["layout_range"][expert], *expected)
        assert by_source(ranges, *found) == expected_rows


def experts(recv_x: Tensor) -> Tensor:
    """Return the rows times 1 + the global expert, as in the recording."""
    factors = 1 + 2 * dist.get_rank() + torch.arange(2, device=recv_x.device).view(2, 1, 1)
    return (recv_x * factors).to(torch.bfloat16)
