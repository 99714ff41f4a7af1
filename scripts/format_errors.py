"""Write the errors of y by the formats of dispatch and combine into docs/formats.md.

    python -m scripts.format_errors

A layer of linear experts on four ranks, without communication: other tests show that rows and sums
travel unchanged. The error is the norm of the difference to y in float64 from unquantised rows, as
a share of the norm of y.
"""

import re
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from epcomm import WireDtype, WireFormat
from epcomm.quantization import FP8_POWER_OF_TWO_SCALES, dequantize, quantize
from epcomm.types import SUM_DTYPES

PAGE = Path(__file__).parents[1] / "docs" / "formats.md"
_MARKED = re.compile(r"(?<=<!-- errors -->\n).*?(?=<!-- /errors -->)", re.DOTALL)
BF16 = WireFormat.of(torch.bfloat16)
QUANTIZED = [WireFormat(dtype=dtype) for dtype in WireDtype if dtype.is_quantized]
DISPATCHED = [BF16, FP8_POWER_OF_TWO_SCALES, *QUANTIZED]
COMBINED = [BF16, *(each for each in QUANTIZED if each.dtype in SUM_DTYPES)]
T, H, NUM_RANKS, NUM_LOCAL = 64, 512, 4, 2
ROWS = ("Gaussian", "with outliers")


@cache
def layer(rows: str) -> tuple[Tensor, Tensor]:
    """Return x [T, H], bfloat16, and the weighted experts of ranks, [W, H, H], float64."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x = normal(T, H)
    if rows != ROWS[0]:
        # One element of a hundred is 50 times as large.
        x = torch.where(torch.rand(T, H, generator=generator) < 0.01, 50 * x, x)
    num_experts = NUM_RANKS * NUM_LOCAL
    weights = torch.softmax(normal(num_experts), dim=0)
    experts = normal(num_experts, H, H) / H**0.5 * weights.view(-1, 1, 1)
    return x.bfloat16(), experts.unflatten(0, (NUM_RANKS, NUM_LOCAL)).sum(1)


@cache
def error_of(dispatched: WireFormat, combined: WireFormat, rows: str) -> float:
    """Return the error of a pair of formats."""
    x, experts = layer(rows)
    sent = dequantize(quantize(x, dispatched), torch.float64)
    y, exact = torch.zeros(T, H), x.double() @ experts.sum(0)
    for mine in experts:
        y += dequantize(quantize((sent @ mine).bfloat16(), combined), torch.float32)
    return float((y.bfloat16().double() - exact).norm() / exact.norm())


def table() -> str:
    """Return a Markdown table with one row per format of dispatch."""
    heads = [f"{each}, {rows}" for rows in ROWS for each in COMBINED]
    lines = [f"| dispatch | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for sent in DISPATCHED:
        cells = [f"{error_of(sent, each, rows):.1%}" for rows in ROWS for each in COMBINED]
        lines.append(f"| `{sent}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def fill(page: str) -> str:
    """Return the page with the table between its markers."""
    return _MARKED.sub(lambda _: table(), page)


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text("utf-8")), "utf-8")
