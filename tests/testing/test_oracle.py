import pytest
import torch
from torch import Tensor

from epcomm import Activation, ExpertFormat, ExpertWeights
from epcomm.ops.activation import activate
from epcomm.testing.data import (
    ACTIVATIONS,
    BatchSpec,
    RankBatch,
    make_batch,
    make_weights,
    random_ids,
)
from epcomm.testing.layer_suite import FP32_TOLERANCE
from epcomm.testing.oracle import OracleResult, relative_error, run_oracle

INF, NAN = float("inf"), float("nan")


def batch(x: float, ids: list[int], weights: list[float], dy: float) -> RankBatch:
    """Make a batch of one token with one hidden element."""
    return RankBatch(
        x=torch.tensor([[x]]),
        topk_ids=torch.tensor([ids]),
        topk_weights=torch.tensor([weights]),
        dy=torch.tensor([[dy]]),
    )


def test_two_ranks_by_hand() -> None:
    # Expert e is d_e relu(g_e x)**2 with g = (1, 3) and d = (1, -1).
    weights = ExpertWeights(
        gate_up_proj=torch.tensor([[[1.0]], [[3.0]]], requires_grad=True),
        down_proj=torch.tensor([[[1.0]], [[-1.0]]], requires_grad=True),
        format=ExpertFormat(activation=Activation.RELU2),
    )
    found = run_oracle(
        [batch(2.0, [0, 1], [0.5, 0.25], 1.0), batch(1.0, [-1, 1], [9.0, 2.0], 1.0)], weights
    )
    # Rank 0: 0.5 * 4 - 0.25 * 36.   Rank 1: -2 * 9; the weight of -1 is ignored.
    assert [y.tolist() for y in found.y] == [[[-7.0]], [[-18.0]]]
    assert [dw.tolist() for dw in found.dw] == [[[4.0, -36.0]], [[0.0, -9.0]]]
    # w d 2 g**2 x: 2 - 9 on rank 0, -36 on rank 1.
    assert [dx.tolist() for dx in found.dx] == [[[-7.0]], [[-36.0]]]
    # w d 2 g x**2 of both ranks: expert 1 gets -6 and -12.
    assert found.weight_grads["gate_up_proj"].flatten().tolist() == [4.0, -18.0]
    # w (g x)**2 of both ranks: expert 1 gets 9 and 18.
    assert found.weight_grads["down_proj"].flatten().tolist() == [2.0, 27.0]


def test_only_weights_that_need_gradients_get_them() -> None:
    weights = ExpertWeights(
        gate_up_proj=torch.ones(1, 1, 1),
        down_proj=torch.ones(1, 1, 1, requires_grad=True),
        format=ExpertFormat(activation=Activation.RELU2),
    )
    found = run_oracle([batch(1.0, [0], [1.0], 1.0)], weights)
    assert set(found.weight_grads) == {"down_proj"}


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        (torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]), 0.25),
        (torch.tensor([0.5]), torch.tensor([0.0]), 0.5),
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, 2.0]), INF),
        (torch.tensor([1.0, INF]), torch.tensor([1.0, INF]), INF),
        (torch.ones(2, 1), torch.ones(2), INF),
        (torch.empty(0, 4), torch.empty(0, 4), 0.0),
    ],
    ids=["relative", "absolute at zero", "nan", "inf", "shape", "empty"],
)
def test_relative_error(actual: Tensor, expected: Tensor, error: float) -> None:
    assert relative_error(actual, expected) == error


WORLD_SIZE = 2
SPEC = BatchSpec(
    num_local_experts=2, top_k=2, tokens_of_rank=lambda rank, world_size: 4, choose_ids=random_ids
)


def run_experts(expert: int, x: Tensor, weights: ExpertWeights) -> Tensor:
    hidden = x @ weights.gate_up_matrices()[expert]
    if weights.gate_up_bias is not None:
        hidden = hidden + weights.gate_up_bias[expert]
    result = activate(hidden, weights.format) @ weights.down_matrices()[expert]
    return result if weights.down_bias is None else result + weights.down_bias[expert]


def run_plainly(batches: list[RankBatch], weights: ExpertWeights) -> dict[str, list[Tensor]]:
    """Compute all results by loops over ranks, tokens and k in float32; by name."""
    xs = [batch.x.clone().requires_grad_() for batch in batches]
    ws = [batch.topk_weights.clone().requires_grad_() for batch in batches]
    ys = []
    for mine, x, w in zip(batches, xs, ws, strict=True):
        rows = []
        for token, ids in enumerate(mine.topk_ids.tolist()):
            results = [run_experts(expert, x[token], weights) for expert in ids]
            rows.append((w[token].unsqueeze(1) * torch.stack(results)).sum(0))
        ys.append(torch.stack(rows))
    torch.stack([(y * b.dy).sum() for y, b in zip(ys, batches, strict=True)]).sum().backward()
    leaves = {"dx": xs, "dw": ws}
    leaves |= {f"d {name}": [tensor] for name, tensor in weights.tensors().items()}
    grads = {
        name: [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in tensors]
        for name, tensors in leaves.items()
    }
    return {"y": ys, **grads}


def errors(found: dict[str, list[Tensor]], expected: OracleResult) -> dict[str, float]:
    """Return the largest error of any rank, by name."""
    wanted = {"y": expected.y, "dx": expected.dx, "dw": expected.dw}
    wanted |= {f"d {name}": [grad] for name, grad in expected.weight_grads.items()}
    return {
        name: max(relative_error(a, b) for a, b in zip(found[name], wanted[name], strict=True))
        for name in wanted
    }


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_plain_loops_equal_the_oracle(activation: str, has_bias: bool) -> None:
    batches = [make_batch(SPEC, rank, WORLD_SIZE) for rank in range(WORLD_SIZE)]
    weights = make_weights(
        SPEC, WORLD_SIZE, expert_format=ACTIVATIONS[activation], has_bias=has_bias
    )
    found = errors(run_plainly(batches, weights), run_oracle(batches, weights))
    assert set(found) == {"y", "dx", "dw", *(f"d {name}" for name in weights.tensors())}
    assert max(found.values()) <= FP32_TOLERANCE, found
