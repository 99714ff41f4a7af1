import cProfile
import time

from benchmarks.measuring.host_profile import sections_of


def work() -> None:
    quick()
    all_to_all()


def quick() -> None:
    time.sleep(0.002)


def all_to_all() -> None:
    time.sleep(0.006)
    quick()


def test_sections_form_a_tree_of_one_call() -> None:
    profiler = cProfile.Profile()
    for _ in range(3):
        profiler.runcall(work)
    sections = sections_of(profiler, num_calls=3, min_ms=1.0)
    # The exchange comes first, because it takes longest, and nothing below it is shown.
    assert [(section.depth, section.name) for section in sections] == [
        (0, "test_host_profile.work"),
        (1, "test_host_profile.all_to_all"),
        (1, "test_host_profile.quick"),
        (2, "time.sleep"),
    ]
    whole, exchange, quick_one, sleep = (section.ms for section in sections)
    assert whole >= exchange + quick_one
    assert exchange >= 8.0
    assert quick_one >= sleep >= 1.9


def test_what_was_measured_is_shown_however_quick() -> None:
    profiler = cProfile.Profile()
    profiler.runcall(sorted_by_nothing)
    sections = sections_of(profiler, num_calls=1, min_ms=1000.0)
    assert [section.name for section in sections] == ["test_host_profile.sorted_by_nothing"]


def sorted_by_nothing() -> None:
    pass
