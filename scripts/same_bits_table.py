"""Write the bytes that sum_groups costs between two markers of docs/same_bits.md.

    python -m scripts.same_bits_table

Plans predict the bytes of one rank in one call, whose tokens choose their experts uniformly.
"""

import re
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from epcomm import EPConfig, MoESpec
from epcomm.buffers.sizes import CallShape
from epcomm.planning.plan import plan

PAGE = Path(__file__).parents[1] / "docs" / "same_bits.md"
_MARKED = re.compile(r"(?<=<!-- bytes -->\n).*?(?=<!-- /bytes -->)", re.DOTALL)
# DeepSeek-V3, and tokens of a rank, enough for means of three digits.
_LAYER = MoESpec(hidden_size=7168, num_experts=256, top_k=8)
_TOKENS = 512
_RANKS, _GROUPS = (2, 4, 8, 16), (2, 4, 8, 16, 32)


def table() -> str:
    """Return a Markdown table with one row per number of ranks."""
    configs = {"sums of ranks": EPConfig(mode="normal", backend="collective")}
    for groups in _GROUPS:
        configs[f"G = {groups}"] = replace(configs["sums of ranks"], sum_groups=groups)
    configs["placed experts"] = replace(configs["G = 32"], redundant_experts=0)
    lines = [f"| W | {' | '.join(configs)} |", "|---" * (1 + len(configs)) + "|"]
    for world_size in _RANKS:
        generator = torch.Generator().manual_seed(0)
        scores = torch.rand(world_size, _TOKENS, _LAYER.num_experts, generator=generator)
        ids = list(scores.topk(_LAYER.top_k).indices)
        cells = [_kilobytes(config, ids) for config in configs.values()]
        lines.append(f"| {world_size} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def fill(text: str) -> str:
    """Return the text of the page with the current table."""
    return _MARKED.sub(lambda _: table(), text)


def _kilobytes(config: EPConfig, ids: list[Tensor]) -> str:
    """Return what a rank sends for each of its tokens in combine, by the ids of all ranks."""
    world_size, groups = len(ids), config.sum_groups
    is_placed = config.redundant_experts is not None
    if groups is not None and groups % world_size and not is_placed:
        return "refused"
    found = plan(config, _LAYER, world_size=world_size).prefill
    size = None if groups is None else _LAYER.num_experts // groups
    num_local = found.buffer_spec.num_local_experts
    call = CallShape.of(ids, 0, num_local_experts=num_local, group_size=1 if is_placed else size)
    return f"{found.wire_bytes(call).combine_bytes / _TOKENS / 1000:.0f}"


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text("utf-8")), encoding="utf-8")
