"""Launch Triton kernels repeatedly without Triton's Python.

Triton inspects every argument of every call to find the compiled variant, which takes 15 to 30 us
of host time for the kernels of this library. A launch with the same constants needs that once.
Later calls write the arguments that change to memory that the driver reads, and call the driver.
"""

import ctypes
import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref, c_size_t, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor

from epcomm.kernels.cuda_jit import CudaError, driver, launch_config
from epcomm.kernels.launch import IS_INTERPRETED

_logger = logging.getLogger(__name__)

# Marks an argument of a PreparedLaunch that every call passes.
CHANGES: Final = object()

# Pointers that are multiples of 16 bytes have a separate compiled variant.
_ALIGNMENT_MASK = 15
# Bytes and struct format, padded to 8 bytes, of an argument by the type that Triton gave it.
_POINTER = (8, "Q")
_FORMATS = {"i32": (4, "i4x"), "u32": (4, "I4x"), "i64": (8, "q"), "u64": (8, "Q")}
_SLOT_BYTES = 8
# Pointers to scratch memory, which Triton appends to the arguments.
_MAX_SCRATCH = 2
# CU_POINTER_ATTRIBUTE_DEVICE_POINTER of cuda.h.
_DEVICE_POINTER = 3


class CompiledKernel(Protocol):
    """The attributes of a kernel that Triton has compiled and loaded."""

    function: int
    metadata: Any
    src: Any


@dataclass(frozen=True, kw_only=True)
class Driver:
    """The calls of CUDA and torch that a launch makes.

    launch: cuLaunchKernelEx.   device, stream: the current device, and its current stream.
    """

    launch: Callable[..., int]
    device: Callable[[], int]
    stream: Callable[[int], int]


class DirectLaunch:
    """A compiled kernel with memory for its arguments, which the driver reads at each launch."""

    def __init__(
        self,
        compiled: CompiledKernel,
        arguments: Sequence[object],
        changing: Sequence[object],
        types: Sequence[str],
        *,
        num_scratch: int,
        device_index: int,
        calls: Driver,
    ) -> None:
        """Lay out the arguments.

        arguments: those of the call that compiled the kernel, without constants.
        changing: an entry for each argument, None where the argument does not change.
        types: Triton's type of each argument, "constexpr" where the kernel has none.
        num_scratch: number of scratch pointers after the arguments, which get null.
        """
        self._calls, self._device_index = calls, device_index
        # Guards the memory, because threads of a process may share a kernel.
        self._lock = Lock()
        given = [place for place, each in enumerate(changing) if each is not None]
        kept = [place for place in range(len(arguments)) if place not in given]
        # Arguments that change are not kept, so that a batch is freed after its call.
        self._keeps = (compiled, [arguments[place] for place in kept])
        # Arguments that change come first, so that one call writes all of them.
        order = [place for place in (*given, *kept) if types[place] != "constexpr"]
        formats = {place: _FORMATS.get(types[place], _POINTER)[1] for place in order}
        self._memory = ctypes.create_string_buffer(_SLOT_BYTES * (len(order) + num_scratch))
        begin = ctypes.addressof(self._memory)
        slots = {place: begin + _SLOT_BYTES * slot for slot, place in enumerate(order)}
        scratch = [begin + _SLOT_BYTES * (len(order) + each) for each in range(num_scratch)]
        addresses = [slots[place] for place in sorted(order)] + scratch
        values = [arguments[place] for place in order]
        self._parameters = (c_void_p * len(addresses))(*addresses)
        struct.pack_into(
            "=" + "".join(formats[place] for place in order),
            self._memory,
            0,
            *(each.data_ptr() if isinstance(each, Tensor) else each for each in values),
        )
        given_formats = "".join(formats.get(place, "") for place in given)
        self._write = struct.Struct(f"={given_formats}").pack_into
        self._kinds = [_kind_of(arguments[place], types[place]) for place in given]
        metadata = compiled.metadata
        # launch() sets the stream and the size of the grid.
        sizes = (1, 1, 1, 32 * metadata.num_warps, 1, 1, metadata.shared)
        is_early = getattr(metadata, "launch_pdl", False)
        self._config = launch_config(0, *sizes, is_early=is_early)
        self._fixed = (byref(self._config), c_void_p(compiled.function), self._parameters, None)

    def launch(self, grid: int, changing: Sequence[object]) -> bool:
        """Launch `grid` programs on the current stream, and return whether that was possible.

        It is not for arguments that need another compiled variant, or if the kernel's device is not
        the current one.
        """
        calls, index = self._calls, self._device_index
        if calls.device() != index:
            return False
        values, pointers = [], 0
        for value, kind in zip(changing, self._kinds, strict=True):
            if kind is None or value is None:
                if kind is not value:
                    return False
            elif kind is int:
                values.append(value)
            elif value.dtype is kind:  # type: ignore[attr-defined]
                pointer = value.data_ptr()  # type: ignore[attr-defined]
                pointers |= pointer
                values.append(pointer)
            else:
                return False
        if pointers & _ALIGNMENT_MASK:
            return False
        config = self._config
        with self._lock:
            try:
                self._write(self._memory, 0, *values)
            except struct.error:
                # An integer does not fit its type.
                return False
            config.grid_x, config.stream = grid, calls.stream(index)
            return calls.launch(*self._fixed) == 0


