"""Train a small Qwen3-MoE model with expert parallelism, and check every step.

    scripts/launch_multi_rank.sh 4 examples/train_qwen3_moe.py --checkpoint FOLDER
    scripts/launch_multi_rank.sh 2 examples/train_qwen3_moe.py --resume FOLDER --steps 30
    scripts/launch_multi_rank.sh 4 examples/train_qwen3_moe.py --skew 8 --redundant-experts 8

Before each update rank 0 computes the same step with the plain model of transformers, in one
process, from the gathered weights and the batches of all ranks. Loss and gradients must agree.
The second command resumes from step 20 of the first on fewer ranks, and compares its losses with
those of the uninterrupted run. The third skews the routing so that some experts get most of the
tokens, adds two experts to each rank, and rebalances every 10 steps. expert_parallel.py and
saved_run.py contain what a training program needs to use epcomm; the rest checks it.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from comparison import CheckError, Comparison, StepResult, check_loss_fall, check_resumed
from expert_parallel import ExpertParallelTraining
from one_process import OneProcess
from plain_model import NUM_EXPERTS_PER_TOKEN, ModelSize, build_model
from report import (
    MoveRecord,
    StepRecord,
    Written,
    decode_summary,
    moves_table,
    progress_bar,
    resumed_summary,
    steps_table,
    summary,
)
from rich.console import Console
from saved_run import RunFacts, read_facts, write_facts
from text_data import Batch, TextData, batches_of_rank

from epcomm import ConfigError, EPGroup

# 120 s: the others wait while rank 0 computes a step alone, which takes about 1 s.
COLLECTIVE_TIMEOUT = timedelta(seconds=120)

# Bytes of the prompt of each rank, and of its continuation by the trained model.
PROMPT_LENGTH, NUM_WRITTEN = 64, 48


@dataclass(frozen=True, kw_only=True)
class RunChoices:
    """The command-line options of a run.

    num_redundant: experts of all ranks in addition to those of the model; None: no expert moves.
    move_interval: steps between two moves of experts.
    """

    seed: int
    tolerance: float
    num_redundant: int | None
    move_interval: int


class CheckedTraining:
    """Training over the ranks, compared with the same steps in one process."""

    def __init__(
        self, size: ModelSize, group: EPGroup, *, run: RunChoices, num_batches: int
    ) -> None:
        """Build the model on every rank, and a second one on rank 0 for the comparison.

        Collective: yes.
        """
        seed = run.seed
        self._rank, self._num_ranks = group.rank, group.world_size
        self._tolerance = run.tolerance
        self._run = run
        self.moves: list[MoveRecord] = []
        self._data = TextData(seed=seed, num_batches=num_batches)
        self._training = ExpertParallelTraining(
            build_model(size, seed=seed), group, run.num_redundant
        )
        self._one_process = OneProcess(build_model(size, seed=seed)) if self._rank == 0 else None

    def explain(self) -> str:
        """Describe the model, the path of its tokens and the training data."""
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
        own_batches = batches_of_rank(batches, self._rank, self._num_ranks)
        result = self._training.compute_gradients(own_batches)
        duration_s = time.perf_counter() - start_s

        comparison = self._compare(result, batches)
        if failure := comparison.failure(self._tolerance):
            raise CheckError(f"step {step}: {failure}")

        start_s = time.perf_counter()
        self._training.update(result.gradient_norm)
        if self._run.num_redundant is not None and step % self._run.move_interval == 0:
            self.moves.append(self._training.rebalance(step))
        duration_s += time.perf_counter() - start_s
        return StepRecord(
            step=step,
            comparison=comparison,
            tokens_by_rank=self._tokens_by_rank(batches),
            sent_bytes=_largest_over_ranks(self._training.sent_bytes() - sent_before),
            duration_s=duration_s,
        )

    def save(self, folder: Path) -> None:
        """Save the state after the last step. Collective: yes."""
        self._training.save(folder)

    def load(self, folder: Path) -> None:
        """Load a saved state. Collective: yes."""
        self._training.load(folder)

    def write(self) -> Written:
        """Continue a prompt on every rank, and compare the logits with one process.

        Collective: yes.
        Raises:
            CheckError: on all ranks.
        """
        start_s = time.perf_counter()
        prompt = self._data.prompt(self._rank, self._num_ranks, PROMPT_LENGTH)
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
        routing = self._training.gather_routing(self._tokens_by_rank(batches))
        verdict: list[Comparison | None] = [None]
        if self._one_process is not None:
            # The order of the routing: rank by rank.
            ordered = [batch for of_rank in self._by_rank(batches) for batch in of_rank]
            sizes = [0 if batch is None else batch.num_tokens for batch in ordered]
            routing = torch.cat(routing).split(sizes)
            verdict = [self._one_process.compare(over_ranks, weights, ordered, routing)]
        # All ranks evaluate the comparison of rank 0, so that all continue or all stop.
        dist.broadcast_object_list(verdict, src=0)
        assert verdict[0] is not None, "rank 0 makes the comparison"
        return verdict[0]

    def _by_rank(self, batches: Sequence[Batch | None]) -> list[list[Batch | None]]:
        ranks = range(self._num_ranks)
        return [batches_of_rank(batches, rank, self._num_ranks) for rank in ranks]

    def _tokens_by_rank(self, batches: Sequence[Batch | None]) -> list[int]:
        return [
            sum(batch.num_tokens for batch in of_rank if batch is not None)
            for of_rank in self._by_rank(batches)
        ]


def _largest_over_ranks(number: int) -> int:
    largest = torch.tensor(number)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


@dataclass(frozen=True, kw_only=True)
class Span:
    """The first and last step of a run, the step after which it saves its state, and the folder."""

    first: int
    last: int
    saved: int | None = None
    folder: Path | None = None


def train(training: CheckedTraining, span: Span, *, console: Console) -> list[StepRecord]:
    """Run all steps and show their progress. Collective: yes."""
    records = []
    with progress_bar(console) as bar:
        task = bar.add_task("training", total=span.last + 1 - span.first)
        for step in range(span.first, span.last + 1):
            record = training.step(step)
            records.append(record)
            if span.folder is not None and step == span.saved:
                training.save(span.folder)
            bar.update(task, advance=1, description=f"loss {record.loss:.3f}")
    return records


def main(
    steps: Annotated[int, typer.Option(min=2, help="The last step.")] = 60,
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = 0,
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers.")] = 4,
    experts: Annotated[
        int, typer.Option(min=NUM_EXPERTS_PER_TOKEN, help="Per layer; a multiple of the ranks.")
    ] = 32,
    tolerance: Annotated[
        float, typer.Option(help="Relative difference from one process at which a step fails.")
    ] = 1e-5,
    skew: Annotated[float, typer.Option(min=1, help="Logits, first expert to last.")] = 1.0,
    redundant_experts: Annotated[
        int | None, typer.Option(min=0, help="Additional experts per layer; enables rebalancing.")
    ] = None,
    rebalance_every: Annotated[int, typer.Option(min=1, help="Steps between moves.")] = 10,
    min_loss_fall: Annotated[float, typer.Option(help="Least decrease of the loss.")] = 1.5,
    checkpoint: Annotated[Path | None, typer.Option(help="Folder for a checkpoint.")] = None,
    checkpoint_step: Annotated[int, typer.Option(min=1, help="Step of the checkpoint.")] = 20,
    resume: Annotated[
        Path | None, typer.Option(help="Resume the same model from a folder.")
    ] = None,
) -> None:
    """Train, compare every step with one process, and print the results."""
    dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    console = Console(quiet=dist.get_rank() != 0, highlight=False, markup=False)
    earlier = None if resume is None else read_facts(resume)
    num_batches = dist.get_world_size() if earlier is None else earlier.num_batches
    try:
        with EPGroup(dist.group.WORLD) as group:
            size = ModelSize(num_layers=layers, num_experts=experts, skew=skew)
            run = RunChoices(
                seed=seed,
                tolerance=tolerance,
                num_redundant=redundant_experts,
                move_interval=rebalance_every,
            )
            training = CheckedTraining(size, group, run=run, num_batches=num_batches)
            console.print(training.explain(), soft_wrap=True)
            if resume is not None:
                training.load(resume)
            first = 1 if earlier is None else earlier.step + 1
            span = Span(first=first, last=steps, saved=checkpoint_step, folder=checkpoint)
            records = train(training, span, console=console)
            console.print(steps_table(records), summary(records, tolerance), sep="\n")
            if training.moves:
                console.print(moves_table(training.moves))
            if earlier is None:
                console.print(decode_summary(training.write()), soft_wrap=True)
        losses = [record.loss for record in records]
        if earlier is not None:
            difference = check_resumed(losses, earlier.losses[first - 1 : steps], tolerance)
            console.print(resumed_summary(first, steps, difference), soft_wrap=True)
        else:
            check_loss_fall(losses, min_loss_fall)
        if checkpoint is not None and dist.get_rank() == 0:
            facts = RunFacts(step=checkpoint_step, num_batches=num_batches, losses=losses)
            write_facts(checkpoint, facts)
    except (CheckError, ConfigError) as error:
        sys.exit(str(error))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
