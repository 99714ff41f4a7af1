"""Shared by tests of V2: buffers, inputs, one dispatch, and comparison with the recording."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epcomm.integrations.deep_ep import ElasticBuffer, EPHandle, EventOverlap
from tests.integrations.deep_ep.devices import here, world

CONTRACTS = Path(__file__).parents[2] / "contracts"
SIGNATURES = CONTRACTS / "deep_ep_v2_signatures.json"
CASES: Mapping[str, list[dict[str, Any]]] = json.loads(
    (CONTRACTS / "deep_ep_v2_golden.json").read_text("utf-8")
)["cases"]

NUM_EXPERTS, NUM_TOPK, HIDDEN, MAX_TOKENS, NUM_SMS = 8, 3, 512, 8, 8

# The fields of a handle that are numbers of the host or sums: compared as they are.
EXACT_FIELDS = (
    *("do_expand", "num_experts", "expert_alignment", "num_max_tokens_per_rank"),
    *("num_sms", "num_recv_tokens", "num_expanded_tokens", "num_recv_tokens_per_expert_list"),
)
EXACT_TENSORS = (
    "psum_num_recv_tokens_per_expert",
    "psum_num_recv_tokens_per_scaleup_rank",
    "num_unaligned_recv_tokens_per_expert",
)
UNEVEN = CASES["v2_rows_uneven"]
TWO_MB = 1 << 21
BufferMaker = Callable[..., ElasticBuffer]


@contextmanager
def buffers_of(kind: type[ElasticBuffer]) -> Iterator[BufferMaker]:
    """Make buffers of the size of the recorded cases, and destroy them at the end."""
    made: list[ElasticBuffer] = []

    def make(**options: Any) -> ElasticBuffer:  # noqa: ANN401 - any of the constructor
        sizes = {"num_max_tokens_per_rank": MAX_TOKENS, "hidden": HIDDEN, "num_topk": NUM_TOPK}
        made.append(kind(world(), **(sizes | {"explicitly_destroy": True} | options)))
        return made[-1]

    yield make
    for buffer in made:
        buffer.destroy()


def dispatch(
    buffer: ElasticBuffer,
    x: Tensor | tuple[Tensor, Tensor] | None = None,
    **options: Any,  # noqa: ANN401 - any of dispatch
) -> tuple[Any, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
    """Dispatch this rank's tokens of the uneven case, or x over its routes."""
    own_x, topk_idx, weights = inputs_here(UNEVEN[buffer.rank_idx], buffer.rank_idx)
    own_routes: dict[str, Any] = {"topk_idx": topk_idx, "topk_weights": weights}
    routes = {} if "handle" in options else own_routes
    defaults: dict[str, Any] = {"num_experts": NUM_EXPERTS, "num_sms": NUM_SMS}
    return buffer.dispatch(own_x if x is None else x, **(defaults | routes | options))


def run_recorded_case(name: str, make_buffer: BufferMaker) -> None:
    """Compare a dispatch, and the combine of twice its rows, with the recording from GPUs."""
    buffer = make_buffer()
    rank = buffer.rank_idx
    case = CASES[name][rank]
    x, topk_idx, weights = inputs_here(case, rank)
    recv_x, recv_idx, recv_weights, handle, _ = buffer.dispatch(
        x,
        topk_idx,
        weights,
        num_experts=NUM_EXPERTS,
        expert_alignment=case["handle"]["expert_alignment"],
        num_sms=NUM_SMS,
        do_cpu_sync="no_cpu_sync" not in name,
        do_expand="expand" in name,
    )
    found = {"recv_x": recv_x, "recv_topk_idx": recv_idx, "recv_topk_weights": recv_weights}
    for key, tensor in found.items():
        check_shape(tensor, case[key])
    check_handle(handle, case["handle"])
    check_rows(recv_x, recv_idx, recv_weights, handle, case)
    combined, _, _ = buffer.combine(2 * recv_x, handle)
    check_shape(combined, case["combine_of_2x"])
    assert combined[:, :3].tolist() == case["combine_of_2x"]["values"]


