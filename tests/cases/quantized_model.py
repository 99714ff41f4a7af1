"""A float64 model of quantised experts that shares only the stored codes with the library.

The library computes in float32, and rounds the same numbers to codes as the model, or the next code
where a number is within float32 rounding of the middle between two. The error is bounded from step
to step, so each result has a separate bound: one code step, times weights, of those few
activations, and hardly anything elsewhere.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from epcomm.testing.data import RankBatch
from epcomm.weights.quantized import QuantizedWeights

# Variants that round differently: scales that are powers of two, and halves that are rounded up.
POWERS_OF_TWO, HALVES_UP = "fp8 by powers of two", "int8 halves up"
# INT8 of A2 and A3: scales and results of the second product in bfloat16, or those of both products
# and of the activation between them.
OF_ASCEND, OF_BFLOAT16 = "int8 of Ascend", "int8 of bfloat16"
_BFLOAT16_SCALES = {OF_ASCEND: ("down_scale",), OF_BFLOAT16: ("gate_up_scale", "down_scale")}
# The numbers of e4m3, of which code 127 is NaN, and those of e2m1, in the order of their codes.
_E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
# Elements that share a scale; in INT8 those of a row.
_WIDTHS = {"fp8": 128, "mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
# Half a unit in the last place of float32: the relative error of one operation.
_ROUNDING = 2.0**-24
# A scale has one or two operations on a largest magnitude, and a code has one more.
_SCALE_ROUNDINGS = 6
# Roundings of silu(gate) * up: a few for exp(), then one each for a sum, a quotient and a product.
# exp() may round its argument when it is converted to a power of two: two more for each unit of
# |gate|.
_SWIGLU_ROUNDINGS = 16
# The largest slope of silu.
_SILU_SLOPE = 1.1


@dataclass(frozen=True, kw_only=True, eq=False)
class Bounded:
    """Values with error bounds.

    values: [N, *], float64.   error: the largest difference of the library's values, same shape.
    """

    values: Tensor
    error: Tensor


def assert_within(actual: Tensor, expected: Bounded, *, extra: float = 0.0) -> None:
    """Assert that all results are within their bounds.

    extra: the relative error of storing results.
    """
    bound = expected.error + extra * (expected.values.abs() + expected.error)
    difference = (actual.detach().cpu().double() - expected.values).abs()
    # Not `any(... > ...)`, which is false for NaN.
    is_within = difference <= bound
    worst = (difference / bound.clamp(min=1e-300)).flatten()
    assert is_within.all(), (
        f"{int((~is_within).sum())} of {is_within.numel()} results are beyond their bounds, the "
        f"worst {float(worst.max()):.3g} times as far off as rounding explains"
    )


def nearest(values: Tensor, numbers: Tensor) -> Tensor:
    """Return the nearest of numbers with codes 0 to N - 1, ties to even, by a search over all."""
    distance = (values.abs().unsqueeze(-1) - numbers).abs()
    best = distance.min(dim=-1, keepdim=True).values
    # Even codes come first, because the even one of two equally near codes is chosen.
    is_best = distance == best
    order = torch.cat([torch.arange(0, len(numbers), 2), torch.arange(1, len(numbers), 2)])
    place = order[is_best[..., order].int().argmax(dim=-1)]
    return numbers[place] * values.sign()


def rounded(x: Bounded, rounding: str) -> Bounded:
    """Return rows [N, H] as they are on the wire."""
    width = _WIDTHS.get(rounding.split()[0], x.values.shape[1])
    # The scale of each row, and its relative error.
    amax, off = _amax_of(x)
    row_scale = (amax / (448 * 6), off) if rounding == "nvfp4" else None
    blocks = [
        _rounded_block(Bounded(values=values, error=error), rounding, row_scale)
        for values, error in zip(
            x.values.split(width, dim=1), x.error.split(width, dim=1), strict=True
        )
    ]
    return Bounded(
        values=torch.cat([block.values for block in blocks], dim=1),
        error=torch.cat([block.error for block in blocks], dim=1),
    )


def _amax_of(x: Bounded, least: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the largest magnitude of each row, not 0, and the relative error of a scale of it."""
    low, found, high = (
        (x.values.abs() + sign * x.error).amax(dim=1, keepdim=True) for sign in (-1, 0, 1)
    )
    amax = found.clamp(min=least)
    amax = torch.where(amax > 0, amax, torch.ones_like(amax))
    return amax, torch.maximum(high - found, found - low) / amax + _SCALE_ROUNDINGS * _ROUNDING


