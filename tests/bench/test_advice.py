from epcomm.bench.records import Timing
from epcomm.bench.report import advise
from epcomm.bench.timing import Percentiles


def timing(mode: str, backend: str, tokens: int, us: float) -> Timing:
    pair = Percentiles(p50=us, p95=2 * us, p99=3 * us)
    return Timing(mode=mode, backend=backend, tokens=tokens, in_graph=False, us={"pair": pair})


def test_the_fastest_is_named_by_tokens() -> None:
    timings = [
        timing("normal", "nvlink", 128, 40.0),
        timing("low_latency", "nvlink", 128, 90.0),
        timing("low_latency", "nvlink", 1, 10.0),
        timing("normal", "nvlink", 1, 20.0),
    ]
    assert advise(timings) == (
        "Take mode low_latency on backend nvlink at T = 1, and mode normal on backend nvlink at "
        "T = 128."
    )


def test_neighbours_of_one_choice_are_one_range() -> None:
    timings = [timing("normal", "collective", tokens, 5.0) for tokens in (1024, 1, 128)]
    assert advise(timings) == "Take mode normal on backend collective from T = 1 to 1024."


def test_the_sentence_owns_up_where_torch_is_faster() -> None:
    timings = [
        timing("normal", "collective", 1, 50.0),
        timing("", "all_gather", 1, 40.0),
        timing("", "expert_rows", 1, 45.0),
        timing("normal", "collective", 8, 50.0),
        timing("", "all_gather", 8, 60.0),
    ]
    assert advise(timings) == (
        "Take mode normal on backend collective from T = 1 to 8; torch alone is faster with "
        "all-gather and reduce-scatter at T = 1 (40 us, not 50)."
    )
