"""Check the input of every quantiser, and make or check the memory for codes and scales."""

from __future__ import annotations

import torch
from torch import Tensor

from epcomm.errors import ConfigError, ShapeError
from epcomm.quantization.int8 import INT8_PER_TOKEN
from epcomm.types import WireDtype, WireFormat, WireTensor

# These dtypes are exact in float32, in which all arithmetic is done.
_INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_FP8_SCALES = (torch.float32, torch.float8_e8m0fnu)


def check_format(caller: str, wire_format: WireFormat) -> None:
    """Refuse a quantised format that the arithmetic does not know.

    Raises:
        ConfigError: such a format.
    """
    if wire_format.dtype is WireDtype.INT8:
        is_known, expected = wire_format == INT8_PER_TOKEN, f"{INT8_PER_TOKEN} (one scale a row)"
        scales = "torch.float32"
    else:
        is_known, expected = wire_format.scale_dtype in _FP8_SCALES, WireDtype.FP8_E4M3.value
        scales = "torch.float32 or torch.float8_e8m0fnu"
    if not is_known:
        raise ConfigError(
            f"{caller}: format is {wire_format} with scales {wire_format.scale_dtype}, expected "
            f"{expected} with scales {scales}; choose another wire format"
        )


def _check_hidden_states(caller: str, hidden_states: Tensor) -> None:
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
        ConfigError: a format that the arithmetic does not know.
        ShapeError: hidden states of another dtype or without columns; or `out` has another format,
            shape, dtype or device, or no scales.
    """
    check_format(caller, wire_format)
    _check_hidden_states(caller, hidden_states)
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
    came, wanted = _describe(out), _describe(expected)
    if came != wanted:
        raise ShapeError(f"{caller}: out has {came}, expected {wanted}; make it for this call")
    return out


def _describe(wire: WireTensor) -> str:
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
