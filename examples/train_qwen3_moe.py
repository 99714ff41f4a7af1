"""Train a small Qwen3-MoE model with its experts spread over the ranks, and check every step.

    scripts/launch_multi_rank.sh 4 examples/train_qwen3_moe.py

Before each update rank 0 computes the same step with the plain model of transformers, in one
process, from the gathered weights and the batches of all ranks. Loss and gradients must agree.
What a training program needs in order to use epcomm is in expert_parallel.py; the rest checks it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from comparison import CheckError, Comparison, StepResult, check_loss_fall
from expert_parallel import ExpertParallelTraining
from one_process import OneProcess
from plain_model import NUM_EXPERTS_PER_TOKEN, ModelSize, build_model
from report import StepRecord, Written, decode_summary, progress_bar, steps_table, summary
from rich.console import Console
from text_data import Batch, TextData

from epcomm import ConfigError, EPGroup

# 120 s: the others wait while rank 0 computes a step alone, which takes about one.
COLLECTIVE_TIMEOUT = timedelta(seconds=120)

# Bytes that each rank reads, and then writes, once the model is trained.
PROMPT_LENGTH, NUM_WRITTEN = 64, 48


class CheckedTraining:
    """Training over the ranks, with the same steps in one process beside it."""

    def __init__(self, size: ModelSize, group: EPGroup, *, seed: int, tolerance: float) -> None:
        """Build the model on every rank, and once more on rank 0, which compares.

        Collective: yes.
        """
        self._rank = group.rank
        self._tolerance = tolerance
        self._data = TextData(seed=seed, num_ranks=group.world_size)
        self._training = ExpertParallelTraining(build_model(size, seed=seed), group)
        self._one_process = OneProcess(build_model(size, seed=seed)) if self._rank == 0 else None

    def explain(self) -> str:
        """What is trained, and how its tokens travel."""
        return f"{self._training.explain()}\n{len(self._data.text)} bytes of text"

    def step(self, step: int) -> StepRecord:
        """Compute gradients, compare, update.

        Collective: yes.
        Raises:
            CheckError: on all ranks, before the update.
        """
        batches = self._data.batches(step)
        sent_before = self._training.sent_bytes()
        start_s = time.perf_counter()
        result = self._training.compute_gradients(batches[self._rank])
        duration_s = time.perf_counter() - start_s

        comparison = self._compare(result, batches)
        if failure := comparison.failure(self._tolerance):
            raise CheckError(f"step {step}: {failure}")

        start_s = time.perf_counter()
        self._training.update(result.gradient_norm)
        duration_s += time.perf_counter() - start_s
        return StepRecord(
            step=step,
            comparison=comparison,
            tokens_by_rank=_tokens_by_rank(batches),
            sent_bytes=_largest_over_ranks(self._training.sent_bytes() - sent_before),
            duration_s=duration_s,
        )

    def write(self) -> Written:
        """Let every rank continue its own prompt, and compare the logits with one process.

        Collective: yes.
        Raises:
            CheckError: on all ranks.
        """
        start_s = time.perf_counter()
        prompt = self._data.prompt(self._rank, PROMPT_LENGTH)
        written = self._training.continue_text(prompt, NUM_WRITTEN)
        duration_s = time.perf_counter() - start_s
        weights = self._training.gather_weights()
        difference = torch.zeros((), dtype=torch.float64)
        if self._one_process is not None:
            difference.fill_(self._one_process.difference(weights, written))
        dist.broadcast(difference, src=0)
        # Not `>=`: NaN must fail too.
        if not difference < self._tolerance:
            raise CheckError(f"decode: logits differ from one process by {difference:.1e}")
        return Written(
            texts=[one.text for one in written],
            difference=float(difference),
            ms_per_byte=duration_s / NUM_WRITTEN * 1e3,
        )

    def _compare(self, over_ranks: StepResult, batches: Sequence[Batch | None]) -> Comparison:
        weights = self._training.gather_weights()
        routing = self._training.gather_routing(_tokens_by_rank(batches))
        verdict: list[Comparison | None] = [None]
        if self._one_process is not None:
            verdict = [self._one_process.compare(over_ranks, weights, batches, routing)]
        # All ranks judge the comparison of rank 0, so that all go on or all stop, and none waits.
        dist.broadcast_object_list(verdict, src=0)
        assert verdict[0] is not None, "rank 0 has compared"
        return verdict[0]


def _tokens_by_rank(batches: Sequence[Batch | None]) -> list[int]:
    return [0 if batch is None else batch.num_tokens for batch in batches]


def _largest_over_ranks(number: int) -> int:
    largest = torch.tensor(number)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def train(training: CheckedTraining, *, num_steps: int, console: Console) -> list[StepRecord]:
    """Take all steps and show how far they are. Collective: yes."""
    records = []
    with progress_bar(console) as bar:
        task = bar.add_task("training", total=num_steps)
        for step in range(1, num_steps + 1):
            record = training.step(step)
            records.append(record)
            bar.update(task, advance=1, description=f"loss {record.loss:.3f}")
    return records


def main(
    steps: Annotated[int, typer.Option(min=2, help="Steps to train.")] = 60,
    seed: Annotated[int, typer.Option(help="Of weights and batches.")] = 0,
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers.")] = 4,
    experts: Annotated[
        int, typer.Option(min=NUM_EXPERTS_PER_TOKEN, help="In each layer; a multiple of the ranks.")
    ] = 32,
    tolerance: Annotated[
        float, typer.Option(help="Relative difference from one process at which a step fails.")
    ] = 1e-5,
    min_loss_fall: Annotated[float, typer.Option(help="A run whose loss falls less fails.")] = 1.5,
) -> None:
    """Train, compare every step with one process, and print what came of it."""
    dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    console = Console(quiet=dist.get_rank() != 0, highlight=False, markup=False)
    try:
        with EPGroup(dist.group.WORLD) as group:
            size = ModelSize(num_layers=layers, num_experts=experts)
            training = CheckedTraining(size, group, seed=seed, tolerance=tolerance)
            console.print(training.explain(), soft_wrap=True)
            records = train(training, num_steps=steps, console=console)
            console.print(steps_table(records), summary(records, tolerance), sep="\n")
            console.print(decode_summary(training.write()), soft_wrap=True)
        check_loss_fall([record.loss for record in records], min_loss_fall)
    except (CheckError, ConfigError) as error:
        sys.exit(str(error))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
