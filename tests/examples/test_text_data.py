import torch

from examples.text_data import Batch, TextData, batches_of_rank

NUM_RANKS = 4
STEPS = range(1, 61)


def tensors(batches: list[Batch | None]) -> list[list[int] | None]:
    return [batch and batch.inputs.flatten().tolist() for batch in batches]


def test_every_rank_computes_the_same_batches() -> None:
    here, there = (TextData(seed=0, num_batches=NUM_RANKS) for _ in range(2))
    assert tensors(here.batches(7)) == tensors(there.batches(7))
    assert tensors(here.batches(7)) != tensors(here.batches(8))
    assert tensors(here.batches(7)) != tensors(TextData(seed=1, num_batches=NUM_RANKS).batches(7))


def test_targets_are_the_next_bytes() -> None:
    for batch in TextData(seed=0, num_batches=NUM_RANKS).batches(1):
        if batch is not None:
            torch.testing.assert_close(batch.targets[:, :-1], batch.inputs[:, 1:])


def test_sizes_differ_and_some_rank_has_no_data() -> None:
    data = TextData(seed=0, num_batches=NUM_RANKS)
    num_idle = [data.batches(step).count(None) for step in STEPS]
    assert set(num_idle) == {0, 1}
    sizes = {batch.inputs.shape for batch in data.batches(1) if batch is not None}
    assert len(sizes) > 1


def test_one_rank_alone_always_has_data() -> None:
    data = TextData(seed=0, num_batches=1)
    assert all(data.batches(step) != [None] for step in STEPS)


def test_every_batch_is_of_one_rank_and_all_have_as_many_turns() -> None:
    batches = TextData(seed=0, num_batches=4).batches(1)
    for num_ranks in (1, 2, 3, 8):
        by_rank = [batches_of_rank(batches, rank, num_ranks) for rank in range(num_ranks)]
        assert len({len(of_rank) for of_rank in by_rank}) == 1
        taken = [id(batch) for of_rank in by_rank for batch in of_rank if batch is not None]
        assert sorted(taken) == sorted(id(batch) for batch in batches if batch is not None)
