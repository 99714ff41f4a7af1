import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from epcomm import ExpertFormat
from epcomm.kernels.rows.swiglu import swiglu, swiglu_backward
from epcomm.ops import activation, slots
from epcomm.ops.with_triton import TritonRowOps
from epcomm.testing.poison import poisoned_memory

# One column, an odd size, and more than one tile with the last one short.
SHAPES = [
    *((torch.bfloat16, width) for width in (1, 37, 1100)),
    *((dtype, 37) for dtype in (torch.float16, torch.float32)),
]
# The roundings of a result in float32, in units of eps: exp has 2, and its argument |gate| / 2 with
# |gate| below 18; a sum of 1100 products in two steps and by halves has 6; others have 5.
FLOAT32_ROUNDINGS = 24 * torch.finfo(torch.float32).eps


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


def check_gradients(
    of_gate_up: Tensor | None,
    of_weights: Tensor | None,
    operands: tuple[Tensor, Tensor | None, Tensor],
) -> None:
    """Compare with float64; operands: gate_up, weights and the gradient of the result."""
    gate_up, weights, grad = operands
    wide, wide_grad = gate_up.detach().double().requires_grad_(), grad.double()
    wide_weights = None if weights is None else weights.detach().double().requires_grad_()
    formula(wide, wide_weights).backward(wide_grad)
    # 1 + gate (1 - sigmoid) may cancel: its terms are at most 1 and |gate|.
    gate, up = wide.detach().chunk(2, 1)
    weight = 1.0 if wide_weights is None else wide_weights.detach()[:, None]
    terms = (wide_grad * weight * up).abs() * (1 + gate.abs())
    of_up = wide.grad.chunk(2, 1)[1]
    check_close(of_gate_up, wide.grad, torch.cat([terms, of_up.abs()], 1))
    if wide_weights is not None:
        products = (wide_grad * formula(wide.detach(), None)).abs().sum(1)
        check_close(of_weights, wide_weights.grad, products)


@pytest.mark.parametrize("is_weighted", [True, False], ids=["weights", "no weights"])
@pytest.mark.parametrize(("dtype", "width"), SHAPES, ids=str)
def test_results_and_gradients_are_those_of_the_formula(
    dtype: torch.dtype, width: int, is_weighted: bool, device: torch.device
) -> None:
    num_rows, generator = 7, torch.Generator().manual_seed(width)
    gate_up = (4 * torch.randn(num_rows, 2 * width, generator=generator)).to(device, dtype)
    grad = torch.randn(num_rows, width, generator=generator).to(device, dtype)
    weights = torch.rand(num_rows, generator=generator).to(device) if is_weighted else None

    with poisoned_memory():
        out = swiglu(gate_up, weights)
        of_gate_up, of_weights = swiglu_backward(grad, gate_up, weights)
    wide_weights = None if weights is None else weights.double()
    expected = formula(gate_up.double(), wide_weights)
    check_close(out, expected, expected.abs())
    check_gradients(of_gate_up, of_weights, (gate_up, weights, grad))


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
    gate_up = torch.randn(5, 2 * 37, device=device, requires_grad=True)
    weights = torch.rand(5, device=device, requires_grad=True)
    y = activation.activate_slots(gate_up, ExpertFormat(), weights)
    # The gradient of a sum has strides of 0.
    y.sum().backward()
    check_gradients(gate_up.grad, weights.grad, (gate_up, weights, torch.ones_like(y)))
