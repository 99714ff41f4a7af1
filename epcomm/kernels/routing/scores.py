"""Turn router logits into scores, with exp, tanh and log1p that round as torch's do.

On a GPU they are those of its library, by which torch computes too, so that scores which are equal
there are equal here. (Triton's own exp multiplies by log2(e) in one rounding, which at -20 is five
units in the last place of the result.) The interpreter has no such library: there they are computed
in float64, because torch on a CPU is within 0.6 units.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from epcomm.kernels.launch import IS_INTERPRETED

_IS_INTERPRETED = tl.constexpr(IS_INTERPRETED)

# Below this value exp(x) is 0 in float32; the limit keeps the sum with _SHIFT finite.
_LOWEST = tl.constexpr(-110.0)
# A little below this exp(x) is subnormal, where the GPU's library, as Triton links it, gives 0; so
# it computes exp(x + 40), an exact sum, and the result is multiplied by exp(-40).
_NEARLY_SUBNORMAL, _SHIFT = tl.constexpr(-87.0), tl.constexpr(40.0)
_EXP_OF_MINUS_SHIFT = tl.constexpr(4.248354255291589e-18)
# The largest float32, to which +inf is lowered: a softmax of two infinities would be NaN.
_MAX = tl.constexpr(3.4028234663852886e38)
# Below this magnitude tanh(x) is x, to a tenth of a unit in the last place.
_TANH_BY_EXP = tl.constexpr(1e-4)
# Beyond 20 log1p(exp(x)) is x, and below -20 it is exp(x), as in the reference.
_SOFTPLUS_END = tl.constexpr(20.0)


@triton.jit
def exp_up_to_20(x: tl.tensor) -> tl.tensor:
    """Return exp(x) of x <= 20, -inf included."""
    if _IS_INTERPRETED:
        return tl.exp(x.to(tl.float64)).to(tl.float32)
    x = tl.maximum(x, _LOWEST)
    is_small = x < _NEARLY_SUBNORMAL
    e = libdevice.exp(tl.where(is_small, x + _SHIFT, x))
    return tl.where(is_small, e * _EXP_OF_MINUS_SHIFT, e)  # pyright: ignore[reportReturnType]


@triton.jit
def _tanh(x: tl.tensor) -> tl.tensor:
    """Return tanh(x). A softcap of 30 multiplies what two implementations differ by."""
    if not _IS_INTERPRETED:
        return libdevice.tanh(x)  # pyright: ignore[reportReturnType]
    e = tl.exp(-2.0 * tl.abs(x.to(tl.float64)))
    far = ((1.0 - e) / (1.0 + e)).to(tl.float32)
    far = tl.where(x < 0.0, -far, far)
    return tl.where(tl.abs(x) < _TANH_BY_EXP, x, far)


@triton.jit
def _log1p(u: tl.tensor) -> tl.tensor:
    """Return log(1 + u) of u > 1e-9."""
    if not _IS_INTERPRETED:
        return libdevice.log1p(u)  # pyright: ignore[reportReturnType]
    exact = u.to(tl.float64)
    total = 1.0 + exact
    # The quotient makes up for what the sum has lost.
    return (tl.log(total) * (exact / (total - 1.0))).to(tl.float32)


@triton.jit
def adjust_logits(logits: tl.tensor, bias: tl.tensor, SOFTCAP: tl.constexpr) -> tl.tensor:
    """Cap logits, add a bias, lower +inf to the largest number, and turn NaN into -inf."""
    is_nan = logits != logits
    logits = tl.where(is_nan, 0.0, logits)
    if SOFTCAP is not None:
        logits = _tanh(logits * (1.0 / SOFTCAP)) * SOFTCAP
    return tl.where(is_nan, float("-inf"), tl.minimum(logits + bias, _MAX))


@triton.jit
def score_logits(logits: tl.tensor, SCORE: tl.constexpr) -> tl.tensor:
    """Return the score of each logit, or the logit itself for softmax."""
    if SCORE == "sigmoid":
        e = exp_up_to_20(-tl.abs(logits))
        logits = tl.div_rn(tl.where(logits < 0.0, e, 1.0), 1.0 + e)
    elif SCORE == "sqrt_softplus":
        inner = tl.minimum(tl.maximum(logits, -_SOFTPLUS_END), _SOFTPLUS_END)
        body = tl.sqrt_rn(_log1p(exp_up_to_20(inner)))
        head = tl.sqrt_rn(tl.maximum(logits, _SOFTPLUS_END))
        # exp(x / 2) replaces the root of exp(x), which underflows earlier.
        tail = exp_up_to_20(tl.minimum(logits, 0.0) * 0.5)
        body = tl.where(logits < -_SOFTPLUS_END, tail, body)
        logits = tl.where(logits > _SOFTPLUS_END, head, body)
    return logits
