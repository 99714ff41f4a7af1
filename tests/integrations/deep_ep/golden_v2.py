"""Recorded values of deep_ep V2, and the part that does not depend on the order of rows."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epcomm.integrations.deep_ep import EPHandle

CONTRACTS = Path(__file__).parents[2] / "contracts"
SIGNATURES = CONTRACTS / "deep_ep_v2_signatures.json"
CASES: Mapping[str, list[dict[str, Any]]] = json.loads(
    (CONTRACTS / "deep_ep_v2_golden.json").read_text("utf-8")
)["cases"]

NUM_EXPERTS = 8
NUM_TOPK = 3
HIDDEN = 512
MAX_TOKENS = 8
NUM_SMS = 8

# The fields of a handle that are numbers of the host or sums: compared as they are.
EXACT_FIELDS = (
    "do_expand",
    "num_experts",
    "expert_alignment",
    "num_max_tokens_per_rank",
    "num_sms",
    "num_recv_tokens",
    "num_expanded_tokens",
    "num_recv_tokens_per_expert_list",
)
EXACT_TENSORS = (
    "psum_num_recv_tokens_per_expert",
    "psum_num_recv_tokens_per_scaleup_rank",
    "num_unaligned_recv_tokens_per_expert",
)


def recorded(entry: dict[str, Any]) -> Tensor:
    """Return the tensor of an entry; its first columns, where only those are listed."""
    values = torch.tensor(entry["values"], dtype=getattr(torch, entry["dtype"]))
    # The recording of a rank without rows has no columns either.
    return values if values.numel() else values.reshape(0, *entry["shape"][1:2])


def inputs_of(case: dict[str, Any], rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, topk_idx and topk_weights of a rank, as the file describes them."""
    inputs = case["inputs"]
    num_tokens = inputs["T"]
    tokens = torch.arange(num_tokens)
    x = (8 * rank + tokens).unsqueeze(1).repeat(1, HIDDEN)
    x[:, 0], x[:, 1] = rank, tokens
    topk_idx = torch.tensor(inputs["topk_idx"], dtype=torch.int64).reshape(num_tokens, NUM_TOPK)
    weights = torch.tensor(inputs["topk_weights"]).reshape(num_tokens, NUM_TOPK)
    return x.bfloat16(), topk_idx, weights


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


def recorded_handle(entry: dict[str, Any]) -> dict[str, Tensor]:
    return {key: recorded(value) for key, value in entry.items() if isinstance(value, dict)}


def num_messages(handle: EPHandle) -> int:
    """Return the number of received messages, also if the host did not wait for it."""
    return int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
