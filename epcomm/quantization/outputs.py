"""Check the input of every quantiser, and make or check the memory for codes and scales."""

from __future__ import annotations

import torch
from torch import Tensor

from epcomm.errors import ShapeError
from epcomm.types import WireFormat, WireTensor

# These dtypes are exact in float32, in which all arithmetic is done.
_INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_hidden_states(caller: str, hidden_states: Tensor) -> None:
    """Refuse hidden states that cannot be quantised.

    Raises:
        ShapeError: a dtype that float32 does not hold exactly, or no columns.
    """
    if hidden_states.dtype not in _INPUT_DTYPES:
        raise ShapeError(
            f"{caller}: hidden_states are {hidden_states.dtype}, expected bfloat16, float16 or "
            "float32; cast them"
        )
    if hidden_states.ndim < 2 or hidden_states.shape[-1] == 0:
        raise ShapeError(
            f"{caller}: hidden_states have shape {list(hidden_states.shape)}, expected [..., T, H] "
            "with H of at least 1; add the missing dimension"
        )


def output_for(
    caller: str, hidden_states: Tensor, wire_format: WireFormat, out: WireTensor | None
) -> WireTensor:
    """Return `out` after checking it, or new contiguous memory where `out` is None.

    Raises:
        ShapeError: `out` has another format, shape, dtype or device, or no scales.
    """
    assert wire_format.scale_dtype is not None, "only for quantised formats"
    num_scales = wire_format.num_scales(hidden_states.shape[-1])
    scale_shape = (*hidden_states.shape[:-1], num_scales)
    device = hidden_states.device
    expected = WireTensor(
        data=_expected(out, hidden_states.shape, wire_format.dtype.torch_dtype, device),
        format=wire_format,
        scales=_expected(out, scale_shape, wire_format.scale_dtype, device),
    )
    if out is None:
        return expected
    came, wanted = describe(out), describe(expected)
    if came != wanted:
        raise ShapeError(f"{caller}: out has {came}, expected {wanted}; make it for this call")
    return out


def describe(wire: WireTensor) -> str:
    """Describe all that must agree between two wire tensors: format, shapes, dtypes, device."""
    scales = "no scales" if wire.scales is None else f"scales {_describe_tensor(wire.scales)}"
    return f"format {wire.format}, data {_describe_tensor(wire.data)}, {scales}"


def _expected(
    out: WireTensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    # A tensor that is only compared with `out` takes no memory: stride 0 over one element.
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty(1, dtype=dtype, device=device).expand(shape)


def _describe_tensor(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"
