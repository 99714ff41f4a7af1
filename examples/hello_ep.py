"""One MoE layer whose 8 experts live on 4 processes: torchrun --nproc-per-node 4 hello_ep.py"""

import torch
import torch.distributed as dist

from epcomm import EPConfig, EPGroup, ExpertParallelExperts, ExpertWeights, RoutingSpec, route

E, K, H, M = 8, 2, 64, 32  # experts, experts per token, hidden size, maximum tokens per rank
dist.init_process_group("gloo")
torch.manual_seed(0)  # every rank creates all experts; the layer keeps this rank's share
gate_up, down = torch.randn(E, 2 * 96, H) / H**0.5, torch.randn(E, H, 96) / 10
router = torch.randn(H, E)
with EPGroup(dist.group.WORLD) as group, torch.no_grad():
    weights = ExpertWeights(gate_up_proj=gate_up, down_proj=down)
    layer = ExpertParallelExperts(weights, group, EPConfig(max_tokens_per_rank=M), top_k=K)
    x = torch.randn(M, H)[: 10 * group.rank]  # 0, 10, 20 and 30 tokens on the four ranks
    topk = route(x @ router, RoutingSpec(top_k=K))
    y = layer(x, topk)  # training and prefill
    y_decode = layer(x, topk, decode=True)  # the same experts, low latency
    gate, up = torch.einsum("th,eih->tei", x, gate_up).chunk(2, dim=-1)  # in one process
    results = torch.einsum("tei,ehi->teh", torch.nn.functional.silu(gate) * up, down)
    scores = torch.zeros(len(x), E).scatter(1, topk.topk_ids, topk.topk_weights)
    expected = torch.einsum("teh,te->th", results, scores)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(y_decode, expected)
    slots = layer.stats().num_tokens_per_expert
    lines = [f"rank {group.rank}: {len(x)} tokens match, its experts computed {slots}\n"]
    lines += [f"{each}\n" for each in layer.explain().splitlines() if each.startswith("mode")]
    print("".join(lines if group.rank == 0 else lines[:1]), end="")  # ranks share stdout
dist.destroy_process_group()
