"""Batches of more than the 256 tokens of a call: every rank makes the same number of calls."""

from __future__ import annotations

import math
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor

from epcomm import EPConfig, EPGroup, ExpertParallelExperts, Int8ChannelWeights, TopKOutput
from epcomm.buffers.sizes import CallShape
from epcomm.fuseep.path import FuseEPPath
from epcomm.testing.poison import poisoned_memory
from fakes.ascend.deep_ep import Buffer

W, E, H, I, K, M = 4, 8, 32, 64, 2, 600  # noqa: E741 (the letter of the intermediate size)
OPERATORS = ("fused_deep_moe", "dispatch_ffn_combine")
NUM_TOKENS = (0, 1, 255, 256, 257, 511, 512, 513, 600)
# Both paths round to 127 codes twice, in different orders; see test_dense.py.
TOLERANCE = 0.01


def experts() -> Int8ChannelWeights:
    made = torch.Generator().manual_seed(3)
    shape = (E, 2 * I, H), (E, H, I)
    w13, w2 = (torch.randint(-127, 128, each, generator=made, dtype=torch.int8) for each in shape)
    return Int8ChannelWeights(
        gate_up_proj=w13,
        gate_up_scale=torch.rand(E, 2 * I, generator=made) / 74 / math.sqrt(H),
        down_proj=w2,
        down_scale=torch.rand(E, H, generator=made) / 74 / math.sqrt(I),
    )


def batch(num_tokens: int, rank: int) -> tuple[Tensor, TopKOutput]:
    """Make a batch in which a tenth of the entries has no expert."""
    made = torch.Generator().manual_seed(1000 * rank + num_tokens)
    ids = torch.rand(num_tokens, E, generator=made).argsort(dim=1)[:, :K].contiguous()
    ids[torch.rand(ids.shape, generator=made) < 0.1] = -1
    weights = torch.rand(num_tokens, K, generator=made)
    x = torch.randn(num_tokens, H, generator=made).bfloat16()
    return x, TopKOutput(topk_ids=ids, topk_weights=weights)


def sent_ids(topk: TopKOutput, rank: int) -> list[list[int]]:
    """Return the ids that a rank sends in 3 calls, with substitutes for masked entries.

    A masked entry becomes the first expert, from K * token on, that its row does not use. A call
    without tokens sends one token, for K experts from K * rank on.
    """
    rows = []
    for token, row in enumerate(topk.topk_ids.tolist()):
        filled = list(row)
        for place, expert in enumerate(row):
            if expert < 0:
                order = [(token * K + step) % E for step in range(E)]
                filled[place] = next(each for each in order if each not in filled)
        rows.append(filled)
    num_dummies = 3 - math.ceil(len(rows) / 256)
    return rows + [[(rank * K + k) % E for k in range(K)]] * num_dummies


def sizes_of(step: int) -> list[int]:
    """Return T of each rank, all different; the last rank has no tokens."""
    return [NUM_TOKENS[(step + 2 * rank) % len(NUM_TOKENS)] for rank in range(W - 1)] + [0]


class Recorder:
    """Records the arguments of fused_deep_moe of the imitation."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        self.limits: list[int] = []
        real = Buffer.fused_deep_moe

        @wraps(real)
        def recorded(buffer: Buffer, **named: Any) -> object:  # noqa: ANN401 (as the real one)
            self.rows.append(named["x"].shape[0])
            self.limits.append(named["num_max_dispatch_tokens_per_rank"])
            return real(buffer, **named)

        patch.setattr(Buffer, "fused_deep_moe", recorded)

    def clear(self) -> None:
        self.rows.clear()
        self.limits.clear()


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.usefixtures("small_a3")
def test_every_rank_makes_as_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, recorder = experts(), Recorder(monkeypatch)
    num_local = E // W
    with EPGroup() as group, poisoned_memory():
        config = EPConfig(mode="fuseep", backend="fuseep_reference", max_tokens_per_rank=M)
        reference = ExpertParallelExperts(weights, group, config, top_k=K)
        layers = {
            name: ExpertParallelExperts(
                weights,
                group,
                EPConfig(mode="fuseep", backend=name, max_tokens_per_rank=M),
                top_k=K,
            )
            for name in OPERATORS
        }
        for step in range(len(NUM_TOKENS)):
            sizes = sizes_of(step)
            x, topk = batch(sizes[group.rank], group.rank)
            expected = reference(x, topk)
            sent = [
                each
                for rank, size in enumerate(sizes)
                for row in sent_ids(batch(size, rank)[1], rank)
                for each in row
            ]
            first = group.rank * num_local
            counts = [sent.count(first + expert) for expert in range(num_local)]
            for name, layer in layers.items():
                recorder.clear()
                assert isinstance(layer.path, FuseEPPath)
                out = layer.path.run(x, topk, layer.weights)
                layer.check()
                full, rest = divmod(x.shape[0], 256)
                assert recorder.rows == ([256] * full + [rest] * (rest > 0) + [1, 1, 1])[:3]
                # Tokens of a rank in mode 1; rows that a rank may receive in mode 2, where each
                # of 4 ranks sends 256 tokens to at most 2 of its experts.
                assert recorder.limits == [256 if name == "fused_deep_moe" else 4 * 256 * 2] * 3
                assert out.y.shape == x.shape
                error = (out.y.double() - expected.double()).norm()
                assert error <= TOLERANCE * expected.double().norm(), (name, sizes)
                assert out.num_tokens_per_expert.dtype is torch.int32
                assert out.num_tokens_per_expert.tolist() == counts
                assert out.is_reduced is True


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("small_a3")
@pytest.mark.parametrize("name", OPERATORS)
def test_bytes_are_those_of_the_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens of a full call go to the other rank; a row budget does not change the bytes."""
    recorder, budget = Recorder(monkeypatch), None if name == "fused_deep_moe" else 5000
    with EPGroup() as group:
        config = EPConfig(
            mode="fuseep", backend=name, max_tokens_per_rank=300, max_recv_slots=budget
        )
        layer = ExpertParallelExperts(experts(), group, config, top_k=K)
        x, topk = batch(300, group.rank)
        first = (1 - group.rank) * (E // 2)
        ids = torch.arange(first, first + K).repeat(300, 1)
        layer(x, TopKOutput(topk_ids=ids, topk_weights=topk.topk_weights))
        found, phase = layer.path.traffic(), layer.plan.prefill
        assert found == phase.wire_bytes(CallShape.most(300, K, 2))
        # By hand: dispatch sends codes, a scale, an id and a weight; combine sends bfloat16.
        assert found.dispatch_bytes == 300 * K * (H + 4 + 8 + 4)
        assert found.combine_bytes == 300 * K * 2 * H
        most = phase.max_bytes_per_token()
        assert {"dispatch": 300 * most["dispatch"], "combine": 300 * most["combine"]} == {
            "dispatch": found.dispatch_bytes,
            "combine": found.combine_bytes,
        }
        assert recorder.limits == [budget or 256] * 2
        # Tokens for the same rank cost no bytes.
        local = TopKOutput(topk_ids=(ids + E // 2) % E, topk_weights=topk.topk_weights)
        layer(x, local)
        assert layer.path.traffic() == found
