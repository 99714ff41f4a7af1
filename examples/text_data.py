"""English text that every Python carries, cut into batches whose size differs from one to the next.

A step has the same batches on any number of ranks, so that a run can go on on other ranks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from torch import Tensor

MAX_SEQUENCES = 12
MIN_SEQUENCE_LENGTH = 32
MAX_SEQUENCE_LENGTH = 128

# How often some rank has no data, as when a data set runs out on one rank before the others.
IDLE_PROBABILITY = 0.25


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Hold what a rank learns in one forward and backward.

    inputs: [sequences, length], int64, bytes of text.
    targets: [sequences, length], int64, the byte that follows each of them.
    """

    inputs: Tensor
    targets: Tensor

    @property
    def num_tokens(self) -> int:
        """Bytes to be predicted."""
        return self.targets.numel()


class TextData:
    """The batches of all ranks, computed from a seed, so that no rank has to send its own."""

    def __init__(self, *, seed: int, num_batches: int) -> None:
        """Read the text; num_batches are those of a step, of all ranks together."""
        self._seed = seed
        self._num_batches = num_batches
        self.text = torch.frombuffer(
            bytearray("\n".join(topics.values()), "utf-8"), dtype=torch.uint8
        )

    def batches(self, step: int) -> list[Batch | None]:
        """The batches of `step`; None where there are no data, never for all."""
        # A string seeds alike in every process; the hash of a tuple would promise less.
        draw = random.Random(f"{self._seed} {step}")
        batches: list[Batch | None] = [self._batch(draw) for _ in range(self._num_batches)]
        if self._num_batches > 1 and draw.random() < IDLE_PROBABILITY:
            batches[draw.randrange(self._num_batches)] = None
        return batches

    def prompt(self, rank: int, num_ranks: int, length: int) -> Tensor:
        """[length], int64: where the text of a rank begins."""
        start = len(self.text) // num_ranks * rank
        return self.text[start : start + length].long()

    def _batch(self, draw: random.Random) -> Batch:
        length = draw.randint(MIN_SEQUENCE_LENGTH, MAX_SEQUENCE_LENGTH)
        rows = []
        for _ in range(draw.randint(1, MAX_SEQUENCES)):
            start = draw.randrange(len(self.text) - length)
            rows.append(self.text[start : start + length + 1])
        bytes_ = torch.stack(rows).long()
        return Batch(inputs=bytes_[:, :-1], targets=bytes_[:, 1:])


def batches_of_rank(
    batches: Sequence[Batch | None], rank: int, num_ranks: int
) -> list[Batch | None]:
    """Return what a rank learns in turn; every rank has as many, for all must call together."""
    num_rounds = -(-len(batches) // num_ranks)
    places = range(rank, num_rounds * num_ranks, num_ranks)
    return [batches[place] if place < len(batches) else None for place in places]
