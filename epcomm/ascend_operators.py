"""Whether torch.ops.npu can be called: with torch_npu on its device, with a stand-in on another."""

from __future__ import annotations

import torch

_DISPATCH_KEYS = {"npu": "PrivateUse1", "cpu": "CPU"}


def has_kernel(name: str, device: torch.device) -> bool:
    """Whether npu::`name` is defined and takes tensors of the device. Imports nothing."""
    key = _DISPATCH_KEYS.get(device.type)
    operator = f"npu::{name}"
    is_defined = bool(torch._C._jit_get_schemas_for_operator(operator))
    if key is None or not is_defined:
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)
