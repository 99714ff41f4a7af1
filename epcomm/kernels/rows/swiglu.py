"""Compute SwiGLU and router weights between the two products of experts, and its gradients.

Each kernel reads its operands once and computes in float32, so that a result is rounded once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from epcomm.kernels.launch import EXACT, check_rows, next_power_of_two
from epcomm.kernels.prepared import launch
from epcomm.kernels.rounding import cast
from epcomm.kernels.rows.tiles import WARPS, tile_of

# Columns of a row that a program of the backward kernel computes at once.
_COLUMNS = 1024


@triton.jit(do_not_specialize=["num_rows"])
def _swiglu_kernel(
    gate_up_ptr: tl.tensor,
    weights_ptr: tl.tensor | None,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Compute ROWS rows in COLUMNS columns; WIDTH: I."""
    TILES: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    row = (program // TILES * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (program % TILES * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    is_row = row < num_rows
    is_there = is_row[:, None] & (column < WIDTH)
    gate_ptr = gate_up_ptr + row[:, None] * (2 * WIDTH) + column
    gate = tl.load(gate_ptr, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + WIDTH, mask=is_there, other=0.0).to(tl.float32)
    hidden = gate / (1 + tl.exp(-gate)) * up
    if weights_ptr is not None:
        hidden *= tl.load(weights_ptr + row, mask=is_row, other=0.0)[:, None]
    value = cast(hidden, out_ptr.dtype.element_ty)  # pyright: ignore[reportAttributeAccessIssue]
    tl.store(out_ptr + row[:, None] * WIDTH + column, value, mask=is_there)


def swiglu(gate_up: Tensor, weights: Tensor | None) -> Tensor:
    """Return silu(gate) * up * weight, [C, I].

    gate_up: [C, 2I], gate then up, bfloat16, float16 or float32, contiguous.
    weights: [C], float32, contiguous, or None.

    Compiled for each dtype and I.
    Host sync: none.   Graph capture: after one call.   Deterministic: yes.
    Raises:
        ShapeError: a tensor is not on a GPU.
    """
    check_rows("swiglu", gate_up=gate_up)
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    if out.numel() > 0:
        tile = tile_of(width, out.itemsize)
        launch(
            _swiglu_kernel,
            tile.programs(num_rows),
            (gate_up, weights, out, num_rows),
            WIDTH=width,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            num_warps=WARPS,
            **EXACT,
        )
    return out


@triton.jit
def _swiglu_backward_kernel(
    grad_ptr: tl.tensor,
    gate_up_ptr: tl.tensor,
    weights_ptr: tl.tensor | None,
    grad_gate_up_ptr: tl.tensor,
    grad_weights_ptr: tl.tensor | None,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Compute the gradients of one row; the order of its sum depends on WIDTH alone.

    With s = sigmoid(gate), silu(gate) = gate s and its derivative is s (1 + gate (1 - s)).
    """
    row = tl.program_id(0).to(tl.int64)
    weight = 1.0 if weights_ptr is None else tl.load(weights_ptr + row)
    total = tl.zeros([COLUMNS], tl.float32)
    for begin in tl.range(0, WIDTH, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        is_there = column < WIDTH
        at = row * (2 * WIDTH) + column
        gate = tl.load(gate_up_ptr + at, mask=is_there, other=0.0).to(tl.float32)
        up = tl.load(gate_up_ptr + at + WIDTH, mask=is_there, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + row * WIDTH + column, mask=is_there, other=0.0).to(tl.float32)
        sigmoid = 1 / (1 + tl.exp(-gate))
        silu = gate * sigmoid
        total += grad * (silu * up)
        grad *= weight
        grad_gate = grad * up * (sigmoid * (1 + gate * (1 - sigmoid)))
        to_ptr = grad_gate_up_ptr + at
        tl.store(to_ptr, cast(grad_gate, grad_gate_up_ptr.dtype.element_ty), mask=is_there)
        grad_up = cast(grad * silu, grad_gate_up_ptr.dtype.element_ty)
        tl.store(to_ptr + WIDTH, grad_up, mask=is_there)
    if grad_weights_ptr is not None:
        tl.store(grad_weights_ptr + row, tl.sum(total))


def swiglu_backward(
    grad: Tensor, gate_up: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the operands of swiglu(), from that of its result.

    grad: [C, I], contiguous.   Costs and errors are those of swiglu().
    """
    check_rows("swiglu_backward", grad=grad, gate_up=gate_up)
    num_rows, width = grad.shape
    of_gate_up = torch.empty_like(gate_up)
    of_weights = None if weights is None else torch.empty_like(weights)
    if grad.numel() > 0:
        launch(
            _swiglu_backward_kernel,
            num_rows,
            (grad, gate_up, weights, of_gate_up, of_weights),
            WIDTH=width,
            COLUMNS=min(_COLUMNS, next_power_of_two(width)),
            num_warps=WARPS,
            **EXACT,
        )
    return of_gate_up, of_weights
