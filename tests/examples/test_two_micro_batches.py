"""The recipes of two micro-batches compute what the decoder layers of transformers compute."""

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


@pytest.mark.ranks(2)
def test_tokens_of_decode_are_equal() -> None:
    printed = run_program(EXAMPLES / "decode_two_micro_batches.py")
    assert printed.splitlines() == [
        f"{model}, rank {dist.get_rank()}: decoded over shared_memory eagerly: a CPU has no "
        "graphs, equal True"
        for model in ("qwen3_moe", "deepseek_v3")
    ]
