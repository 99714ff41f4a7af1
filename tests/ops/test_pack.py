import pytest
import torch

from epcomm.ops.slots import pack
from tests.ops.indices import WORKED_IDS, index_of, strided

NUM_ROWS, TOP_K, NUM_EXPERTS, HIDDEN = 40, 3, 5, 24
# At most K = 3 terms of order one, summed in float32.
FLOAT32_SUM = 1e-6
NAN = float("nan")


@pytest.mark.parametrize("expert_alignment", [1, 8])
def test_gradient_equals_index_add_in_float64(expert_alignment: int) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(NUM_ROWS, NUM_EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
    ids[torch.rand(ids.shape, generator=generator) < 0.3] = -1
    index = index_of(ids.tolist(), NUM_EXPERTS, expert_alignment)
    assert index.row_of_slot is not None
    used = index.row_of_slot >= 0
    row_of_used_slot = index.row_of_slot[used].long()
    rows = torch.randn(NUM_ROWS, HIDDEN, generator=generator)
    leaf = strided(rows, 8).requires_grad_()

    slots = pack(leaf, index)
    assert torch.equal(slots[used], rows[row_of_used_slot])
    assert not slots[~used].any()
    # The gradient of padding is undefined, so it must not be read.
    grad_slots = torch.randn(slots.shape, generator=generator)
    grad_slots[~used] = NAN
    slots.backward(grad_slots)

    expected = torch.zeros(NUM_ROWS, HIDDEN, dtype=torch.float64)
    expected.index_add_(0, row_of_used_slot, grad_slots[used].double())
    assert leaf.grad is not None
    assert (leaf.grad - expected).abs().max() <= FLOAT32_SUM


def test_expanded_gradient_is_summed() -> None:
    rows = torch.ones(3, 2, requires_grad=True)
    # The backward of a sum over slots is one row, expanded.
    (pack(rows, index_of(WORKED_IDS, 2)).sum(0) * torch.tensor([1.0, 10.0])).sum().backward()
    assert rows.grad.tolist() == [[1.0, 10.0], [1.0, 10.0], [2.0, 20.0]]
