"""A rank between GPUs that are joined by NVLink, one of which is killed in the middle of a loop.

    scripts/launch_multi_rank.sh 4 ... would end all ranks when one dies; so, on a host with 4 GPUs:

    python -m tests.failures.nvlink_rank --ranks 4

It starts its ranks itself and prints what each survivor heard, and when. It needs GPUs and is no
test of the suite; that on CPU ranks, whose kernels are interpreted, is in tests/kernels.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time

import torch
import torch.distributed as dist

from epcomm import (
    DeepEPLowLatencyDispatcher,
    DeepEPNormalDispatcher,
    EPConfig,
    EPGroup,
    EPTimeout,
    MoESpec,
    TopKOutput,
)
from epcomm.ops.pack import pack

MODES = {"normal": DeepEPNormalDispatcher, "low_latency": DeepEPLowLatencyDispatcher}
LOST_ROUND = 200
TIMEOUT_S = 5.0
NUM_TOKENS, HIDDEN, TOP_K = 64, 2048, 4
# Seconds from the end of a wait until its message.
NAMING_LIMIT_S = 1.0
# Seconds for one mode: kernels are compiled first.
LIMIT_S = 240


def lost_rank(num_ranks: int) -> int:
    """Return the rank that is killed: not rank 0, with which the store lives."""
    return num_ranks // 2


def run_rank(mode: str) -> int:
    """Loop until the lost rank is named; 0 if that was in time."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    lost = lost_rank(num_ranks)
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", device_id=device)
    group = EPGroup()
    spec = MoESpec(hidden_size=HIDDEN, num_experts=4 * num_ranks, top_k=TOP_K)
    config = EPConfig(backend="nvlink", timeout_s=TIMEOUT_S, max_tokens_per_rank=NUM_TOKENS)
    dispatcher = MODES[mode](group, spec, config)
    x = torch.randn(NUM_TOKENS, HIDDEN, device=device, dtype=torch.bfloat16)
    ids = torch.rand(NUM_TOKENS, spec.num_experts, device=device).topk(TOP_K).indices
    topk = TopKOutput(topk_ids=ids, topk_weights=torch.full_like(ids, 1, dtype=torch.float32))
    last_s = time.monotonic()
    try:
        with torch.no_grad():
            for number in range(100 * LOST_ROUND):
                if rank == lost and number == LOST_ROUND:
                    torch.cuda.synchronize()
                    os.kill(os.getpid(), signal.SIGKILL)
                out = dispatcher.dispatch(x, topk)
                y = dispatcher.combine(out.combine_input(pack(out.hidden_states.data, out.index)))
                assert y.shape == x.shape
                dispatcher.check()
                last_s = time.monotonic()
    except EPTimeout as error:
        waited_s = time.monotonic() - last_s
        print(f"{mode}, rank {rank}, {waited_s:.2f} s: {error}", flush=True)
        is_named = f"rank {lost} did not arrive" in str(error)
        is_in_time = waited_s <= TIMEOUT_S + NAMING_LIMIT_S
        # Others may be about to hear of it from this rank's memory and store.
        time.sleep(2 * NAMING_LIMIT_S)
        # Not by the interpreter: NCCL would wait for the rank that is gone.
        os._exit(0 if is_named and is_in_time else 1)
    return 1


def main() -> int:
    """Start the ranks of each mode; 0 if every survivor named the lost rank in time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rank-of", choices=MODES, help="used by the program itself")
    arguments = parser.parse_args()
    if arguments.rank_of:
        return run_rank(arguments.rank_of)
    faults = 0
    for mode in MODES:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.failures.nvlink_rank", "--rank-of", mode],
                env=os.environ | places | {"RANK": str(rank), "WORLD_SIZE": str(arguments.ranks)},
            )
            for rank in range(arguments.ranks)
        ]
        codes = [process.wait(LIMIT_S) for process in ranks]
        print(f"{mode}: exit codes {codes}", flush=True)
        lost = lost_rank(arguments.ranks)
        faults += codes != [-signal.SIGKILL if r == lost else 0 for r in range(len(codes))]
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