def _rounded_block(
    x: Bounded, rounding: str, row_scale: tuple[Tensor, Tensor] | None = None
) -> Bounded:
    """Bound the library's values by the codes of both ends of the error; rounding is monotonic."""
    is_int8, is_mx = rounding.startswith("int8"), rounding.startswith("mx")
    amax, off = _amax_of(x, least=1e-4 if rounding.startswith("fp8") else 0.0)
    if is_int8:
        # The library quantises rows with the largest magnitude 127 exactly.
        off = torch.where((amax == 127) & (x.error.amax(dim=1, keepdim=True) == 0), 0.0, off)
    numbers = _E2M1 if rounding.endswith("fp4") else _E4M3
    scale, is_doubtful = amax / (127 if is_int8 else numbers[-1]), amax < 0
    if is_mx or rounding == POWERS_OF_TWO:
        # Near a power of two the library may choose the next scale, and then all codes differ.
        is_doubtful = _power_above(scale * (1 + off)) != _power_above(scale * (1 - off))
        scale, off = _power_above(scale), torch.zeros_like(off)
    if row_scale is not None:
        of_row, off_row = row_scale
        of_block, off = scale / of_row, off + off_row
        low, found, high = (
            nearest((of_block * factor).clamp(2.0**-6, 448.0), _E4M3)
            for factor in (1 - off, torch.ones_like(off), 1 + off)
        )
        scale, off, is_doubtful = found * of_row, off_row, low != high
    codes_of = {HALVES_UP: lambda values: (values + 0.5).floor()}
    code_of = codes_of.get(rounding, torch.round if is_int8 else partial(nearest, numbers=numbers))
    scaled, reach = x.values / scale, (x.error + x.values.abs() * off) / scale
    codes = code_of(scaled)
    step = torch.maximum(code_of(scaled + reach) - codes, codes - code_of(scaled - reach))
    step = torch.where(is_doubtful, 2 * (numbers[-1] - numbers[-2]) + reach, step)
    values = codes * scale
    return Bounded(values=values, error=step * scale * (1 + off) + values.abs() * off)


def _power_above(values: Tensor) -> Tensor:
    """Return the smallest power of two that is at least each value."""
    return 2.0 ** values.log2().ceil()


def _multiplied(x: Bounded, matrix: Tensor, num_roundings: int) -> Bounded:
    """Return x @ matrix.T; num_roundings: number of roundings of each summand before the sum."""
    magnitudes = matrix.abs().T
    error = x.error @ magnitudes + num_roundings * _ROUNDING * (x.values.abs() @ magnitudes)
    return Bounded(values=x.values @ matrix.T, error=error)


def _activated(gate: Bounded, up: Bounded) -> Bounded:
    silu = gate.values / (1 + torch.exp(-gate.values))
    values = silu * up.values
    silu_error = _SILU_SLOPE * gate.error
    error = silu_error * up.values.abs() + (silu.abs() + silu_error) * up.error
    num_roundings = _SWIGLU_ROUNDINGS + 2 * gate.values.abs()
    return Bounded(values=values, error=error + num_roundings * _ROUNDING * values.abs())


def stored(x: Bounded) -> Bounded:
    """Round x to bfloat16; the library's value is between those of the ends of the error."""
    low, values, high = ((x.values + sign * x.error).bfloat16().double() for sign in (-1, 0, 1))
    return Bounded(values=values, error=torch.maximum(high - values, values - low))


