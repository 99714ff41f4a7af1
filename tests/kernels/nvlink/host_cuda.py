"""Run the kernels of normal mode on CPU ranks: their CUDA C++, compiled by the host's compiler.

tests/conftest.py calls install() where there is no GPU. Compiled libraries are kept in build/,
named by a hash of their sources.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
from ctypes import addressof, c_uint32, c_void_p
from functools import cache
from pathlib import Path

import torch

from epcomm.kernels.nvlink.normal import program
from epcomm.kernels.nvlink.normal.program import LoadedKernel, Program

HEADER = Path(__file__).with_name("host_cuda.h")
_BUILD = Path(__file__).parents[3] / "build" / "host_cuda"
# Products and sums are rounded apart, as on a GPU; fibers jump between stacks.
_OPTIONS = (
    *("-std=c++20", "-O1", "-fPIC", "-shared", "-pthread", "-ffp-contract=off"),
    *("-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-Wno-attributes"),
)
_LAUNCH = """
extern "C" void launch(const void* arguments, u32 blocks, u32 threads, u32 shared_bytes, u32 seed) {
    host::run([](const void* a) { ENTRY(*(const Arguments*)a); }, arguments, blocks, threads,
              shared_bytes, seed);
}
"""
# A CPU is slow, and yields to other threads when it reads the clock.
_LOOKS_PER_TICK = 16


def compiler() -> str | None:
    """Return the compiler of the host, or None."""
    return shutil.which(os.environ.get("CXX", "c++"))


class HostKernel:
    """A kernel that runs to its end in each launch, weakly ordered by `seed` unless that is 0.

    options: those of the compiler of the runtime.
    """

    def __init__(
        self, program: Program, path: Path, *, seed: int = 0, options: tuple[str, ...] = ()
    ) -> None:
        _runtime(*options)
        self._launch = ctypes.CDLL(str(path)).launch
        self._launch.argtypes = [c_void_p, *(c_uint32,) * 4]
        self._program, self._seed = program, seed

    def launch(self, blocks: int, *arguments: ctypes.Structure) -> None:
        sizes = (self._program.threads, self._program.shared_bytes)
        self._launch(addressof(arguments[0]), blocks, *sizes, self._seed)


def source_of(made: Program) -> str:
    """Return a program for the compiler of the host."""
    source = made.source(files=())
    defined, _, code = source.partition("\n//")
    looks = f"#undef LOOKS_PER_TICK\n#define LOOKS_PER_TICK {_LOOKS_PER_TICK}"
    launch = _LAUNCH.replace("ENTRY", made.entry)
    return f'{defined}\n{looks}\n#include "{HEADER}"\n//{code}\n{launch}'


def load_kernel(made: Program, device: torch.device) -> LoadedKernel:
    return HostKernel(made, build(source_of(made)))


def build(source: str, *options: str) -> Path:
    """Compile a library, or find what another process has compiled."""
    made_of = "\0".join((source, HEADER.read_text(), *_OPTIONS, *options, str(compiler())))
    path = _BUILD / f"{hashlib.sha256(made_of.encode()).hexdigest()[:32]}.so"
    if path.exists():
        return path
    _BUILD.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        # All ranks compile the same program at the same time.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            new = path.with_suffix(f".{os.getpid()}")
            command = [str(compiler()), *_OPTIONS, *options, "-x", "c++", "-", "-o", str(new)]
            subprocess.run(command, input=source, text=True, check=True)
            new.rename(path)
    return path


@cache
def _runtime(*options: str) -> ctypes.CDLL:
    source = f'#define HOST_CUDA_RUNTIME\n#include <algorithm>\n#include "{HEADER}"\n'
    return ctypes.CDLL(str(build(source, *options)), mode=ctypes.RTLD_GLOBAL)


def install() -> None:
    """Let CPU ranks run the kernels, if the host has a compiler."""
    if compiler() is not None:
        program.load_kernel = load_kernel
        program.reasons_against = lambda device: []
