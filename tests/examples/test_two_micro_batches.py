"""The recipe of two micro-batches computes what the decoder layers of transformers compute."""

import pytest
import torch.distributed as dist

from tests.examples.programs import EXAMPLES, run_program


@pytest.mark.ranks(2)
def test_results_and_gradients_of_both_models_are_equal() -> None:
    printed = run_program(EXAMPLES / "two_micro_batches.py")
    assert printed.splitlines() == [
        f"{model}, rank {dist.get_rank()}: equal results True, gradients True"
        for model in ("qwen3_moe", "deepseek_v3")
    ]
