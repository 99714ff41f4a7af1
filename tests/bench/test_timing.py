import pytest
import torch

from epcomm.bench.timing import HostClock, Laps, Percentiles, clock_for, slowest_rank


def test_percentiles_of_known_numbers() -> None:
    # 0 to 100 in any order: percentile p is p.
    shuffled = [float(37 * number % 101) for number in range(101)]
    assert Percentiles.of(shuffled) == Percentiles(p50=50.0, p95=95.0, p99=99.0)


def test_percentiles_are_interpolated() -> None:
    found = Percentiles.of([4.0, 1.0, 3.0, 2.0])
    assert found.p50 == pytest.approx(2.5)
    assert found.p95 == pytest.approx(3.85)
    assert Percentiles.of([7.0]) == Percentiles(p50=7.0, p95=7.0, p99=7.0)


def test_an_iteration_takes_as_long_as_its_slowest_rank() -> None:
    fast_then_slow = [
        Laps(dispatch=1.0, group=1.0, combine=5.0),
        Laps(dispatch=9.0, group=1.0, combine=1.0),
    ]
    slow_then_fast = [
        Laps(dispatch=4.0, group=2.0, combine=3.0),
        Laps(dispatch=1.0, group=1.0, combine=1.0),
    ]
    ranks = [[laps.spans() for laps in rank] for rank in (fast_then_slow, slow_then_fast)]
    assert slowest_rank(ranks) == {
        "dispatch": [6.0, 10.0],
        "dispatch_without_grouping": [4.0, 9.0],
        "combine": [5.0, 1.0],
        # 9 in the first iteration, not 6 + 5: the halves of one rank belong together.
        "total": [9.0, 11.0],
        "total_without_grouping": [7.0, 10.0],
    }


def test_ranks_with_unequal_iterations_are_refused() -> None:
    laps = Laps(dispatch=1.0, group=1.0, combine=1.0).spans()
    with pytest.raises(ValueError, match="shorter"):
        slowest_rank([[laps, laps], [laps]])


def test_a_clock_counts_between_marks_and_forgets() -> None:
    clock = clock_for(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    for _ in range(3):
        clock.mark()
    assert len(clock.take()) == 2
    assert clock.take() == []
