"""Verdicts of the outer run; tests/scripts/test_launch_multi_rank.py runs real launches."""

import pytest

from tests.multi_rank import Launch, RankResult, World, judge


def result(rank: int, nodeid: str, *, failed_at_s: float | None = None) -> RankResult:
    return RankResult(
        rank=rank,
        nodeid=nodeid,
        outcome="passed" if failed_at_s is None else "failed",
        ended_at_s=failed_at_s or 0.0,
        duration_s=0.5,
        longrepr="",
        summary="",
        sections=[],
    )


A, B, C = ([result(rank, nodeid) for rank in range(2)] for nodeid in "abc")
# Results, how the launch of tests a, b and c ended, and the tests that passed and that failed.
CASES = [
    ([*A, *B, *C], "", "abc", ""),
    # The tests after a failure are undone.
    ([*A, result(0, "b"), result(1, "b", failed_at_s=3.0)], "exit code 1", "a", "b"),
    # The first failure in time is the cause.
    (
        [*A, result(1, "b", failed_at_s=5.0), result(0, "b"), result(0, "c", failed_at_s=4.0)],
        "exit code 1",
        "a",
        "c",
    ),
    # A crash, and a result that one rank lacks.
    ([*A, result(0, "b")], "exit code 1", "a", "b"),
    ([*A, *B, result(0, "c")], "", "ab", "c"),
    # The end of the session fails.
    ([*A, *B, *C], "exit code 1", "ab", "c"),
]


@pytest.mark.parametrize(("results", "ending", "passed", "failed"), CASES)
def test_judge(results: list[RankResult], ending: str, passed: str, failed: str) -> None:
    assert verdicts(results, ending) == (passed, failed)


def test_no_test_is_judged_where_not_all_ranks_started() -> None:
    assert verdicts([], "exit code 1", num_ranks_started=1) == ("", "abc")


def verdicts(results: list[RankResult], ending: str, num_ranks_started: int = 2) -> tuple[str, str]:
    found = judge(
        Launch(
            world=World("torch", 2),
            nodeids=[*"abc"],
            results=results,
            num_ranks_started=num_ranks_started,
            stacks={},
            ending=ending,
            output="",
            duration_s=1.0,
        )
    )
    failed = [nodeid for nodeid, verdict in found.items() if verdict.failure]
    return "".join(nodeid for nodeid in found if nodeid not in failed), "".join(failed)
