import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from epcomm import ExpertFormat
from epcomm.kernels.rows.swiglu import swiglu, swiglu_backward
from epcomm.ops import activation, slots
from epcomm.ops.with_triton import TritonRowOps

# One column, an odd size, and more than one tile with the last one short.
SHAPES = [
    *((torch.bfloat16, width) for width in (1, 37, 1100)),
    *((dtype, 37) for dtype in (torch.float16, torch.float32)),
]
# Operations in float32, each within one rounding, on values of order ten; then one to the dtype.
FLOAT32_ROUNDINGS = 16 * torch.finfo(torch.float32).eps


def formula(gate_up: Tensor, weights: Tensor | None) -> Tensor:
    gate, up = gate_up.chunk(2, 1)
    hidden = gate * torch.sigmoid(gate) * up
    return hidden if weights is None else hidden * weights[:, None]


def check_close(found: Tensor, expected: Tensor, terms: Tensor) -> None:
    """Compare with a float64 result; terms: the sum of the magnitudes that were added."""
    eps = torch.finfo(found.dtype).eps
    # float16 rounds subnormal numbers to multiples of its smallest one.
    tiny = torch.finfo(found.dtype).smallest_normal * eps
    bound = eps / 2 * expected.abs() + FLOAT32_ROUNDINGS * terms + tiny
    assert (found.double() - expected).abs().le(bound).all()


@pytest.mark.parametrize("is_weighted", [True, False], ids=["weights", "no weights"])
@pytest.mark.parametrize(("dtype", "width"), SHAPES, ids=str)
def test_results_and_gradients_are_those_of_the_formula(
    dtype: torch.dtype, width: int, is_weighted: bool, device: torch.device
) -> None:
    num_rows, generator = 7, torch.Generator().manual_seed(width)
    gate_up = (4 * torch.randn(num_rows, 2 * width, generator=generator)).to(device, dtype)
    grad = torch.randn(num_rows, width, generator=generator).to(device, dtype)
    weights = torch.rand(num_rows, generator=generator).to(device) if is_weighted else None

    out = swiglu(gate_up, weights)
    of_gate_up, of_weights = swiglu_backward(grad, gate_up, weights)

    wide = gate_up.double().requires_grad_()
    wide_weights = None if weights is None else weights.double().requires_grad_()
    expected = formula(wide, wide_weights)
    expected.backward(grad.double())
    assert wide.grad is not None
    check_close(out, expected.detach(), expected.detach().abs())
    # 1 + gate (1 - sigmoid) may cancel: its terms are at most 1 and |gate|.
    gate, up = wide.detach().chunk(2, 1)
    weight = 1.0 if weights is None else weights.double()[:, None]
    terms = (grad.double() * weight * up).abs() * (1 + gate.abs())
    check_close(of_gate_up[:, :width], wide.grad[:, :width], terms)
    check_close(of_gate_up[:, width:], wide.grad[:, width:], wide.grad[:, width:].abs())
    if of_weights is not None and wide_weights is not None:
        assert wide_weights.grad is not None
        products = (grad.double() * formula(wide.detach(), None)).abs().sum(1)
        check_close(of_weights, wide_weights.grad, products)


def test_limits_of_the_sigmoid(device: torch.device) -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 3.0, 3.0]], device=device)
    of_gate_up, _ = swiglu_backward(torch.ones(1, 2, device=device), gate_up, None)
    assert swiglu(gate_up, None).tolist() == [[0.0, 600.0]]
    assert of_gate_up.tolist() == [[0.0, 3.0, 0.0, 200.0]]


def test_the_activation_of_experts_takes_the_kernels(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(slots._LOADERS, device.type, TritonRowOps)
    torch.manual_seed(3)
    gate_up, weights = torch.randn(5, 2 * 37, device=device), torch.rand(5, device=device)
    found = [gate_up.clone().requires_grad_(), weights.clone().requires_grad_()]
    expected = [each.double().requires_grad_() for each in (gate_up, weights)]
    # The gradient of a sum has strides of 0.
    activation.activate_slots(found[0], ExpertFormat(), found[1]).sum().backward()
    formula(*expected).sum().backward()
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, check_dtype=False, rtol=1e-5, atol=1e-5)