class PreparedLaunch:
    """A Triton kernel with its constants, and arguments of which few change between calls.

    The first call goes through Triton, which compiles the kernel; so does every call under the
    interpreter, and one that needs another compiled variant. Only those run hooks of Triton.
    """

    def __init__(
        self, kernel: object, arguments: Sequence[object], constants: Mapping[str, Any]
    ) -> None:
        """Keep the kernel, its constants and the arguments that do not change.

        Args:
            kernel: decorated by triton.jit.
            arguments: in order, without constants: tensors, integers, None, tuples of tensors, or
                CHANGES. The kernel is not specialised for integers (do_not_specialize).
            constants: by name, with the options of the compiler.
        """
        self._kernel, self._arguments, self._constants = cast(Any, kernel), arguments, constants
        self._direct: DirectLaunch | None = None
        self._is_settled = IS_INTERPRETED

    def __call__(self, grid: int, *changing: Tensor | int | None) -> None:
        """Launch `grid` programs with the arguments that change, in order. No host sync."""
        direct = self._direct
        if direct is not None and direct.launch(grid, changing):
            return
        rest = iter(changing)
        arguments = [next(rest) if each is CHANGES else each for each in self._arguments]
        # Some tensors are memory of the host that the device reads.
        tensors = [each for each in _flat(arguments) if isinstance(each, Tensor)]
        tensor = next((each for each in tensors if each.is_cuda), tensors[0])
        # On a CPU the function does nothing.
        with torch.cuda.device_of(tensor):
            compiled = self._kernel[(grid,)](*arguments, **self._constants)
        if not self._is_settled and tensor.is_cuda and _is_aligned(changing):
            self._is_settled = True
            self._direct = self._prepare(compiled, arguments, tensor.device)

    def _prepare(
        self, compiled: CompiledKernel, arguments: Sequence[object], device: torch.device
    ) -> DirectLaunch | None:
        """Return the direct launch, or None where this Triton or driver does not support it."""
        kernel, flat = self._kernel, _flat(arguments)
        try:
            types = types_of(compiled, kernel.arg_names, len(flat))
            _check_integers(arguments, kernel.params)
            _check_host_memory(flat)
            num_scratch = _num_scratch(compiled, types)
            # An old driver does not have this function.
            launch = driver().cuLaunchKernelEx
        except (AttributeError, KeyError, CudaError, UnpreparedError) as problem:
            _logger.info("%s is launched by Triton: %s", kernel, problem)
            return None
        return DirectLaunch(
            compiled,
            flat,
            [CHANGES if each is CHANGES else None for each in _flat(self._arguments)],
            types,
            num_scratch=num_scratch,
            device_index=device.index,
            calls=Driver(
                launch=launch,
                device=torch._C._cuda_getDevice,
                stream=torch._C._cuda_getCurrentRawStream,
            ),
        )


# Dtypes of tensors, or types of other arguments, in order; and constants by name.
_Form = tuple[tuple[torch.dtype | type, ...], tuple[tuple[str, Any], ...]]


