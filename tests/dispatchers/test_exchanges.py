"""The exchanges of a rank in one call: rows, and a header if docs/failures.md says so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from epcomm import (
    DeepEPLowLatencyDispatcher,
    DeepEPNormalDispatcher,
    EPConfig,
    EPGroup,
    MoESpec,
    StandardDispatcher,
    TopKOutput,
)
from epcomm.collectives.base import Collectives, Splits
from epcomm.collectives.bounded import BoundedWait

SPEC = MoESpec(hidden_size=16, num_experts=2, top_k=2, dtype=torch.float32)
NUM_TOKENS = 3


class OneRank(Collectives):
    """Collectives of one rank that record the phase of each exchange."""

    def __init__(self, *, waits: bool) -> None:
        self.rank, self.world_size, self.device = 0, 1, torch.device("cpu")
        self.phases: list[str] = []
        if waits:
            self.bounded = cast(BoundedWait, SimpleNamespace(timeout_s=1.0))

    def _all_to_all(
        self, recv: Tensor, send: Tensor, recv_splits: Splits, send_splits: Splits, phase: str
    ) -> None:
        self.phases.append(phase)
        recv.copy_(send)

    def _all_gather(self, recv: Tensor, tensor: Tensor, phase: str) -> None:
        self.phases.append(phase)
        recv.copy_(tensor.unsqueeze(0))


@pytest.mark.parametrize("compares", [False, True])
@pytest.mark.parametrize("waits", [True, False], ids=["gloo", "nccl"])
@pytest.mark.parametrize(
    ("kind", "dispatch_header"),
    [
        # Counts are always exchanged.
        (DeepEPNormalDispatcher, "always"),
        (DeepEPLowLatencyDispatcher, "compared"),
        (StandardDispatcher, "always"),
    ],
)
def test_only_compared_calls_have_a_header_of_their_own(
    kind: type[DeepEPNormalDispatcher], dispatch_header: str, waits: bool, compares: bool
) -> None:
    config = EPConfig(
        backend="collective", max_tokens_per_rank=NUM_TOKENS, check_calls=compares, timeout_s=1.0
    )
    collectives = OneRank(waits=waits)
    with EPGroup(collectives) as group, torch.no_grad():
        dispatcher = kind(group, SPEC, config)
        collectives.phases.clear()
        x, ids = torch.ones(NUM_TOKENS, SPEC.hidden_size), torch.zeros(NUM_TOKENS, 2).long()
        ids[:, 1] = 1
        out = dispatcher.dispatch(x, TopKOutput(topk_ids=ids, topk_weights=torch.ones(ids.shape)))
        is_compared = waits or compares
        has_header = is_compared or dispatch_header == "always"
        assert len(collectives.phases) == 1 + has_header
        collectives.phases.clear()
        dispatcher.combine(out.combine_input(x.new_ones(out.num_slots, SPEC.hidden_size)))
        headers = ["combine calls"] if is_compared else []
        assert [phase for phase in collectives.phases if "calls" in phase] == headers
        assert len(collectives.phases) == 1 + len(headers)
