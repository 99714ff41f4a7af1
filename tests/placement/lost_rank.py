"""Run one rank of a rebalance during which a rank is lost: RANK WORLD_SIZE PORT.

Prints the state of a survivor as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from epcomm import EPConfig, EPGroup, EPTimeout
from epcomm.placement import moving
from tests.placement.layers import placed_layer

LOST_RANK = 2
# Seconds: processes start at different times.
TIMEOUT_S = 60.0


def main() -> None:
    rank, world_size, port = map(int, sys.argv[1:])
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
    )
    exchange, num_exchanges = moving._exchange, 0

    def exchange_or_die(*args: object) -> dict[int, Tensor]:
        nonlocal num_exchanges
        num_exchanges += 1
        if rank == LOST_RANK and num_exchanges == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return exchange(*args)  # type: ignore[arg-type]

    moving._exchange = exchange_or_die
    config = EPConfig(mode="normal", redundant_experts=world_size, timeout_s=TIMEOUT_S)
    group = EPGroup()
    layer = placed_layer(group, config).layer
    assert layer.placement is not None
    assert layer.replica_table is not None
    old, before = layer.placement, {n: t.clone() for n, t in layer.weights.tensors().items()}
    tables = layer.replica_table.replicas.clone()
    reverse = replace(old, physical_to_logical=old.physical_to_logical[::-1])
    try:
        layer.rebalance(reverse)
        message = ""
    except EPTimeout as error:
        message = str(error)
    found = {
        "message": message,
        "num_exchanges": num_exchanges,
        "is_old": layer.placement == old
        and all(torch.equal(t, before[n]) for n, t in layer.weights.tensors().items())
        and torch.equal(layer.replica_table.replicas, tables),
    }
    group.close(after_error=True)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
