from ctypes import Structure, c_int, c_void_p
from types import SimpleNamespace

import pytest
import torch

from epcomm.kernels import cuda_jit

INVALID_CONTEXT = 201


class Arguments(Structure):
    _fields_ = (("number", c_int),)


@pytest.mark.parametrize(
    ("is_cooperative", "is_early", "version", "called"),
    [
        (False, False, 13000, "cuLaunchKernel"),
        (True, False, 13000, "cuLaunchCooperativeKernel"),
        (False, True, 12030, "cuLaunchKernelEx"),
        # This driver could not capture an early launch.
        (False, True, 12020, "cuLaunchKernel"),
    ],
)
def test_a_thread_without_a_context_takes_that_of_the_kernel(
    is_cooperative: bool, is_early: bool, version: int, called: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imitate the driver in an autograd thread in which torch has not called CUDA."""
    current: list[int | None] = [None]
    launched: list[int | None] = []

    def launch(*_: object) -> int:
        if current[0] is None:
            return INVALID_CONTEXT
        launched.append(current[0])
        return 0

    def set_context(context: c_void_p) -> int:
        current[0] = context.value
        return 0

    # Blocks that wait for one another must be launched cooperatively.
    driver = SimpleNamespace(cuCtxSetCurrent=set_context, **{called: launch})
    monkeypatch.setattr(cuda_jit, "driver", lambda: driver)
    monkeypatch.setattr(cuda_jit, "_driver_version", lambda: version)
    for name in ("_cuda_getDevice", "_cuda_getCurrentRawStream"):
        monkeypatch.setattr(torch._C, name, lambda *_: 0, raising=False)
    kernel = cuda_jit.CudaKernel(
        function=c_void_p(1),
        context=c_void_p(77),
        threads=32,
        shared_bytes=0,
        is_cooperative=is_cooperative,
    )
    kernel.launch(1, Arguments(), is_early=is_early)
    kernel.launch(1, Arguments(), is_early=is_early)
    assert launched == [77, 77]