def launch(
    kernel: object, grid: int, arguments: tuple[Tensor | int | None, ...], **constants: object
) -> None:
    """Launch `grid` programs on the device of the arguments. Host sync: none.

    Args:
        kernel: decorated by triton.jit; it is specialised for no integer among its arguments.
        grid: number of programs.
        arguments: in the order of the kernel's parameters, which constants follow.
        constants: those, and options of the compiler.
    """
    device = next(each.device for each in arguments if isinstance(each, Tensor))
    dtypes = tuple(each.dtype if isinstance(each, Tensor) else type(each) for each in arguments)
    _prepared(kernel, device, (dtypes, tuple(constants.items())))(grid, *arguments)


# A layer in training calls a kernel in about ten forms.
@lru_cache(maxsize=256)
def _prepared(kernel: object, device: torch.device, form: _Form) -> PreparedLaunch:
    dtypes, constants = form
    return PreparedLaunch(kernel, (CHANGES,) * len(dtypes), dict(constants))


class UnpreparedError(Exception):
    """The reason why a kernel is launched by Triton in every call."""


def types_of(compiled: CompiledKernel, names: Sequence[str], num_arguments: int) -> list[str]:
    """Return Triton's types of the first arguments of a kernel; the others are constants.

    Members of tuples count as separate arguments.

    Raises:
        UnpreparedError: types, scratch memory or launches that are not supported.
    """
    signature, metadata = compiled.src.signature, compiled.metadata
    types = _flat([signature[name] for name in names])
    known = all(each in _FORMATS or each == "constexpr" or each[0] == "*" for each in types)
    if not known or set(types[num_arguments:]) - {"constexpr"}:
        raise UnpreparedError(f"its signature is {signature}")
    for name, wanted in (
        ("num_ctas", 1),
        ("global_scratch_size", 0),
        ("profile_scratch_size", 0),
        ("launch_cooperative_grid", False),
    ):
        found = getattr(metadata, name, wanted)
        if found != wanted:
            raise UnpreparedError(f"{name} is {found}")
    return types[:num_arguments]


def _flat(values: Sequence[Any]) -> list[Any]:
    """Return values with the members of tuples in their place."""
    members = [each if isinstance(each, tuple) else (each,) for each in values]
    return [each for group in members for each in group]


def _check_integers(arguments: Sequence[object], params: Sequence[Any]) -> None:
    for value, param in zip(arguments, params, strict=False):
        # Triton is specialised for each member of a tuple, also if do_not_specialize names it.
        is_varying = param.do_not_specialize and not isinstance(value, tuple)
        if not is_varying and any(isinstance(each, int) for each in _flat([value])):
            raise UnpreparedError(f"it is specialised for {param.name}")


def _check_host_memory(arguments: Sequence[object]) -> None:
    """Refuse host memory that has another address on the device."""
    for tensor in arguments:
        if isinstance(tensor, Tensor) and not tensor.is_cuda:
            found, address = c_void_p(), c_void_p(tensor.data_ptr())
            status = driver().cuPointerGetAttribute(byref(found), _DEVICE_POINTER, address)
            if status or found.value != address.value:
                raise UnpreparedError("the device has another address for memory of the host")


def _num_scratch(compiled: CompiledKernel, types: Sequence[str]) -> int:
    """Return the number of scratch pointers, after comparing the driver's sizes of parameters."""
    ask = driver().cuFuncGetParamInfo
    function, offset, size, found = c_void_p(compiled.function), c_size_t(), c_size_t(), []
    while ask(function, c_size_t(len(found)), byref(offset), byref(size)) == 0:
        found.append(size.value)
    wanted = [_FORMATS.get(each, _POINTER)[0] for each in types if each != "constexpr"]
    scratch = found[len(wanted) :]
    if found[: len(wanted)] != wanted or scratch != [_SLOT_BYTES] * min(_MAX_SCRATCH, len(scratch)):
        raise UnpreparedError(f"its parameters have {found} bytes, expected {wanted}")
    return len(scratch)


def _is_aligned(arguments: Sequence[object]) -> bool:
    pointers = [each.data_ptr() for each in arguments if isinstance(each, Tensor)]
    return not any(pointer & _ALIGNMENT_MASK for pointer in pointers)


def _kind_of(argument: object, kind: str) -> object:
    """Return what later arguments at this index must be: a dtype, int, or None."""
    if kind == "constexpr":
        return None
    return argument.dtype if isinstance(argument, Tensor) else int
