"""Find the operators of torch_npu on a device; the caller imports torch_npu."""

import torch

# Dispatch keys of the operators: that of the vendor, and that of the imitations.
_DISPATCH_KEYS = {"npu": "PrivateUse1", "cpu": "CPU"}


def has_kernel(name: str, device: torch.device | str) -> bool:
    """Return whether torch.ops.npu.<name> is registered for tensors of `device`. Local, no import.

    device: a device, or its type, because torch.device("npu") needs torch_npu.

    A schema without a kernel does not count: a call would raise NotImplementedError.
    """
    key = _DISPATCH_KEYS.get(device if isinstance(device, str) else device.type)
    operator = f"npu::{name}"
    if key is None or not torch._C._jit_get_schemas_for_operator(operator):
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)
