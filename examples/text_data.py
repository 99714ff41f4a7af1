"""Batches of different sizes from English text that every Python contains.

A step has the same batches on any number of ranks, so that a run can resume on other ranks.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from torch import Tensor

MAX_SEQUENCES = 12
MIN_SEQUENCE_LENGTH = 32
MAX_SEQUENCE_LENGTH = 128

# Probability that a rank has no data, as at the end of a data set.
IDLE_PROBABILITY = 0.25


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The data of one forward and backward of a rank.

    inputs: [sequences, length], int64, bytes of text.
    targets: [sequences, length], int64, the byte after each input.
    """

    inputs: Tensor
    targets: Tensor

    @property
    def num_tokens(self) -> int:
        """The number of predicted bytes."""
        return self.targets.numel()


class TextData:
    """The batches of all ranks, computed from a seed on every rank without communication."""

    def __init__(self, *, seed: int, num_batches: int) -> None:
        """Read the text; num_batches is the number of batches per step, of all ranks together."""
        self._seed = seed
        self._num_batches = num_batches
        self.text = torch.frombuffer(
            bytearray("\n".join(topics.values()), "utf-8"), dtype=torch.uint8
        )

    def batches(self, step: int) -> list[Batch | None]:
        """Return the batches of `step`; at most one is None, for a rank without data."""
        # A string gives the same seed in every process, unlike the hash of a tuple.
        draw = random.Random(f"{self._seed} {step}")
        batches: list[Batch | None] = [self._batch(draw) for _ in range(self._num_batches)]
        if self._num_batches > 1 and draw.random() < IDLE_PROBABILITY:
            batches[draw.randrange(self._num_batches)] = None
        return batches

    def prompt(self, rank: int, num_ranks: int, length: int) -> Tensor:
        """Return the prompt of a rank, [length], int64."""
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
    """Return the batches of a rank; all ranks have equally many, because calls are collective."""
    num_rounds = -(-len(batches) // num_ranks)
    places = range(rank, num_rounds * num_ranks, num_ranks)
    return [batches[place] if place < len(batches) else None for place in places]
