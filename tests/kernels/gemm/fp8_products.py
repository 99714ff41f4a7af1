"""Check memory that all implementations of the products of e4m3 must not write."""

import torch

from epcomm.records import RowsDispatchOutput
from epcomm.runners.fp8_triton import Multiply
from epcomm.runners.gpu_slots import first_product, second_product
from epcomm.types import Int8Profile
from epcomm.weights.quantized import QuantizedWeights
from tests.kernels.gemm.slot_records import Case, record

# Value of elements that may not be written; it is a finite code too.
SENTINEL = -7.0


def check_unused_slots_are_left(
    products: tuple[Multiply, Multiply], weights: QuantizedWeights, device: torch.device
) -> None:
    """Check that padding between experts and after the last one is not written."""
    case = Case(dtype=weights.dtype, expert_alignment=8)
    dispatched = record(case, weights.hidden_size, weights.wire_format, device)
    assert isinstance(dispatched, RowsDispatchOutput)
    index = dispatched.index
    assert index.row_of_slot is not None
    is_used = index.row_of_slot >= 0
    starts = index.first_slot.tolist()
    assert not is_used[: starts[-1]].all(), "there is padding"
    assert len(is_used) > starts[-1], "there are slots after the last expert"
    num_slots, inner_size = len(is_used), weights.intermediate_size

    def untouched(num_columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((num_slots, num_columns), SENTINEL, device=device).to(dtype)

    codes = untouched(inner_size, torch.float8_e4m3fn)
    wire = weights.wire_format
    # A power of two has no sign: it is 8 there, and in comparisons of both.
    scales = untouched(wire.num_scales(inner_size), wire.scale_dtype)
    results = untouched(weights.hidden_size, weights.dtype)
    gate_up, down = products
    first = first_product(dispatched, weights, Int8Profile.RINT127)
    gate_up(first, out_codes=codes, out_scales=scales)
    second = second_product(first, codes, scales, weights)
    down(second, slot_weights=dispatched.slot_weights, out=results)
    for written in (codes.float(), scales, results.float()):
        assert (written[~is_used] == SENTINEL).all()
        assert (written[is_used] != SENTINEL).any(dim=1).all()
