"""A rank that opens and grows shared memory repeatedly, until scripts/soak.py kills it.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT configure its process group.
"""

import torch
import torch.distributed as dist

from epcomm import DeepEPNormalDispatcher, EPConfig, EPGroup, EPTimeout, MoESpec, TopKOutput

SPEC = MoESpec(hidden_size=256, num_experts=4, top_k=2, dtype=torch.float32)


def run_rank() -> None:
    """Run one rank, and return when the other ranks have ended."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        while True:
            with EPGroup() as group:
                config = EPConfig(backend="shared_memory", timeout_s=5)
                dispatcher = DeepEPNormalDispatcher(group, SPEC, config)
                for num_tokens in (1, 2000, 8000, 30000):
                    ids = torch.arange(2 * num_tokens).view(num_tokens, 2) % SPEC.num_experts
                    topk = TopKOutput(topk_ids=ids, topk_weights=torch.ones(num_tokens, 2))
                    with torch.no_grad():
                        dispatcher.dispatch(torch.ones(num_tokens, 256), topk)
    except (EPTimeout, RuntimeError):
        return


if __name__ == "__main__":
    run_rank()