def expert_model(x: Tensor, weights: QuantizedWeights, expert: int, rounding: str) -> Bounded:
    """Return unweighted results [N, H] of one expert for float64 rows, which are quantised here."""
    names, tensors = _BFLOAT16_SCALES.get(rounding, ()), weights.tensors()
    scales = {name: tensors[name].bfloat16().float() for name in names}
    weights, is_stored = weights.with_tensors(tensors | scales), rounding == OF_BFLOAT16
    gate_up, down = (
        weights.dequantized()[name][expert].double().cpu() for name in ("gate_up_proj", "down_proj")
    )
    # Sums of FP8 products are rounded at each summand; sums of INT8 codes are exact. Both are
    # multiplied by scales and then by a router weight.
    sums = (0, 0) if rounding.startswith("int8") else (x.shape[1], down.shape[1])
    rows = rounded(Bounded(values=x, error=torch.zeros_like(x)), rounding)
    product = _multiplied(rows, gate_up, sums[0] + 4)
    product = stored(product) if is_stored else product
    gate, up = (
        Bounded(values=values, error=error)
        for values, error in zip(
            product.values.chunk(2, dim=1), product.error.chunk(2, dim=1), strict=True
        )
    )
    hidden = _activated(gate, up)
    hidden = stored(hidden) if is_stored else hidden
    result = _multiplied(rounded(hidden, rounding), down, sums[1] + 6)
    return stored(result) if names else result


def model(batch: RankBatch, weights: QuantizedWeights, rounding: str) -> Bounded:
    """Return y [T, H] from the values that codes and scales represent."""
    return _sum(batch, weights, rounding, range(len(weights.down_proj)))


def without_halves(batch: RankBatch) -> RankBatch:
    """Return the batch with 0 for half of a row's largest magnitude: 63.5 may round to either code.

    One such element would make the bounds of all results of its row useless.
    """
    is_half = 2 * batch.x.abs() == batch.x.abs().amax(dim=1, keepdim=True)
    return replace(batch, x=batch.x.masked_fill(is_half, 0))


def stored_model(
    batch: RankBatch,
    weights: QuantizedWeights,
    rounding: str,
    *,
    num_parts: int = 1,
    by_runner: bool = False,
) -> Bounded:
    """Return y [T, H] in bfloat16, with bfloat16 sums from each of num_parts ranks.

    by_runner: slots are stored once more after the multiplication by router weights.
    """
    num_local = len(weights.down_proj) // num_parts
    parts = [
        stored(_sum(batch, weights, rounding, range(first, first + num_local), by_runner))
        for first in range(0, len(weights.down_proj), num_local)
    ]
    values, errors = (torch.stack([getattr(p, n) for p in parts]) for n in ("values", "error"))
    error = errors.sum(0) + num_parts * _ROUNDING * (values.abs() + errors).sum(0)
    return stored(Bounded(values=values.sum(0), error=error))


def _sum(
    batch: RankBatch,
    weights: QuantizedWeights,
    rounding: str,
    experts: range,
    by_runner: bool = False,
) -> Bounded:
    """Return the weighted results of some experts, summed in float32."""
    x = batch.x.double()
    y, error = torch.zeros_like(x), torch.zeros_like(x)
    magnitudes = torch.zeros_like(x)
    for expert in experts:
        result = expert_model(x, weights, expert, rounding)
        factors = (batch.topk_weights.double() * (batch.topk_ids == expert)).sum(1, keepdim=True)
        own = Bounded(values=factors * result.values, error=factors * result.error)
        if by_runner:
            product = _ROUNDING * (own.values.abs() + own.error)
            own = stored(Bounded(values=own.values, error=own.error + product))
        y += own.values
        error += own.error
        magnitudes += own.values.abs() + own.error
    # Each of the K results is weighted, rounded once, and added.
    num_roundings = batch.topk_ids.shape[1] + 2
    return Bounded(values=y, error=error + num_roundings * _ROUNDING * magnitudes)
