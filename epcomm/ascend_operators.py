"""Which of the vendor's operators are here, without importing what brings them."""

from __future__ import annotations

import torch

_DISPATCH_KEYS = {"npu": "PrivateUse1", "cpu": "CPU"}


def has_operator(name: str, device_type: str) -> bool:
    """Whether torch.ops.npu.<name> computes on such devices; on a CPU only stand-ins do. Local."""
    key, operator = _DISPATCH_KEYS.get(device_type), f"npu::{name}"
    is_defined = bool(torch._C._jit_get_schemas_for_operator(operator))
    if key is None or not is_defined:
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)
