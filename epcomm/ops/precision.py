"""Choose the dtypes in which rows are sent, experts compute and results return (docs/precision.md).

Rows are sent in the dtype that ranks agreed on when the layer was planned, whatever a call is
given: no rank can know another rank's dtype before it sends. y has the dtype of the rows given.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from epcomm.errors import ConfigError
from epcomm.records import DispatchOutput, RowsCombineInput
from epcomm.types import UNQUANTIZED_DTYPES
from epcomm.weights.unquantized import ExpertTensors, ExpertWeights

# A tensor of one of these dtypes is cast where another of them is expected.
FLOAT_DTYPES = frozenset(dtype.torch_dtype for dtype in UNQUANTIZED_DTYPES)


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a tensor, without the host time of to() where the dtype is right. Differentiable."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def cast_results(
    rows: RowsCombineInput, dtype: torch.dtype, weights_dtype: torch.dtype
) -> RowsCombineInput:
    """Cast expert results and slot weights to the dtypes of combine. Differentiable."""
    if rows.hidden_states.dtype is not dtype:
        rows = replace(rows, hidden_states=rows.hidden_states.to(dtype))
    weights = rows.slot_weights
    if weights is not None and weights.dtype is not weights_dtype:
        rows = replace(rows, slot_weights=weights.to(weights_dtype))
    return rows


def compute_dtype(dispatched: DispatchOutput, weights: ExpertTensors) -> torch.dtype:
    """Return the dtype in which unquantised experts compute a batch.

    It is the narrower of the experts' dtype and the dtype of the rows that this rank dispatched; of
    two dtypes of equal width, the dtype of the rows. Under torch.autocast it is the dtype of
    autocast, except that float64 stays, as everywhere in torch.
    """
    experts, given = weights.dtype, dispatched.handle.dtype or weights.dtype
    narrower = experts if experts.itemsize < given.itemsize else given
    device_type = dispatched.hidden_states.data.device.type
    if narrower is torch.float64 or not torch.is_autocast_enabled(device_type):
        return narrower
    return torch.get_autocast_dtype(device_type)


def cast_experts(weights: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
    """Cast the experts to `dtype`, differentiably: gradients have the dtype of the parameters."""
    if weights.dtype is dtype:
        return weights
    return weights.with_tensors({name: t.to(dtype) for name, t in weights.tensors().items()})


def check_cast(weights: ExpertTensors, convert: Callable[[Tensor], Tensor], where: str) -> None:
    """Refuse to cast codes and scales of quantised experts, as module.to() would.

    convert: the function that nn.Module._apply() gets.   where: `rank 3 of 8`, for the message.

    Local.
    """
    if not weights.wire_format.dtype.is_quantized:
        return
    for name, tensor in weights.tensors().items():
        came = convert(torch.empty(0, dtype=tensor.dtype, device="cpu")).dtype
        if came is not tensor.dtype:
            raise ConfigError(
                f"ExpertParallelExperts: {name} is {tensor.dtype} and would become {came} "
                f"({where}), but codes and scales of quantised experts keep their dtypes; cast the "
                "other modules of the model alone, or cast it before its experts are quantised"
            )
