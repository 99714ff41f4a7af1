"""Kill or stop one of several GPU ranks connected by NVLink, in a loop of calls.

    scripts/launch_multi_rank.sh 4 ... would end all ranks when one dies; so, on a host with 4 GPUs:

    python -m tests.failures.nvlink_rank --ranks 4

The program starts its ranks itself and prints the message of each survivor and its time; then the
survivors exclude the lost rank and continue. Ranks share GPUs if there are too few. It needs GPUs
and is not part of the suite; the tests on CPU ranks, whose kernels are interpreted, are in
tests/kernels and test_excluded_ranks.py.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor

from epcomm import (
    DeepEPLowLatencyDispatcher,
    DeepEPNormalDispatcher,
    EPConfig,
    EPGroup,
    EPTimeout,
    MoESpec,
    RowsDispatchOutput,
    TopKOutput,
)
from epcomm.ops.slots import pack
from epcomm.testing.oracle import relative_error
from tests.multi_rank import SHARED_GPUS, take_device

Dispatcher = DeepEPNormalDispatcher | DeepEPLowLatencyDispatcher
# Dispatcher and number of tokens; few tokens of low latency are sent in lines, more in bulk.
MODES: dict[str, tuple[type[Dispatcher], int]] = {
    "normal": (DeepEPNormalDispatcher, 64),
    "bulk": (DeepEPLowLatencyDispatcher, 64),
    "lines": (DeepEPLowLatencyDispatcher, 4),
}
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
LOST_ROUND = 200
ROUNDS_AFTER = 50
TIMEOUT_S = 5.0
HIDDEN, TOP_K, LOCAL_EXPERTS = 2048, 4, 4
# Seconds from the timeout until its message.
NAMING_LIMIT_S = 1.0
# Seconds for one mode, including the compilation of kernels.
LIMIT_S = 240
# Tolerance: each rank's sum is rounded, and the total is rounded.
TOLERANCE = 2 * torch.finfo(torch.bfloat16).eps


def lost_rank(num_ranks: int) -> int:
    """Return the rank that is lost; not rank 0, which serves the store."""
    return num_ranks // 2


def exchange(dispatcher: Dispatcher, x: Tensor, topk: TopKOutput) -> Tensor:
    out = dispatcher.dispatch(x, topk)
    assert isinstance(out, RowsDispatchOutput)
    y = dispatcher.combine(out.combine_input(pack(out.hidden_states.data, out.index)))
    dispatcher.check()
    return y


def run_rank(mode: str, loss: str) -> int:
    """Loop until the lost rank is named, and continue without it; return 0 on success."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    lost = lost_rank(num_ranks)
    backend = "nccl" if torch.cuda.device_count() >= num_ranks else SHARED_GPUS
    take_device(backend)
    device = torch.device("cuda", torch.cuda.current_device())
    if backend == SHARED_GPUS:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group(backend, device_id=device)
    group = EPGroup()
    kind, num_tokens = MODES[mode]
    spec = MoESpec(hidden_size=HIDDEN, num_experts=LOCAL_EXPERTS * num_ranks, top_k=TOP_K)
    config = EPConfig(backend="nvlink", timeout_s=TIMEOUT_S, max_tokens_per_rank=num_tokens)
    dispatcher = kind(group, spec, config)
    x = torch.randn(num_tokens, HIDDEN, device=device, dtype=torch.bfloat16)
    ids = torch.rand(num_tokens, spec.num_experts, device=device).topk(TOP_K).indices
    topk = TopKOutput(topk_ids=ids, topk_weights=torch.full_like(ids, 1, dtype=torch.float32))
    last_s = time.monotonic()
    try:
        with torch.no_grad():
            for number in range(100 * LOST_ROUND):
                if rank == lost and number == LOST_ROUND:
                    torch.cuda.synchronize()
                    os.kill(os.getpid(), SIGNALS[loss])
                exchange(dispatcher, x, topk)
                last_s = time.monotonic()
    except EPTimeout as error:
        waited_s = time.monotonic() - last_s
        print(f"{mode}, {loss}, rank {rank}, {waited_s:.2f} s: {error}", flush=True)
        is_named = f"rank {lost} did not arrive" in str(error)
        is_in_time = waited_s <= TIMEOUT_S + NAMING_LIMIT_S
        # Another survivor may time out a little later; exclude_ranks() waits for it.
        is_well = go_on(group, dispatcher, x, topk, lost)
        # Do not exit through the interpreter, because NCCL would wait for the lost rank.
        os._exit(0 if is_named and is_in_time and is_well else 1)
    return 1


def go_on(group: EPGroup, dispatcher: Dispatcher, x: Tensor, topk: TopKOutput, lost: int) -> bool:
    """Exclude the lost rank; return whether later sums lack exactly its experts."""
    group.exclude_ranks([lost])
    num_left = (topk.topk_ids // LOCAL_EXPERTS != lost).sum(dim=1, keepdim=True)
    worst = 0.0
    with torch.no_grad():
        for _ in range(ROUNDS_AFTER):
            y = exchange(dispatcher, x, topk)
            worst = max(worst, relative_error(y, x.double() * num_left))
    print(f"rank {group.rank} went on without rank {lost}: error {worst:.2e}", flush=True)
    return worst <= TOLERANCE


def run_case(mode: str, loss: str, num_ranks: int) -> bool:
    """Run one case, losing one rank; return whether the other ranks behaved as expected."""
    lost = lost_rank(num_ranks)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    program = [sys.executable, "-m", "tests.failures.nvlink_rank", "--case", mode, loss]
    ranks = [
        subprocess.Popen(
            program,
            env=os.environ
            | places
            | {"WORLD_SIZE": str(num_ranks)}
            | dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        )
        for rank in range(num_ranks)
    ]
    try:
        codes = [each.wait(LIMIT_S) for rank, each in enumerate(ranks) if rank != lost]
    finally:
        for each in ranks:
            each.kill()
    print(f"{mode}, {loss}: exit codes of the others {codes}", flush=True)
    return not any(codes)


def main() -> int:
    """Run each case; return 0 if every survivor named the lost rank in time and continued."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--case", nargs=2, help="used by the program itself")
    arguments = parser.parse_args()
    if arguments.case:
        return run_rank(*arguments.case)
    cases = [(mode, loss) for mode in arguments.modes for loss in SIGNALS]
    faults = [case for case in cases if not run_case(*case, arguments.ranks)]
    return len(faults)


if __name__ == "__main__":
    raise SystemExit(main())
