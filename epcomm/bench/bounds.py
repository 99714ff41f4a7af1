"""Bound the time of layers by rates that are measured in the same run."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from epcomm.bench.options import FP8, BenchOptions, dtype_of
from epcomm.bench.ranks import of_all_ranks
from epcomm.bench.turns import Timed, time_all, time_launch
from epcomm.buffers.sizes import CallShape
from epcomm.group import EPGroup
from epcomm.weights.unquantized import ExpertTensors

# Bytes of a copy and of an exchange, and rows and columns of matrices: on GPUs so long that the
# launch does not count, and larger than every cache.
_LONG_BYTES = {"cuda": 2**30, "cpu": 2**22}
_LONG_SIDE = {"cuda": 8192, "cpu": 256}


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The least work of a layer at one T, of the rank that has most of it, and its time.

    weights: the format of the experts.
    work: dispatch_bytes and combine_bytes of a row and of a sum for each other rank that a token
        needs, weight_bytes of the experts that have tokens, flops of both products.
    us: by span, at the rates of the run. products: the longer of reading the experts and of
        computing. layer: the sum; the longest part alone bounds a layer that overlaps all.
    """

    tokens: int
    weights: str
    work: Mapping[str, int]
    us: Mapping[str, float]


def measure_rates(options: BenchOptions, device: torch.device) -> dict[str, float]:
    """Return medians of the slowest rank, all measured in turn. Collective: yes.

    link_gb_per_s: bytes sent to other ranks in all_to_all_single of torch; absent for one rank.
    copy_gb_per_s: bytes that a copy reads and writes.
    bf16_tflops, ...: of a square product by torch, by format of the experts; on CPUs of float32.
    """
    world_size, side = dist.get_world_size(), _LONG_SIDE[device.type]
    num_bytes = _LONG_BYTES[device.type] // world_size * world_size
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # Calls and their amounts, by name of the rate.
    calls: dict[str, Callable[[], object]] = {"copy_gb_per_s": partial(target.copy_, source)}
    amounts = {"copy_gb_per_s": 2 * num_bytes / 1e9}
    if world_size > 1:
        calls["link_gb_per_s"] = partial(dist.all_to_all_single, target, source)
        amounts["link_gb_per_s"] = (num_bytes - num_bytes // world_size) / 1e9
    for weights in options.weights:
        used = weights if device.type == "cuda" else "fp32"
        calls[f"{weights}_tflops"] = dense_product(used, side, side, side, device)
        amounts[f"{weights}_tflops"] = 2 * side**3 / 1e12

    def timed(call: Callable[[], object]) -> Timed:
        return lambda clock: {"call": time_launch(call, device, clock)}

    us = time_all({name: timed(call) for name, call in calls.items()}, device, options)
    return {name: round(amounts[name] / us[name]["call"].p50 * 1e6, 3) for name in calls}


def dense_product(
    weights: str, m: int, n: int, k: int, device: torch.device
) -> Callable[[], object]:
    """Return torch's product of [m, k] and [k, n] in a format of experts."""
    dtype = torch.float8_e4m3fn if weights == FP8 else dtype_of(weights)
    left, right = (
        torch.randn(rows, k, dtype=torch.float32, device=device).to(dtype) for rows in (m, n)
    )
    if weights != FP8:
        return partial(torch.mm, left, right.t())
    one = torch.ones((), dtype=torch.float32, device=device)
    return partial(torch.ops.aten._scaled_mm, left, right.t(), one, one, out_dtype=torch.bfloat16)


def bound_layer(
    weights: str,
    experts: ExpertTensors,
    ids: Sequence[Tensor],
    group: EPGroup,
    rates: Mapping[str, float],
) -> Bound:
    """Return the bound of a layer; experts: of this rank; ids: topk_ids of all. Collective: yes."""
    num_local, hidden, wire = experts.num_experts, experts.hidden_size, experts.wire_format
    call = CallShape.of(ids, group.rank, num_local_experts=num_local)
    mine = torch.cat(list(ids)).flatten() - group.rank * num_local
    slots = mine[(mine >= 0) & (mine < num_local)]
    num_bytes = sum(tensor.nbytes for tensor in experts.tensors().values())
    rows = max(call.rows_sent, call.rows_received)
    by_rank = of_all_ranks(
        {
            "dispatch_bytes": rows * (wire.data_bytes(hidden) + wire.scale_bytes(hidden)),
            "combine_bytes": rows * hidden * experts.dtype.itemsize,
            "weight_bytes": num_bytes // num_local * slots.unique().numel(),
            "flops": 6 * slots.numel() * hidden * experts.intermediate_size,
        }
    )
    work = {name: max(each[name] for each in by_rank) for name in by_rank[0]}
    link, copy = (rates.get(f"{name}_gb_per_s", math.inf) * 1e3 for name in ("link", "copy"))
    us = {
        "dispatch": work["dispatch_bytes"] / link,
        "products": max(
            work["weight_bytes"] / copy, work["flops"] / rates[f"{weights}_tflops"] / 1e6
        ),
        "combine": work["combine_bytes"] / link,
    }
    us["layer"] = sum(us.values())
    rounded = {span: round(each, 3) for span, each in us.items()}
    return Bound(tokens=len(ids[0]), weights=weights, work=work, us=rounded)
