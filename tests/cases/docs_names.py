"""What the words around code in README.md and docs/ promise: a group, tokens, a layer, a model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from epcomm import EPConfig, EPGroup, ExpertParallelExperts, ExpertWeights, TopKOutput
from tests.cases.expert_models import TOP_K, OverRanks, expert_weights, tokens

NUM_TOKENS, MOST_TOKENS = 5, 8


@contextmanager
def shared_folder() -> Iterator[Path]:
    """One folder for all ranks."""
    with tempfile.TemporaryDirectory() as own:
        name = [own]
        dist.broadcast_object_list(name)
        yield Path(name[0])
        dist.barrier()


def routing(top_k: int, num_experts: int) -> TopKOutput:
    """Return the routing of NUM_TOKENS tokens, [T, K], distinct in a row."""
    ids = (torch.arange(NUM_TOKENS)[:, None] + torch.arange(top_k)) % num_experts
    return TopKOutput(topk_ids=ids, topk_weights=torch.full(ids.shape, 1 / top_k))


class Given:
    """The names of one section, each made when it is asked for; collective, in one order."""

    def __init__(self, path: str, group: EPGroup, folder: Path) -> None:
        """Keep the page, whose `path`, `x` and others may be of a kind of their own."""
        self._page, self._group, self._folder = path, group, folder

    @property
    def names(self) -> set[str]:
        """All that pages promise."""
        return {*self._of_all, *(name for page, name in self._of_page if page == self._page)}

    def get(self, name: str) -> object:
        """Return what `name` stands for."""
        own = self._of_page.get((self._page, name))
        return (own or self._of_all[name])()

    @cached_property
    def _model(self) -> OverRanks:
        return OverRanks(self._group)

    @property
    def _of_all(self) -> Mapping[str, Callable[[], object]]:
        return {
            "group": lambda: self._group,
            "world_size": lambda: self._group.world_size,
            "x": lambda: tokens(self._group.rank),
            "topk": lambda: routing(TOP_K, 8),
            "weights": expert_weights,
            "layer": self._layer,
            "batches": lambda: [(tokens(number), routing(TOP_K, 8)) for number in range(2)],
            "model": lambda: self._model,
            "optimizer": lambda: torch.optim.AdamW(self._model.parameters()),
            "folder": lambda: self._folder,
            "block": self._block,
            "batch": lambda: tokens(0) if self._group.rank else None,
            "one_token": lambda: tokens(0)[:1],
            "inputs": lambda: {"input_ids": torch.arange(1, 4).unsqueeze(0)},
        }

    @property
    def _of_page(self) -> Mapping[tuple[str, str], Callable[[], object]]:
        training, readme, fuseep = "docs/training.md", "README.md", "docs/backends/fuseep.md"
        return {
            (training, "block"): lambda: self._model,
            (readme, "path"): self._saved_model,
            ("docs/transformers.md", "path"): self._saved_model,
            ("docs/reference/configuration.md", "path"): self._configuration,
            (readme, "x"): lambda: torch.randn(NUM_TOKENS, 7168, dtype=torch.bfloat16),
            (readme, "topk"): lambda: routing(8, 256),
            (readme, "weights"): self._large_experts,
            (fuseep, "topk"): lambda: routing(8, 8),
        }

    def _layer(self) -> ExpertParallelExperts:
        config = EPConfig(max_tokens_per_rank=MOST_TOKENS)
        return ExpertParallelExperts(expert_weights(), self._group, config, top_k=TOP_K)

    def _large_experts(self) -> ExpertWeights:
        """Return this rank's share of 256 experts, which are small but for H."""
        local = 256 // self._group.world_size
        return ExpertWeights(
            gate_up_proj=torch.zeros(local, 16, 7168, dtype=torch.bfloat16),
            down_proj=torch.zeros(local, 7168, 8, dtype=torch.bfloat16),
        )

    def _block(self) -> nn.Module:
        from tests.cases.blocks import qwen3_moe

        return qwen3_moe()

    def _saved_model(self) -> Path:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        from tests.cases.blocks import EXPERTS, SIZES

        sizes: dict[str, Any] = {**SIZES, **EXPERTS, "vocab_size": 32, "num_hidden_layers": 1}
        heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
        if self._group.rank == 0:
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads))
            model.save_pretrained(self._folder)
        dist.barrier()
        return self._folder

    def _configuration(self) -> Path:
        path = self._folder / f"config{self._group.rank}.toml"
        path.write_text('mode = "auto"\nmax_tokens_per_rank = 128\n', "utf-8")
        return path