def check_shape(tensor: Tensor | None, entry: dict[str, Any] | None) -> None:
    if entry is None or tensor is None:
        assert entry is tensor
        return
    assert list(tensor.shape) == entry["shape"]
    assert list(tensor.stride()) == entry["stride"]
    assert str(tensor.dtype) == f"torch.{entry['dtype']}"


def check_handle(handle: EPHandle, entry: dict[str, Any]) -> None:
    assert {key: getattr(handle, key) for key in EXACT_FIELDS} == {
        key: entry[key] for key in EXACT_FIELDS
    }
    for key in EXACT_TENSORS:
        check_shape(getattr(handle, key), entry[key])
        assert getattr(handle, key).tolist() == entry[key]["values"]
    check_shape(handle.recv_src_metadata, entry["recv_src_metadata"])


def check_rows(
    recv_x: Tensor, recv_idx: Tensor | None, weights: Tensor, handle: EPHandle, case: dict[str, Any]
) -> None:
    """Compare with the recorded rows, in any order that the package may give."""
    count, metadata = num_messages(handle), recorded(case["handle"]["recv_src_metadata"])
    recorded_x, recorded_weights = recorded(case["recv_x"]), recorded(case["recv_topk_weights"])
    # Source ranks follow one another.
    sources = handle.recv_src_metadata[:count, 0] // MAX_TOKENS
    assert sources.tolist() == sorted(sources.tolist())
    if recv_idx is not None:
        recorded_idx = recorded(case["recv_topk_idx"])
        assert rows_by_source(
            recv_x, recv_idx, weights, handle.recv_src_metadata, count
        ) == rows_by_source(recorded_x, recorded_idx, recorded_weights, metadata, count)
        return
    # Starts of experts after the first tell to which one a row belongs.
    ends = handle.psum_num_recv_tokens_per_expert
    starts = (ends - handle.num_unaligned_recv_tokens_per_expert)[1:]
    assert rows_by_choice(
        recv_x, weights, handle.recv_src_metadata, starts, count
    ) == rows_by_choice(recorded_x, recorded_weights, metadata, starts, count)


def recorded(entry: dict[str, Any]) -> Tensor:
    """Return the tensor of an entry; its first columns, where only those are listed."""
    values = torch.tensor(entry["values"], dtype=getattr(torch, entry["dtype"]))
    # The recording of a rank without rows has no columns either.
    return values if values.numel() else values.reshape(0, *entry["shape"][1:2])


def inputs_here(case: dict[str, Any], rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, topk_idx and topk_weights of a rank, as the file describes them, on its device."""
    inputs = case["inputs"]
    num_tokens = inputs["T"]
    tokens = torch.arange(num_tokens)
    x = (8 * rank + tokens).unsqueeze(1).repeat(1, HIDDEN)
    x[:, 0], x[:, 1] = rank, tokens
    topk_idx = torch.tensor(inputs["topk_idx"], dtype=torch.int64).reshape(num_tokens, NUM_TOPK)
    weights = torch.tensor(inputs["topk_weights"]).reshape(num_tokens, NUM_TOPK)
    return x.bfloat16().to(here()), topk_idx.to(here()), weights.to(here())


def rows_by_source(
    x: Tensor, topk_idx: Tensor, weights: Tensor, metadata: Tensor, num_rows: int
) -> list[tuple[float, ...]]:
    """Return unexpanded rows by their source token, which the metadata names first."""
    columns = [metadata[:num_rows, :2], x[:num_rows, :3], topk_idx[:num_rows], weights[:num_rows]]
    return sorted(map(tuple, torch.cat([column.double() for column in columns], dim=1).tolist()))


def rows_by_choice(
    x: Tensor, weights: Tensor, metadata: Tensor, ends: Tensor, num_messages: int
) -> list[tuple[float, ...]]:
    """Return expanded rows by source token and k, with the local expert of their segment."""
    rows = []
    for source, master, *slots in metadata[:num_messages].tolist():
        for k, slot in enumerate(slots):
            if slot >= 0:
                expert = int((ends <= slot).sum())
                row = [float(value) for value in x[slot, :3]]
                rows.append((source, master, k, expert, *row, float(weights[slot])))
    return sorted(rows)


def num_messages(handle: EPHandle) -> int:
    """Return the number of received messages, also if the host did not wait for it."""
    return int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
