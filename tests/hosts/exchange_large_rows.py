"""Exchange large rows between two ranks of which one comes 5 ms late, or stops."""

import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist

from epcomm import EPTimeout
from epcomm.collectives.torch_dist import TorchDistCollectives

NUM_ROWS, WIDTH = 512, 256


def late(collectives: TorchDistCollectives) -> float:
    """Return the median time of exchanges in which the ranks are late in turn."""
    rows, times = torch.ones(2 * NUM_ROWS, WIDTH), []
    for number in range(7):
        dist.barrier()
        if collectives.rank == number % 2:
            time.sleep(0.005)
        start_s = time.perf_counter()
        collectives.all_to_all(rows)
        times.append(time.perf_counter() - start_s)
    return sorted(times)[len(times) // 2]


def stops(collectives: TorchDistCollectives) -> float:
    """Return how long rank 0 waits for rank 1, which stops inside its message."""
    collectives.limit_waits(2.0)
    # They take 5 s.
    rows = torch.ones(2 * 60 * NUM_ROWS, WIDTH)
    dist.barrier()
    if collectives.rank == 1:
        end = f"sleep 0.5; kill -STOP {os.getpid()}; sleep 6; kill -KILL {os.getpid()}"
        subprocess.Popen(["sh", "-c", end])
    start_s = time.perf_counter()
    for _ in range(2):
        try:
            collectives.all_to_all(rows, phase="rows")
        except EPTimeout as error:
            print(error, flush=True)
    return time.perf_counter() - start_s


def main() -> None:
    """Run the function that the command names, and print its result on rank 0."""
    dist.init_process_group("gloo")
    collectives = TorchDistCollectives(dist.group.WORLD)
    collectives.separate()
    seconds = {"late": late, "stops": stops}[sys.argv[1]](collectives)
    if collectives.rank == 0:
        print(f"seconds {seconds}", flush=True)
        # With 0, torchrun would wait for a rank that never leaves.
        sys.exit(1 if sys.argv[1] == "stops" else 0)


if __name__ == "__main__":
    main()
