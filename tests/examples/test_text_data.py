import torch

from examples.text_data import Batch, TextData

NUM_RANKS = 4
STEPS = range(1, 61)


def tensors(batches: list[Batch | None]) -> list[list[int] | None]:
    return [batch and batch.inputs.flatten().tolist() for batch in batches]


def test_every_rank_computes_the_same_batches() -> None:
    here, there = (TextData(seed=0, num_ranks=NUM_RANKS) for _ in range(2))
    assert tensors(here.batches(7)) == tensors(there.batches(7))
    assert tensors(here.batches(7)) != tensors(here.batches(8))
    assert tensors(here.batches(7)) != tensors(TextData(seed=1, num_ranks=NUM_RANKS).batches(7))


def test_targets_are_the_next_bytes() -> None:
    for batch in TextData(seed=0, num_ranks=NUM_RANKS).batches(1):
        if batch is not None:
            torch.testing.assert_close(batch.targets[:, :-1], batch.inputs[:, 1:])


def test_sizes_differ_and_some_rank_has_no_data() -> None:
    data = TextData(seed=0, num_ranks=NUM_RANKS)
    num_idle = [data.batches(step).count(None) for step in STEPS]
    assert set(num_idle) == {0, 1}
    sizes = {batch.inputs.shape for batch in data.batches(1) if batch is not None}
    assert len(sizes) > 1


def test_one_rank_alone_always_has_data() -> None:
    data = TextData(seed=0, num_ranks=1)
    assert all(data.batches(step) != [None] for step in STEPS)
