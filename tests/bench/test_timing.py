import pytest
import torch

from epcomm.bench.timing import Captured, Clock, Percentiles, captured, slowest_rank


def test_percentiles_are_interpolated() -> None:
    # 0 to 100 in any order: percentile p is p.
    shuffled = [float(37 * number % 101) for number in range(101)]
    assert Percentiles.of(shuffled) == Percentiles(p50=50.0, p95=95.0, p99=99.0)
    found = Percentiles.of([4.0, 1.0, 3.0, 2.0])
    assert found.p50 == pytest.approx(2.5)
    assert found.p95 == pytest.approx(3.85)
    assert Percentiles.of([7.0]) == Percentiles(p50=7.0, p95=7.0, p99=7.0)


def spans(dispatch: float, combine: float) -> dict[str, float]:
    return {"dispatch": dispatch, "pair": dispatch + combine}


def test_an_iteration_takes_as_long_as_its_slowest_rank() -> None:
    ranks = [[spans(2.0, 5.0), spans(10.0, 1.0)], [spans(6.0, 3.0), spans(2.0, 1.0)]]
    # The time is 9 in the first iteration, not 6 + 5, because both halves must be of the same rank.
    assert slowest_rank(ranks) == {"dispatch": [6.0, 10.0], "pair": [9.0, 11.0]}


def test_ranks_with_unequal_iterations_are_refused() -> None:
    one = spans(1.0, 1.0)
    with pytest.raises(ValueError, match="shorter"):
        slowest_rank([[one, one], [one]])


def test_a_clock_counts_between_marks_and_forgets() -> None:
    clock = Clock(torch.device("cpu"))
    for _ in range(3):
        clock.mark()
    assert len(clock.take()) == 2
    assert clock.take() == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_keeps_what_it_reads() -> None:
    def ones(y: torch.Tensor) -> Captured:
        # 64 MiB of its own, which the allocator could return to the device.
        x = torch.ones(2**24, dtype=torch.float32, device="cuda")
        return captured(lambda: y.copy_(x.sum()))

    first, second = torch.zeros(2, 1, dtype=torch.float32, device="cuda")
    graphs = [ones(first), ones(second)]
    for y, graph in zip((first, second), graphs, strict=True):
        y.zero_()
        graph.replay()
        assert y.item() == 2**24
