"""Compile the gate for sm_90, without a GPU; print what ptxas says and machine code as JSON.

A program of its own: kernels of the test process are interpreted, and those cannot be compiled.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from epcomm.kernels.routing.gate import GateForm, _constants_of, _route_tokens_kernel

HOPPER = GPUTarget("cuda", 90, 32)
# As at run time: memory from torch begins at multiples of 16 bytes.
IS_ALIGNED = [["tt.divisibility", 16]]
DEEPSEEK_V3 = GateForm(
    num_experts=256,
    top_k=8,
    score="sigmoid",
    bias="selection",
    softcap=None,
    num_groups=8,
    topk_groups=4,
    group_top_n=2,
    fills_zero=False,
    renormalizes=True,
    epsilon_mode="added",
    epsilon=1e-20,
    scale=2.5,
)
QWEN3 = GateForm(
    num_experts=128,
    top_k=8,
    score="softmax",
    bias="none",
    softcap=None,
    num_groups=1,
    topk_groups=1,
    group_top_n=1,
    fills_zero=False,
    renormalizes=True,
    epsilon_mode="none",
    epsilon=0.0,
    scale=1.0,
)
LARGEST = GateForm(
    num_experts=1024,
    top_k=32,
    score="sqrt_softplus",
    bias="score",
    softcap=30.0,
    num_groups=16,
    topk_groups=4,
    group_top_n=4,
    fills_zero=True,
    renormalizes=True,
    epsilon_mode="clamp",
    epsilon=1e-12,
    scale=1.0,
)


def compiled(form: GateForm, *, logits: str = "*fp32", has_tables: bool = False) -> dict[str, Any]:
    """Compile one variant as the launcher does."""
    constants = dict(_constants_of(form))
    options = {name: constants.pop(name) for name in ("num_warps", "enable_fp_fusion")}
    options["launch_pdl"] = True
    table = "*i32" if has_tables else ""
    signature = {
        "logits_ptr": logits,
        "bias_ptr": "" if form.bias == "none" else "*fp32",
        "num_valid_ptr": table,
        "load_ptr": has_tables and "*i64",
        "replicas_ptr": table,
        "num_replicas_ptr": table,
        "calls_ptr": has_tables and "*i64",
        "ids_ptr": "*i64",
        "weights_ptr": "*fp32",
        "logical_ptr": has_tables and "*i64",
        "num_tokens": "i32",
        "num_valid": "i32",
        "first": "i32",
    }
    constants |= {"STRIDE": form.num_experts, "REPLICAS": 4, "LOAD_COPIES": 16, "OVERLAPS": True}
    constants |= {name: None for name, kind in signature.items() if not kind}
    names = _route_tokens_kernel.arg_names
    given = {name: kind for name, kind in signature.items() if kind}
    source = ASTSource(
        _route_tokens_kernel,
        {name: given.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): IS_ALIGNED for name, kind in given.items() if "*" in str(kind)},
    )
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        kernel = triton.compile(source, target=HOPPER, options=options)
    return {
        "ptxas": log.getvalue(),
        "sass": _disassembled(kernel.asm["cubin"]),
        "shared_bytes": kernel.metadata.shared,
    }


def _disassembled(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    # The compiler prints what ptxas says of registers and spills, which a cache would not.
    knobs.nvidia.dump_ptxas_log = True
    knobs.compilation.always_compile = True
    variants = {
        "deepseek v3": compiled(DEEPSEEK_V3),
        "deepseek v3 with tables": compiled(DEEPSEEK_V3, has_tables=True),
        "qwen3": compiled(QWEN3, logits="*bf16"),
        "largest": compiled(LARGEST, has_tables=True),
    }
    print(json.dumps(variants))


if __name__ == "__main__":
    main()
