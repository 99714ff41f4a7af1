"""Record the highest load of a rank under DeepSeek's EPLB, into tests/contracts/eplb_maxima.json.

The algorithm is called, but not copied. COMMAND runs from the root of the repository.
"""

import importlib.util
import json
import sys
from pathlib import Path

import torch

from tests.placement import loads

ROOT = Path(__file__).parents[2]
COMMAND = (
    "pip download sglang==0.5.23 --no-deps && "
    "unzip sglang-*.whl '*/eplb_algorithms/deepseek.py' && "
    "python -m tests.placement.record_eplb sglang/srt/eplb/eplb_algorithms/deepseek.py"
)
# num_experts, redundant experts, ranks, hosts, groups of the routing.
SIZES = [
    (256, 32, 32, 1, 1),
    (256, 32, 32, 4, 8),
    (128, 8, 8, 1, 1),
    (64, 8, 4, 2, 8),
    (60, 4, 4, 1, 1),
    (8, 0, 4, 1, 1),
]


def main() -> None:
    spec = importlib.util.spec_from_file_location("eplb", sys.argv[1])
    eplb = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(eplb)
    text = "\n".join(path.read_text("utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    cases = []
    for experts, redundant, ranks, hosts, groups in SIZES:
        of_text = loads.of_text(text, experts, top_k=min(8, experts // 2))
        for name, load in (loads.drawn(experts) | {"text": of_text}).items():
            placed, _, copies = eplb.rebalance_experts(
                torch.tensor([load]), experts + redundant, groups, hosts, ranks, groups > 1
            )
            parts = torch.tensor(load, dtype=torch.float64)[placed[0]] / copies[0][placed[0]]
            cases.append(
                {
                    "load": name,
                    "num_experts": experts,
                    "num_physical_experts": experts + redundant,
                    "num_ranks": ranks,
                    "num_hosts": hosts,
                    "num_groups": groups,
                    "highest": parts.view(ranks, -1).sum(1).max().item(),
                    # The loads of the other cases are made by tests/placement/loads.py.
                    "values": [int(each) for each in load] if name == "text" else None,
                }
            )
    what = "highest load of a rank under DeepSeek's EPLB, sglang 0.5.23"
    head = {"what": what, "command": COMMAND}
    path = ROOT / "tests/contracts/eplb_maxima.json"
    rows = ",\n".join(json.dumps(case) for case in cases)
    path.write_text(json.dumps(head, indent=1)[:-2] + f',\n "cases": [\n{rows}\n]}}\n', "utf-8")


if __name__ == "__main__":
    main()
