"""Choose the implementation that quantises on a type of device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from epcomm.errors import BackendUnavailable
from epcomm.quantization.plain import quantize
from epcomm.types import Int8Profile, WireFormat, WireTensor


class Quantizer(Protocol):
    """The signature of quantize(); all implementations return the same bits."""

    def __call__(
        self,
        hidden_states: Tensor,
        wire_format: WireFormat,
        *,
        profile: Int8Profile = Int8Profile.RINT127,
        out: WireTensor | None = None,
    ) -> WireTensor: ...


def _load_triton() -> Quantizer:
    try:
        from epcomm.quantization.with_triton import quantize_with_triton
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise BackendUnavailable(
            "quantizer_for: triton is not installed, expected it for tensors on cuda; "
            "install triton, or call epcomm.quantization.quantize(), which is plain torch"
        ) from error
    return quantize_with_triton


# Device types without an entry have no kernels here and use plain torch.
_LOADERS: dict[str, Callable[[], Quantizer]] = {"cuda": _load_triton}


def quantizer_for(device: torch.device) -> Quantizer:
    """Return the fastest quantiser for tensors on `device`; call this once, at construction.

    Raises:
        BackendUnavailable: Triton is missing, which the quantiser for CUDA needs.
    """
    loader = _LOADERS.get(device.type)
    return loader() if loader is not None else quantize
