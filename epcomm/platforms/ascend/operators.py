"""Tell which operators of torch_npu a device has; torch_npu itself is the caller's to import."""

from __future__ import annotations

import torch

# Devices that the operators may be registered for: the vendor's, and that of the stand-ins.
_DISPATCH_KEYS = {"npu": "PrivateUse1", "cpu": "CPU"}


def has_kernel(name: str, device: torch.device | str) -> bool:
    """Return whether torch.ops.npu.<name> is registered for tensors of `device`. Local, no import.

    device: or its type alone; "npu" makes no torch.device where torch_npu is not imported.

    Its schema alone is not enough: a call would raise NotImplementedError.
    """
    key = _DISPATCH_KEYS.get(device if isinstance(device, str) else device.type)
    operator = f"npu::{name}"
    is_defined = bool(torch._C._jit_get_schemas_for_operator(operator))
    if key is None or not is_defined:
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)
