import math
from dataclasses import replace
from functools import wraps
from typing import Any

import pytest
import torch

from epcomm import EPGroup, TopKOutput
from epcomm.buffers.sizes import CallShape
from epcomm.fuseep.ascend import DispatchFFNCombine, FusedDeepMoE
from epcomm.fuseep.path import FuseEPPath
from epcomm.testing.oracle import relative_error
from epcomm.testing.poison import poisoned_memory
from fakes.ascend.deep_ep import Buffer
from tests.cases.fuseep_layers import OPERATORS, E, H, K, batch, make_layer

pytestmark = [pytest.mark.ranks(2), pytest.mark.usefixtures("small_a3")]

W, MOST, M = 2, 3, 8
# Tokens of both ranks, in 3 calls of at most MOST.
NUM_TOKENS = ((0, 8), (1, 2), (3, 4), (6, 7), (8, 0))
# Both round to 127 codes twice, in different orders.
TOLERANCE = 0.01


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return a list to which the arguments of each call of fused_deep_moe are appended."""
    recorded: list[dict[str, Any]] = []
    real = Buffer.fused_deep_moe

    @wraps(real)
    def record(buffer: Buffer, **named: Any) -> object:  # noqa: ANN401 (as the real one)
        recorded.append(named)
        return real(buffer, **named)

    monkeypatch.setattr(Buffer, "fused_deep_moe", record)
    for kind in (FusedDeepMoE, DispatchFFNCombine):
        monkeypatch.setattr(kind, "limits", replace(kind.limits, max_tokens=MOST))
    return recorded


def sent_ids(topk: TopKOutput, rank: int) -> list[int]:
    """Return the ids that a rank sends in 3 calls, with substitutes for masked entries.

    A masked entry becomes the first expert, from K * token on, that its row does not use. A call
    without tokens sends one token, for K experts from K * rank on.
    """
    sent = []
    for token, row in enumerate(topk.topk_ids.tolist()):
        for place in (place for place, expert in enumerate(row) if expert < 0):
            order = [(token * K + step) % E for step in range(E)]
            row[place] = next(each for each in order if each not in row)
        sent += row
    num_dummies = 3 - math.ceil(len(topk.topk_ids) / MOST)
    return sent + [(rank * K + k) % E for k in range(K)] * num_dummies


def holed(rank: int, num_tokens: int) -> tuple[torch.Tensor, TopKOutput]:
    """Make a batch in which every third token has one expert."""
    x, topk = batch(rank, num_tokens)
    topk.topk_ids[::3, 1] = -1
    return x, topk


@pytest.mark.parametrize("name", OPERATORS)
def test_every_rank_calls_as_often(name: str, calls: list[dict[str, Any]], group: EPGroup) -> None:
    with poisoned_memory():
        reference, layer = (make_layer(group, each) for each in ("fuseep_reference", name))
        assert isinstance(layer.path, FuseEPPath)
        for sizes in NUM_TOKENS:
            x, topk = holed(group.rank, sizes[group.rank])
            expected = reference(x, topk)
            calls.clear()
            out = layer.path.run(x, topk, layer.weights)
            layer.check()
            full, rest = divmod(len(x), MOST)
            rows = [call["x"].shape[0] for call in calls]
            assert rows == ([MOST] * full + [rest] * (rest > 0) + [1, 1, 1])[:3]
            # Tokens of a rank in mode 1; rows that a rank may receive in mode 2, where each of 2
            # ranks sends MOST tokens to both of its experts.
            most = MOST if name == "fused_deep_moe" else 2 * MOST * 2
            assert {call["num_max_dispatch_tokens_per_rank"] for call in calls} == {most}
            assert out.y.shape == x.shape
            if len(x):
                assert relative_error(out.y, expected) <= TOLERANCE
            sent = [e for r, size in enumerate(sizes) for e in sent_ids(holed(r, size)[1], r)]
            first = group.rank * (E // W)
            counts = [sent.count(first + expert) for expert in range(E // W)]
            assert out.num_tokens_per_expert.dtype is torch.int32
            assert out.num_tokens_per_expert.tolist() == counts
            assert out.is_reduced is True


@pytest.mark.parametrize("name", OPERATORS)
def test_bytes_are_those_of_a_plan(name: str, calls: list[dict[str, Any]], group: EPGroup) -> None:
    """All tokens of a full batch go to the other rank; a row budget does not change the bytes."""
    budget = None if name == "fused_deep_moe" else 50
    layer, (x, topk) = make_layer(group, name, max_recv_slots=budget), batch(group.rank, M)
    first = (1 - group.rank) * (E // W)
    ids = torch.arange(first, first + K).repeat(M, 1)
    layer(x, replace(topk, topk_ids=ids))
    found, phase = layer.path.traffic(), layer.plan.prefill
    assert found == phase.wire_bytes(CallShape.most(M, K, W))
    # By hand: dispatch sends codes, a scale, an id and a weight; combine sends bfloat16.
    assert found.dispatch_bytes == M * K * (H + 4 + 8 + 4)
    assert found.combine_bytes == M * K * 2 * H
    most = phase.max_bytes_per_token()
    assert (M * most["dispatch"], M * most["combine"]) == (
        found.dispatch_bytes,
        found.combine_bytes,
    )
    limits = [call["num_max_dispatch_tokens_per_rank"] for call in calls]
    assert limits == [budget or MOST] * 3
    # Tokens for the same rank cost no bytes.
    layer(x, replace(topk, topk_ids=(ids + E // W) % E))
    assert layer.path.traffic() == found
