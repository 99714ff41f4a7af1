import pytest
import torch

from epcomm.bench.contenders.local_ops import inverse_of, sum_weighted

TERMS = torch.tensor([2, 0, 1, 2])
OFFSETS = torch.tensor([0, 2, 2, 4])


def test_the_inverse_undoes_an_order() -> None:
    assert inverse_of(torch.tensor([2, 0, 1])).tolist() == [1, 2, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_are_summed_by_weight(dtype: torch.dtype) -> None:
    rows = torch.tensor([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]], dtype=dtype)
    sums = sum_weighted(rows, TERMS, torch.tensor([0.5, 1.0, 2.0, 0.25]), OFFSETS)
    assert sums.dtype is dtype
    assert sums.tolist() == [[3.0, 30.0], [0.0, 0.0], [5.0, 50.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bit_rows_keep_all_bits_of_float32(dtype: torch.dtype) -> None:
    # 1 + 2**-12 needs more bits than the rows have, and without them the sum would be 0.
    weights = torch.tensor([1 + 2**-12, -1.0])
    rows = torch.ones(2, 8, dtype=dtype)
    sums = sum_weighted(rows, torch.tensor([0, 1]), weights, torch.tensor([0, 2]))
    assert sums.tolist() == [[2**-12] * 8]


def test_no_rows_sum_to_zero() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    sums = sum_weighted(torch.empty(0, 4), none, torch.empty(0), torch.tensor([0, 0]))
    assert sums.tolist() == [[0.0] * 4]
