"""Values of names that code in README.md and docs/ uses without defining them."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from epcomm import (
    EPConfig,
    EPGroup,
    ExpertParallelExperts,
    ExpertParallelMoE,
    ExpertWeights,
    TopKOutput,
)
from tests.cases.expert_models import TOP_K, OverRanks, expert_weights, tokens

Names = Mapping[str, Callable[[], object]]


def names_of(page: str, group: EPGroup, folder: Path) -> Names:
    """Return a constructor for each name; the constructors of layers and models are collective."""
    model = cache(lambda: OverRanks(group))
    of_all: Names = {
        "group": lambda: group,
        "world_size": lambda: group.world_size,
        "x": lambda: tokens(group.rank),
        "topk": lambda: _routing(TOP_K, 8),
        "weights": expert_weights,
        "layer": lambda: ExpertParallelExperts(
            expert_weights(), group, EPConfig(max_tokens_per_rank=8), top_k=TOP_K
        ),
        "batches": lambda: [(tokens(number), _routing(TOP_K, 8)) for number in range(2)],
        "model": model,
        "optimizer": lambda: torch.optim.AdamW(model().parameters()),
        "folder": lambda: folder,
        "path": lambda: _saved_model(group, folder),
        "block": _block,
        "batch": lambda: tokens(0) if group.rank else None,
        "one_token": lambda: tokens(0)[:1],
        "inputs": lambda: {"input_ids": torch.arange(1, 4).unsqueeze(0)},
    }
    of_page: Mapping[str, Names] = {
        "docs/training.md": {"block": model},
        "docs/replay.md": {
            "model": lambda: ExpertParallelMoE.from_transformers(_block(), group),
            "x": lambda: torch.randn(5, 16),
        },
        "docs/reference/configuration.md": {"path": lambda: _configuration(group, folder)},
        "docs/backends/fuseep.md": {"topk": lambda: _routing(8, 8)},
        "README.md": {
            "x": lambda: torch.randn(5, 7168, dtype=torch.bfloat16),
            "topk": lambda: _routing(8, 256),
            # Experts that are small except for H.
            "weights": lambda: ExpertWeights(
                gate_up_proj=torch.zeros(64, 16, 7168, dtype=torch.bfloat16),
                down_proj=torch.zeros(64, 7168, 8, dtype=torch.bfloat16),
            ),
        },
    }
    return {**of_all, **of_page.get(page, {})}


def _routing(top_k: int, num_experts: int) -> TopKOutput:
    """Return the top-k entries of 5 tokens, [T, K], distinct in a row."""
    ids = (torch.arange(5)[:, None] + torch.arange(top_k)) % num_experts
    return TopKOutput(topk_ids=ids, topk_weights=torch.full(ids.shape, 1 / top_k))


def _block() -> torch.nn.Module:
    from tests.cases.blocks import qwen3_moe

    return qwen3_moe()


def _saved_model(group: EPGroup, folder: Path) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from tests.cases.blocks import EXPERTS, MODEL_SIZES, SIZES

    sizes: dict[str, Any] = {**SIZES, **EXPERTS, **MODEL_SIZES, "num_hidden_layers": 1}
    if group.rank == 0:
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).save_pretrained(folder)
    dist.barrier()
    return folder


def _configuration(group: EPGroup, folder: Path) -> Path:
    path = folder / f"config{group.rank}.toml"
    path.write_text('mode = "auto"\nmax_tokens_per_rank = 128\n', "utf-8")
    return path
