"""The kernels of normal mode as programs: constants, then files of CUDA C++, ptx.cu first."""

import ctypes
import re
from collections.abc import Mapping, Sequence
from ctypes import c_int, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from epcomm import protocol
from epcomm.kernels.cuda_jit import CudaError, CudaModule, compile_to_cubin, nvrtc_is_installed
from epcomm.kernels.nvlink.common.exchange import LOOKS_PER_TICK, POLL_BITS
from epcomm.platforms.cuda import COPY_ENGINE, compute_capability, shared_bytes_of

# The unit of the copy engine, and the widest access of a thread.
COPY_BYTES = 16
# Each lane of a warp holds one rank, or one entry of a token.
LANES = 32

# Shared memory of a block, dynamic and static, at most.
MAX_SHARED_BYTES = 224 * 1024

_FOLDER = Path(__file__).parent
_PROTOCOL = (
    *("REPORT_WAIT", "REPORT_EPOCH", "REPORT_ABORTED", "REPORT_MISSING", "MISSING_SHIFT"),
    *("MAX_MISSING", "HEADER_WORDS", "FAULT_MASK", "FLAGS_SHIFT", "COMPARED_FLAGS"),
)
# Constants of all kernels.
_NUMBERS = {
    **{name: getattr(protocol, name) for name in _PROTOCOL},
    **{f"FAULT_{each.name}": int(each) for each in protocol.FaultCode},
    **{f"WAIT_{each.name}": int(each) for each in protocol.Wait},
    "LOOKS_PER_TICK": LOOKS_PER_TICK,
    "POLL_BITS": POLL_BITS,
}


# The types of arguments that are no pointers.
_TYPES = {"int": c_int, "i64": c_int64, "u64": c_uint64}


def arguments_of(file: str) -> type[ctypes.Structure]:
    """Return the `struct Arguments` that a file of this folder declares, one member a line."""
    _, _, declared = (_FOLDER / file).read_text(encoding="utf-8").partition("struct Arguments {")
    members = re.findall(r"^ +[\w ]*\b(\w+)(\*?) (\w+);", declared.partition("};")[0], re.MULTILINE)
    fields = [(name, c_void_p if star else _TYPES[kind]) for kind, star, name in members]
    return type("Arguments", (ctypes.Structure,), {"_fields_": fields})


@dataclass(frozen=True, kw_only=True)
class Program:
    """A kernel before it is compiled.

    entry: the name of the kernel in the last file.   files: of this folder, in order.
    constants: defined before them, with numbers of epcomm/protocol.py.   threads: of a block.
    shared_bytes: of dynamic shared memory of a block.
    is_cooperative: blocks wait for one another, so all of them must run at the same time.
    """

    entry: str
    files: Sequence[str]
    constants: Mapping[str, int]
    threads: int
    shared_bytes: int = 0
    is_cooperative: bool = True

    def source(self, files: Sequence[str] = ("ptx.cu",)) -> str:
        """Return the source after `files`, which define what the files of the program use."""
        defined = [
            f"#define {name} {value}LL" if value >= 2**31 else f"#define {name} {value}"
            for name, value in {**self.constants, **_NUMBERS}.items()
        ]
        parts = [(_FOLDER / name).read_text(encoding="utf-8") for name in (*files, *self.files)]
        return "\n".join([*defined, *parts])


class LoadedKernel(Protocol):
    """A kernel of a device."""

    def launch(self, blocks: int, *arguments: ctypes.Structure) -> None:
        """Launch `blocks` blocks on the current stream, with copies of the arguments."""
        ...


def load_kernel(program: Program, device: torch.device) -> LoadedKernel:
    """Compile a program by NVRTC and load it. Tests replace this function on CPU ranks.

    Raises:
        CudaError: the compiler or the driver refuses.
    """
    capability = compute_capability(device)
    if capability is None:
        raise CudaError(f"{program.entry}: the kernel is for {device}, expected cuda")
    arch = "sm_{}{}".format(*capability)
    cubin = compile_to_cubin(program.source(), arch=arch, name=program.files[-1])
    with torch.cuda.device(device):
        return CudaModule(cubin).kernel(
            program.entry,
            threads=program.threads,
            shared_bytes=program.shared_bytes,
            is_cooperative=program.is_cooperative,
        )


def reasons_against(device: torch.device) -> list[str]:
    """List why a device cannot run these programs; empty if it can. Local.

    Tests replace this function on CPU ranks.
    """
    if device.type != "cuda":
        return [f"the group is on {device}, expected cuda"]
    found = [] if nvrtc_is_installed() else ["NVRTC is missing; install nvidia-cuda-nvrtc"]
    found += COPY_ENGINE.lacking(compute_capability(device) or (0, 0))
    has_memory = (shared_bytes_of(device) or 0) >= MAX_SHARED_BYTES
    return found if has_memory else [*found, f"a block has less than {MAX_SHARED_BYTES} bytes"]


def in_vectors(rows: Tensor) -> Tensor:
    """Return rows of a multiple of 16 bytes that begin at such multiples: these, or a copy.

    Columns of 0 follow the last one of rows of other lengths.
    """
    row_bytes = rows.shape[1] * rows.itemsize
    missing = -row_bytes % COPY_BYTES
    if missing:
        padded = pad(rows.contiguous().view(torch.uint8), (0, missing))
        return padded.view(rows.dtype)
    stride_bytes = rows.stride(0) * rows.itemsize if rows.shape[0] > 1 else 0
    if rows.stride(1) == 1 and (rows.data_ptr() | stride_bytes) % COPY_BYTES == 0:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)
