"""A pytest plugin: run library code under another default device or dtype of torch.

TEST_DEFAULT_DEVICE=meta and TEST_DEFAULT_DTYPE=bfloat16 set them, in this process and in the ranks
that it starts; `make test-defaults` runs the quick tests in this way. They act only on calls of
torch from epcomm/: tests and other packages get the CPU and float32 where they name nothing. On
meta, a tensor whose device the library did not name has no memory, so that its first use fails.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

DEVICE_ENV, DTYPE_ENV = "TEST_DEFAULT_DEVICE", "TEST_DEFAULT_DTYPE"
LIBRARY = str(Path(__file__).parents[1] / "epcomm") + os.sep
TORCH = str(Path(torch.__file__).parent) + os.sep
# Torch functions that call the library's autograd functions and operators.
ENTRIES = {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}
OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


class LibraryDefaults(TorchFunctionMode):
    """Apply the default device to calls from epcomm/, and float32 as default dtype to all others.

    The default dtype of the process is the library's: operations that are not calls of torch, such
    as a promotion inside a backward pass, follow it. As under set_default_device(), calls made
    inside a call of torch are not changed.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        named = dict(kwargs or {})
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **named)
        caller = sys._getframe(1)
        # Tensors that torch makes for the library are excluded, because parts of torch call item()
        # on them.
        if is_library(caller) and func in _device_constructors() and named.get("device") is None:
            named["device"] = self.device
        if is_for_library(caller):
            return func(*args, **named)
        if func in ENTRIES or isinstance(func, OPERATORS):
            return func(*args, **named)
        with default_dtype(torch.float32):
            return func(*args, **named)


def is_library(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(LIBRARY)


def is_for_library(frame: FrameType | None) -> bool:
    """Return whether the innermost frame outside torch is one of epcomm/."""
    while frame is not None and frame.f_code.co_filename.startswith(TORCH):
        frame = frame.f_back
    return frame is not None and is_library(frame)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    kept = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(kept)


def pytest_configure(config: pytest.Config) -> None:
    device, dtype = os.environ.get(DEVICE_ENV), os.environ.get(DTYPE_ENV)
    if device or dtype:
        torch.set_default_dtype(getattr(torch, dtype or "float32"))
        config.add_cleanup(lambda: torch.set_default_dtype(torch.float32))
        mode = LibraryDefaults(torch.device(device or "cpu"))
        mode.__enter__()
        config.add_cleanup(lambda: mode.__exit__(None, None, None))
