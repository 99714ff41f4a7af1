"""Compile CUDA C++ at run time by NVRTC, which comes with torch, and launch it by the driver.

Both libraries are called through ctypes, so nothing must be installed or built, and no header is
read.
"""

import ctypes
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path

import torch

from epcomm.errors import BackendUnavailable
from epcomm.platforms.cuda import nvidia_libraries

# Values of the driver's enumerations, from cuda.h.
# The driver's status if no context is current in the calling thread.
_INVALID_CONTEXT = 201
_MAX_DYNAMIC_SHARED_BYTES = 8
_TENSOR_MAP_UINT8 = 0
_NO_INTERLEAVE = 0
_SWIZZLE_128B = 3
_PROMOTE_L2_256B = 3
_FILL_WITH_ZEROS = 0
_STREAM_SERIALIZATION = 6
# The first driver that captures early launches into graphs is that of CUDA 12.3.
_EARLY_DRIVER = 12030
_TENSOR_MAP_BYTES = 128
_TENSOR_MAP_ALIGNMENT = 64


class CudaError(BackendUnavailable):
    """The error of a compiler or driver that refused a request."""


class TensorMap(ctypes.Structure):
    """Describes a tensor to the copy engine; passed by value to kernels."""

    _fields_ = [("words", c_uint64 * (_TENSOR_MAP_BYTES // 8))]


class _LaunchAttribute(ctypes.Structure):
    # The value is a union of 64 bytes.
    _fields_ = [("id", c_int), ("_", c_int), ("value", c_int), ("_value", c_int * 15)]


class LaunchConfig(ctypes.Structure):
    """The configuration that cuLaunchKernelEx takes."""

    _fields_ = [
        *((name, c_uint32) for name in ("grid_x", "grid_y", "grid_z")),
        *((name, c_uint32) for name in ("block_x", "block_y", "block_z")),
        ("shared_bytes", c_uint32),
        ("stream", c_void_p),
        ("attributes", POINTER(_LaunchAttribute)),
        ("num_attributes", c_uint32),
    ]


def launch_config(stream: int, *sizes: int, is_early: bool = True) -> LaunchConfig:
    """Return a new configuration; sizes: of grid and block, and bytes of shared memory."""
    attribute = _LaunchAttribute(id=_STREAM_SERIALIZATION, value=1)
    return LaunchConfig(*sizes, stream, ctypes.pointer(attribute), int(is_early))


# Cached, because making it takes several us.
_early_config = lru_cache(maxsize=1024)(launch_config)


def compile_to_cubin(source: str, *, arch: str, name: str) -> bytes:
    """Compile `source` to machine code for an architecture such as "sm_90a". Needs no GPU.

    Raises:
        CudaError: NVRTC is missing, or refused the source, with its messages.
    """
    nvrtc, program = _nvrtc(), c_void_p()
    text, called = source.encode(), name.encode()
    _check_nvrtc(nvrtc.nvrtcCreateProgram(byref(program), text, called, 0, None, None), "begin")
    try:
        options = [f"--gpu-architecture={arch}", "--std=c++17"]
        arguments = (c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), arguments):
            log = _text(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
            messages = log.rstrip(b"\0").decode().strip()
            raise CudaError(f"compile_to_cubin: NVRTC refused {name} for {arch}:\n{messages}")
        return _text(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    finally:
        nvrtc.nvrtcDestroyProgram(byref(program))


def _text(program: c_void_p, size_of: Callable[..., int], read: Callable[..., int]) -> bytes:
    size = c_size_t()
    _check_nvrtc(size_of(program, byref(size)), "size")
    buffer = ctypes.create_string_buffer(size.value)
    _check_nvrtc(read(program, buffer), "read")
    return buffer.raw


@dataclass(frozen=True, kw_only=True)
class CudaKernel:
    """One kernel of a module, on the device where it was loaded.

    threads, shared_bytes: threads and bytes of dynamic shared memory of a block.
    is_cooperative: blocks wait for one another, so that all of them run at the same time: the
        device begins all or none, and refuses a grid that does not fit.
    """

    function: c_void_p
    context: c_void_p
    threads: int
    shared_bytes: int
    is_cooperative: bool

    def launch(self, blocks: int, *arguments: ctypes.Structure, is_early: bool = False) -> None:
        """Enqueue the kernel on torch's current stream, with copies of arguments. No host sync.

        is_early: blocks may begin as soon as the kernel that precedes it in the stream permits, and
            wait for the end of that kernel themselves.

        Raises:
            CudaError: the driver refused the launch.
        """
        pointers = (c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        # torch.cuda.current_stream() makes an object, which takes 2 us.
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        sizes = (blocks, 1, 1, self.threads, 1, 1, self.shared_bytes)
        ordinary = (self.function, *sizes, c_void_p(stream), pointers)
        if is_early and _driver_version() >= _EARLY_DRIVER:
            config = byref(_early_config(stream, *sizes))
            launch = partial(driver().cuLaunchKernelEx, config, self.function, pointers, None)
        elif self.is_cooperative:
            launch = partial(driver().cuLaunchCooperativeKernel, *ordinary)
        else:
            launch = partial(driver().cuLaunchKernel, *ordinary, None)
        status = launch()
        if status == _INVALID_CONTEXT:
            # A thread, for example of autograd, in which torch has not called CUDA yet.
            _check_driver(driver().cuCtxSetCurrent(self.context), "cuCtxSetCurrent")
            status = launch()
        if status:
            _check_driver(status, f"launch of {blocks} blocks")


class CudaModule:
    """A module of machine code in the context of the current device, which is never unloaded."""

    def __init__(self, cubin: bytes) -> None:
        # The driver needs the context that torch makes.
        torch.cuda.current_stream().synchronize()
        self._module, self._context = c_void_p(), c_void_p()
        _check_driver(driver().cuCtxGetCurrent(byref(self._context)), "cuCtxGetCurrent")
        _check_driver(driver().cuModuleLoadData(byref(self._module), cubin), "cuModuleLoadData")

    def kernel(
        self, name: str, *, threads: int, shared_bytes: int, is_cooperative: bool = False
    ) -> CudaKernel:
        """Return a kernel of the module; see CudaKernel for the arguments."""
        function = c_void_p()
        status = driver().cuModuleGetFunction(byref(function), self._module, name.encode())
        _check_driver(status, f"cuModuleGetFunction({name})")
        status = driver().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes)
        _check_driver(status, "cuFuncSetAttribute")
        return CudaKernel(
            function=function,
            context=self._context,
            threads=threads,
            shared_bytes=shared_bytes,
            is_cooperative=is_cooperative,
        )


@lru_cache(maxsize=1024)
def byte_matrix_map(
    address: int,
    num_rows: int,
    num_columns: int,
    box_rows: int,
    box_columns: int,
    row_bytes: int | None = None,
) -> TensorMap:
    """Describe boxes of an [N, K] matrix of one-byte elements, with 128-byte swizzle.

    It depends only on these numbers, so a later matrix at the same address has the same map.

    Args:
        address: of the first element, a multiple of 16.
        num_rows: N.
        num_columns: K.
        box_rows: rows that the copy engine copies at a time.
        box_columns: columns that it copies at a time.
        row_bytes: bytes from one row to the next, at least K, or None for K.

    Raises:
        CudaError: the driver refuses the shape: row_bytes must be a multiple of 16.
    """
    # The driver writes only to addresses that are multiples of 64 bytes.
    storage = (ctypes.c_uint8 * (_TENSOR_MAP_BYTES + _TENSOR_MAP_ALIGNMENT))()
    offset = -ctypes.addressof(storage) % _TENSOR_MAP_ALIGNMENT
    found = TensorMap.from_buffer(storage, offset)
    status = driver().cuTensorMapEncodeTiled(
        byref(found),
        _TENSOR_MAP_UINT8,
        c_uint32(2),
        c_void_p(address),
        (c_uint64 * 2)(num_columns, num_rows),
        (c_uint64 * 1)(num_columns if row_bytes is None else row_bytes),
        (c_uint32 * 2)(box_columns, box_rows),
        (c_uint32 * 2)(1, 1),
        *(_NO_INTERLEAVE, _SWIZZLE_128B, _PROMOTE_L2_256B, _FILL_WITH_ZEROS),
    )
    _check_driver(status, "cuTensorMapEncodeTiled")
    return found


@cache
def nvrtc_is_installed() -> bool:
    """Return whether NVRTC can be loaded. Cached, because every call of a runner asks."""
    try:
        _nvrtc()
    except CudaError:
        return False
    return True


@cache
def _nvrtc() -> ctypes.CDLL:
    major = (torch.version.cuda or "").partition(".")[0]
    names = [f"libnvrtc.so.{version}" for version in dict.fromkeys((major, "13", "12")) if version]
    in_wheels = [path for name in names for path in nvidia_libraries(name)]
    # Then those on the loader's path.
    for candidate in (*in_wheels, *names, "libnvrtc.so"):
        try:
            # NVRTC loads its builtins by name alone, which works once they are loaded here.
            for builtins in sorted(Path(candidate).parent.glob("libnvrtc-builtins.so.*[0-9]")):
                ctypes.CDLL(str(builtins))
            library = ctypes.CDLL(candidate)
        except OSError:
            continue
        library.nvrtcCreateProgram.argtypes = [
            POINTER(c_void_p), c_char_p, c_char_p, c_int, c_void_p, c_void_p
        ]  # fmt: skip
        return library
    raise CudaError(
        "compile_to_cubin: libnvrtc was not found; install the CUDA build of torch, or "
        "nvidia-cuda-nvrtc"
    )


@cache
def driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError("cuda_jit: libcuda.so.1 was not found; install NVIDIA's driver") from error


@cache
def _driver_version() -> int:
    version = c_int()
    _check_driver(driver().cuDriverGetVersion(byref(version)), "cuDriverGetVersion")
    return version.value


def _check_nvrtc(status: int, what: str) -> None:
    if status:
        raise CudaError(f"compile_to_cubin: NVRTC could not {what}: error {status}")


def _check_driver(status: int, what: str) -> None:
    if status:
        text = c_char_p()
        driver().cuGetErrorString(status, byref(text))
        message = (text.value or b"unknown").decode()
        raise CudaError(f"{what}: {message} (CUDA error {status})")
