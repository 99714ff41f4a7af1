"""Interleaved gate and up columns: the permutation, and its effect on a product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from epcomm.fuseep.interleave import interleave, permutation
from epcomm.testing.oracle import relative_error
from tests.cases.fuseep_checkpoint import GOLDEN, digest, golden_weights

quick = settings(max_examples=25, deadline=None, derandomize=True)
column_counts = st.integers(1, 48).map(lambda tiles: 128 * tiles)


def test_the_permutation_is_the_golden_one() -> None:
    golden = GOLDEN["permutation"]
    assert permutation(golden["2I"]).tolist() == golden["perm"]
    inverse = permutation(golden["2I"]).argsort()
    assert digest(inverse) == golden["sha256_of_inverse_as_int64"]
    found = {size: digest(permutation(int(size))) for size in golden["sha256_of_perm_as_int64"]}
    assert found == golden["sha256_of_perm_as_int64"]


@quick
@given(column_counts)
def test_it_is_a_permutation_and_not_its_own_inverse(num_columns: int) -> None:
    forward = permutation(num_columns)
    same = list(range(num_columns))
    assert sorted(forward.tolist()) == same
    # Small sizes hide mistakes.
    assert (forward.tolist() == same) == (num_columns == 128)
    assert (forward[forward].tolist() == same) == (num_columns <= 256)


def test_codes_and_scales_permuted_apart_are_weights_permuted() -> None:
    weights = golden_weights(2)
    matrices = weights.gate_up_proj.transpose(1, 2)
    codes, scales = interleave(matrices, dim=2), interleave(weights.gate_up_scale, dim=1)
    dequantized = matrices.float() * weights.gate_up_scale[:, None, :]
    order = GOLDEN["permutation"]["perm"]
    assert torch.equal(codes.float() * scales[:, None, :], dequantized[..., order])


def kernel_swiglu(sums: Tensor) -> Tensor:
    """Apply SwiGLU as the kernel does: the first 64 of 128 columns are gate."""
    tiles = sums.unflatten(1, (-1, 2, 64))
    return F.silu(tiles[:, :, 0].double()).mul(tiles[:, :, 1].double()).flatten(1)


@pytest.mark.parametrize("intermediate_size", [192, 256, 320])
def test_swiglu_of_interleaved_columns_is_swiglu(intermediate_size: int) -> None:
    generator = torch.Generator().manual_seed(intermediate_size)

    def codes(*shape: int) -> Tensor:
        return torch.randint(-4, 5, shape, generator=generator)

    x, gate, up = codes(7, 16), codes(16, intermediate_size), codes(16, intermediate_size)
    weights = torch.cat((gate, up), dim=1)
    expected = F.silu((x @ gate).double()) * (x @ up).double()
    once = interleave(weights, dim=1)
    assert torch.equal(kernel_swiglu(x @ once), expected)
    for wrong in (weights, interleave(once, dim=1)):
        assert relative_error(kernel_swiglu(x @ wrong), expected) > 0.5
