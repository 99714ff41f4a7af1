import cProfile
import operator

import pytest

from benchmarks.measuring.host_profile import sections_of

# A clock that counts milliseconds, for a sleep on a busy machine takes any time.
_TICKS: list[None] = []


def work() -> None:
    quick()
    all_to_all()


def quick() -> None:
    operator.iadd(_TICKS, [None] * 2)


def all_to_all() -> None:
    operator.iadd(_TICKS, [None] * 6)
    quick()


def test_sections_form_a_tree_of_one_call() -> None:
    profiler = cProfile.Profile(lambda: len(_TICKS), 1e-3)
    for _ in range(3):
        profiler.runcall(work)
    sections = sections_of(profiler, num_calls=3, min_ms=1.0)
    # The exchange comes first, because it takes longest, and nothing below it is shown.
    assert [(section.depth, section.name) for section in sections] == [
        (0, "test_host_profile.work"),
        (1, "test_host_profile.all_to_all"),
        (1, "test_host_profile.quick"),
        (2, "_operator.iadd"),
    ]
    assert [section.ms for section in sections] == pytest.approx([10, 8, 2, 2])


def test_what_was_measured_is_shown_however_quick() -> None:
    profiler = cProfile.Profile()
    profiler.runcall(sorted_by_nothing)
    sections = sections_of(profiler, num_calls=1, min_ms=1000.0)
    assert [section.name for section in sections] == ["test_host_profile.sorted_by_nothing"]


def sorted_by_nothing() -> None:
    pass
