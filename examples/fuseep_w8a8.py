"""Send the same tokens through five paths of W8A8 experts, and compare all with float64.

    scripts/launch_multi_rank.sh 4 examples/fuseep_w8a8.py
    scripts/launch_multi_rank.sh 4 examples/fuseep_w8a8.py --no-stand-ins

Two paths have dispatch, runner and combine; three are FuseEP, where one operator does everything.
The operators are those of Ascend A3. By default imitations compute them on a CPU, with the limits
of the chip; --no-stand-ins uses torch_npu and its deep_ep, with one rank on each NPU.
"""

import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Annotated, TypeVar

import torch
import torch.distributed as dist
import typer
from path_report import PathRecord, choices, paths_table
from rich.console import Console
from torch import Tensor
from w8a8_block import Batch, LayerSize, dense, make_batch, make_experts, matrices_of

from epcomm import EPConfig, EPError, EPGroup, ExpertParallelExperts, Int8ChannelWeights, TopKOutput
from epcomm.buffers.traffic import BufferTraffic
from fakes.ascend import limits, registry
from fakes.deep_ep import install

T = TypeVar("T")

COLLECTIVE_TIMEOUT = timedelta(seconds=60)
# Error of INT8 activations, with INT8 weights on both sides. Rounding gives a row whose largest
# magnitude is a times its RMS the relative error a / (127 * 12**0.5). a is about 4 for 1024 normal
# numbers, and about 10 for silu(gate) * up: (4**2 + 10**2)**0.5 / (127 * 12**0.5).
MAX_ERROR = 0.0245
# Difference between paths that round the same numbers differently.
MAX_DIFFERENCE = 0.01
REFERENCE = "fuseep_reference"
# Mode and backend of each path.
PATHS = MappingProxyType(
    {
        REFERENCE: ("fuseep", REFERENCE),
        "fused_deep_moe": ("fuseep", "fused_deep_moe"),
        "dispatch_ffn_combine": ("fuseep", "dispatch_ffn_combine"),
        "normal": ("normal", "collective"),
        "low_latency": ("low_latency", "collective"),
    }
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """The result of one path: y [T, H] of this rank, float64 on the CPU, and its costs."""

    y: Tensor
    sent: BufferTraffic
    host_syncs: int
    choice: str


class CheckError(Exception):
    """The result of a path differs too much."""


@contextmanager
def machine(*, stand_ins: bool) -> Iterator[str]:
    """Provide the Ascend operators, and yield the backend of the process group."""
    if not stand_ins:
        npu = importlib.import_module("torch_npu").npu
        # Needed to pack experts in the layout of the chip's matrix units.
        npu.config.allow_internal_format = True
        npu.set_device(int(os.environ["LOCAL_RANK"]))
        yield "hccl"
        return
    registry.register()
    with limits.soc("A3"), install("ascend"):
        yield "gloo"


def tokens_of(rank: int, world_size: int, max_tokens: int) -> int:
    """Return the tokens of a rank: half of those of the previous rank, 0 on the last."""
    return 0 if rank and rank == world_size - 1 else max_tokens >> rank


def run_path(
    name: str, experts: Int8ChannelWeights, batch: Batch, group: EPGroup, *, max_tokens: int
) -> Run:
    """Compute the batch of this rank by one path. Collective: yes."""
    mode, backend = PATHS[name]
    config = EPConfig(mode=mode, backend=backend, max_tokens_per_rank=max_tokens)  # type: ignore[arg-type]
    top_k = batch.topk.topk_ids.shape[1]
    layer = ExpertParallelExperts(experts, group, config, top_k=top_k)
    topk = TopKOutput(
        topk_ids=batch.topk.topk_ids.to(group.device),
        topk_weights=batch.topk.topk_weights.to(group.device),
    )
    with torch.no_grad():
        y = layer(batch.x.to(group.device), topk)
    layer.check()
    lines = layer.explain().splitlines()
    computed = next(line for line in lines if line.startswith(("runner ", "experts computed by ")))
    return Run(
        y=y.double().cpu(),
        sent=layer.stats().traffic,
        host_syncs=layer.plan.prefill.caps.host_syncs,
        choice=f"{lines[0]}; {computed}",
    )


def measure(size: LayerSize, *, seed: int, max_tokens: int) -> list[PathRecord]:
    """Run all paths and compare them. Collective: yes."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    num_tokens = tokens_of(rank, world_size, max_tokens)
    batch = make_batch(size, num_tokens, rank=rank, seed=seed)
    plain = make_experts(size, seed=seed)
    w8a8 = Int8ChannelWeights.from_unquantized(plain)
    with EPGroup(dist.group.WORLD) as group:
        on_device = w8a8.with_tensors(
            {name: tensor.to(group.device) for name, tensor in w8a8.tensors().items()}
        )
        runs = {
            name: run_path(name, on_device, batch, group, max_tokens=max_tokens) for name in PATHS
        }
    return compare(runs, dense(batch, matrices_of(plain)), dense(batch, matrices_of(w8a8)))


def compare(runs: Mapping[str, Run], to_bf16: Tensor, to_w8a8: Tensor) -> list[PathRecord]:
    """Return the errors of all paths over the tokens of all ranks. Collective: yes."""
    reference = runs[REFERENCE].y
    return [
        PathRecord(
            name=name,
            to_bf16=_relative_error(run.y, to_bf16),
            to_w8a8=_relative_error(run.y, to_w8a8),
            to_reference=None if name == REFERENCE else _relative_error(run.y, reference),
            sent=_gather(run.sent),
            host_syncs=run.host_syncs,
            choice=run.choice,
        )
        for name, run in runs.items()
    ]


def _relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the relative L2 error over the tokens of all ranks."""
    squares = ((found - expected).square().sum().item(), expected.square().sum().item())
    errors, norms = zip(*_gather(squares), strict=True)
    return (sum(errors) / sum(norms)) ** 0.5


def _gather(mine: T) -> list[T]:
    found: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return [one for one in found if one is not None]


def check(records: Sequence[PathRecord]) -> None:
    """Raise CheckError if the error of a path is too large."""
    failures = [record.failure(MAX_ERROR, MAX_DIFFERENCE) for record in records]
    if found := [failure for failure in failures if failure is not None]:
        raise CheckError("; ".join(found))


def main(
    stand_ins: Annotated[
        bool, typer.Option(help="Imitate Ascend's operators on CPUs, or use NPUs.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Seed of weights and tokens.")] = 0,
    hidden_size: Annotated[
        int, typer.Option(help="H; all operators take 1024 to 7168 in steps of 512.")
    ] = 1024,
    intermediate_size: Annotated[
        int, typer.Option(help="I; all operators take 1024 to 3072 in steps of 512.")
    ] = 1024,
    experts: Annotated[int, typer.Option(help="Experts; a multiple of the ranks.")] = 8,
    top_k: Annotated[int, typer.Option(help="Experts per token.")] = 2,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of rank 0; above 256 operators need several calls.")
    ] = 300,
) -> None:
    """Compute the same layer by all paths, compare the results, and print the costs."""
    size = LayerSize(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_experts=experts,
        top_k=top_k,
    )
    with machine(stand_ins=stand_ins) as backend:
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
        console = Console(quiet=dist.get_rank() != 0, highlight=False, markup=False)
        try:
            records = measure(size, seed=seed, max_tokens=max_tokens)
            counts = [
                tokens_of(rank, dist.get_world_size(), max_tokens)
                for rank in range(dist.get_world_size())
            ]
            console.print(f"tokens of the ranks: {', '.join(map(str, counts))}")
            console.print(paths_table(records), choices(records), sep="\n", soft_wrap=True)
            check(records)
        except (CheckError, EPError) as error:
            sys.exit(str(error))
        finally:
            dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
