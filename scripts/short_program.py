"""A short user program at module level, which ends in one of several ways.

    torchrun --nproc-per-node 2 scripts/short_program.py KIND ENDING

scripts/soak.py starts it many times. Its code must stay at module level, because objects of a
module are released only when the interpreter shuts down.
"""

import sys

import torch
import torch.distributed as dist

from epcomm import EPConfig, EPGroup, ExpertParallelExperts, ExpertWeights, TopKOutput

KINDS = {
    "collective": EPConfig(backend="collective"),
    "shared_memory": EPConfig(backend="shared_memory"),
    "auto": EPConfig(max_tokens_per_rank=8),
    "standard": EPConfig(mode="standard"),
    "static": EPConfig(mode="normal", max_tokens_per_rank=8, max_recv_slots=32),
    "low_latency": EPConfig(mode="low_latency", max_tokens_per_rank=8),
}
ENDINGS = ("close and destroy", "close", "destroy", "neither", "exit", "error")

if __name__ == "__main__":
    kind, ending = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = EPGroup()
    weights = ExpertWeights(gate_up_proj=torch.randn(4, 16, 16), down_proj=torch.randn(4, 16, 8))
    layer = ExpertParallelExperts(weights, group, KINDS[kind], top_k=2)
    x = torch.randn(8, 16)
    ids = torch.arange(16).view(8, 2) % 4
    topk = TopKOutput(topk_ids=ids, topk_weights=torch.full((8, 2), 0.5))
    if kind == "low_latency":
        with torch.no_grad():
            y = layer(x, topk)
    else:
        y = layer(x.requires_grad_(), topk)
        y.sum().backward()
    assert y.isfinite().all()
    if "close" in ending:
        group.close()
    if "destroy" in ending:
        dist.destroy_process_group()
    if ending == "exit":
        sys.exit(0)
    if ending == "error":
        raise RuntimeError("requested by the command line")
