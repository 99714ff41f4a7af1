"""Compute the same tokens on any number of ranks: all of them print the same checksums.

    for ranks in 1 2 4; do scripts/launch_multi_rank.sh $ranks examples/same_bits.py; done

The model and its 64 tokens are those of a seed. Each rank takes its part of the tokens, trains on
it, and decodes it in low latency. Without --sum-groups the checksums differ.
"""

from typing import Annotated
from zlib import crc32

import torch
import torch.distributed as dist
import typer
from torch import Tensor

from epcomm import EPConfig, EPGroup, ExpertParallelExperts, ExpertWeights, TopKOutput

HIDDEN, INNER, EXPERTS, TOP_K, TOKENS = 256, 128, 32, 4, 64


def checksum(part: Tensor) -> str:
    """Return the checksum of the rows of all ranks. Collective: yes."""
    parts: list[Tensor | None] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part.detach().cpu())
    whole = torch.cat([each for each in parts if each is not None])
    return f"{crc32(whole.view(torch.uint8).numpy().tobytes()):08x}"


def main(
    sum_groups: Annotated[int, typer.Option(help="Groups of experts; 0: none.")] = 8,
) -> None:
    """Print the checksums of y, of its gradients and of decode."""
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    weights = ExpertWeights(
        gate_up_proj=normal(EXPERTS, 2 * INNER, HIDDEN) / 16,
        down_proj=normal(EXPERTS, HIDDEN, INNER) / 16,
    )
    x, grad_y, logits = normal(TOKENS, HIDDEN), normal(TOKENS, HIDDEN), normal(TOKENS, EXPERTS)
    scores, ids = logits.float().softmax(1).topk(TOP_K)
    with EPGroup() as group:
        config = EPConfig(sum_groups=sum_groups or None, max_tokens_per_rank=TOKENS)
        layer = ExpertParallelExperts(weights, group, config, top_k=TOP_K)
        part = torch.arange(TOKENS).chunk(group.world_size)[group.rank]
        mine = x[part].requires_grad_()
        topk = TopKOutput(topk_ids=ids[part], topk_weights=scores[part].requires_grad_())
        y = layer(mine, topk)
        y.backward(grad_y[part])
        with torch.no_grad():
            decoded = layer(mine, topk, decode=True)
        assert mine.grad is not None
        assert topk.topk_weights.grad is not None
        found = {
            "y": y,
            "decoded": decoded,
            "dx": mine.grad,
            "dweights": topk.topk_weights.grad,
        }
        sums = "  ".join(f"{name} {checksum(each)}" for name, each in found.items())
        if group.rank == 0:
            print(f"{group.world_size} ranks: {sums}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
