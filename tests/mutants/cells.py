"""Runs every scenario against every mutant on the ranks of one launch; see matrix.py.

scripts/launch_multi_rank.sh 2 tests/mutants/cells.py OUTPUT.json [words of mutants' names]
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

# Before triton is imported, which takes its interpreter from there.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from epcomm import EPGroup
from tests.mutants.base import PATIENCE_S, Mutant
from tests.mutants.catalog import ROWS


def notices(mutant: Mutant | None, of: Mutant, scenario: str) -> str:
    """What the first rank that notices says; empty if none does. Collective.

    mutant: None for the whole library.   of: whose environment it is.
    """
    # The stand-ins of packages wait as long as their process group does.
    ranks, failure = dist.new_group(timeout=timedelta(seconds=3 * PATIENCE_S)), ""
    assert isinstance(ranks, dist.ProcessGroup)
    with of.prepared():
        group = EPGroup(ranks)
        group.limit_waits(PATIENCE_S)
        try:
            of.run(scenario, group, is_whole=mutant is None)
        except Exception as error:  # noqa: BLE001  (a fault may end in any)
            failure = f"{type(error).__name__}: {error}"
        failures = [""] * dist.get_world_size()
        dist.all_gather_object(failures, failure)
        group.close(after_error=any(failures))
    dist.destroy_process_group(ranks)
    # A time-out says that another rank has left, or hangs: the cause is more telling.
    found = sorted((text for text in failures if text), key=lambda text: "EPTimeout" in text)
    return found[0] if found else ""


def main() -> None:
    """Write {environment: {scenario: failure}} of the mutants, and of the whole library."""
    torch.set_num_threads(1)
    output, *words = sys.argv[1:]
    dist.init_process_group("gloo")
    chosen = [
        mutant
        for mutant in ROWS
        if dist.get_world_size() in mutant.worlds
        and (not words or any(word in mutant.name for word in words))
    ]
    found: dict[str, dict[str, str]] = {}
    for mutant in chosen:
        begin_s = time.monotonic()
        if mutant.key in found:
            continue
        whole = f"nothing, on {mutant.environment}"
        if whole not in found:
            found[whole] = {s: notices(None, mutant, s) for s in mutant.scenarios}
        found[mutant.key] = {s: notices(mutant, mutant, s) for s in mutant.scenarios}
        if dist.get_rank() == 0:
            noticed = [scenario for scenario, text in found[mutant.key].items() if text]
            seconds = time.monotonic() - begin_s
            print(f"{mutant.key}: {', '.join(noticed) or 'nobody'} ({seconds:.1f} s)", flush=True)
    if dist.get_rank() == 0:
        Path(output).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
