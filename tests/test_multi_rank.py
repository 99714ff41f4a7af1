"""The results of the outer run; tests/scripts/test_launch_multi_rank.py runs real launches."""

import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from tests import multi_rank
from tests.multi_rank import (
    Launch,
    RankResult,
    World,
    describe_failure,
    judge,
    split,
    take_device,
)


def result(rank: int, nodeid: str, *, failed_at_s: float | None = None) -> RankResult:
    return RankResult(
        rank=rank,
        nodeid=nodeid,
        outcome="passed" if failed_at_s is None else "failed",
        ended_at_s=failed_at_s or 0.0,
        duration_s=0.5,
        longrepr=f"all that rank {rank} says",
        summary=f"the last words of rank {rank}",
        sections=[],
    )


def launch(
    *results: RankResult, num_ranks_started: int = 2, ending: str = "ended with exit code 1"
) -> Launch:
    return Launch(
        world=World("torch", 2),
        nodeids=["a", "b", "c"],
        results=list(results),
        num_ranks_started=num_ranks_started,
        stacks={1: "the stack of rank 1"},
        ending=ending,
        output="the output",
        duration_s=1.0,
    )


PASSED = {nodeid: [result(0, nodeid), result(1, nodeid)] for nodeid in "abc"}


@dataclass(frozen=True, kw_only=True)
class Case:
    id: str
    launch: Launch
    passed: str
    failed: str


CASES = [
    Case(
        id="all passed",
        launch=launch(*PASSED["a"], *PASSED["b"], *PASSED["c"], ending=""),
        passed="abc",
        failed="",
    ),
    Case(
        id="what follows a failure is undone",
        launch=launch(*PASSED["a"], result(0, "b"), result(1, "b", failed_at_s=3.0)),
        passed="a",
        failed="b",
    ),
    Case(
        id="the first failure in time is the cause",
        launch=launch(
            *PASSED["a"],
            result(1, "b", failed_at_s=5.0),
            result(0, "b"),
            result(0, "c", failed_at_s=4.0),
        ),
        passed="a",
        failed="c",
    ),
    Case(
        id="a crash leaves the first undone test",
        launch=launch(*PASSED["a"], result(0, "b")),
        passed="a",
        failed="b",
    ),
    Case(
        id="a result missing on one rank",
        launch=launch(*PASSED["a"], *PASSED["b"], result(0, "c"), ending=""),
        passed="ab",
        failed="c",
    ),
    Case(id="not all ranks started", launch=launch(num_ranks_started=1), passed="", failed="abc"),
    Case(
        id="the end of the session fails",
        launch=launch(*PASSED["a"], *PASSED["b"], *PASSED["c"]),
        passed="ab",
        failed="c",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_judge(case: Case) -> None:
    verdicts = judge(case.launch)
    assert "".join(nodeid for nodeid in verdicts if not verdicts[nodeid].failure) == case.passed
    assert "".join(nodeid for nodeid in verdicts if verdicts[nodeid].failure) == case.failed


def test_a_failure_shows_the_first_rank_in_full_and_the_others_in_short() -> None:
    results = [result(0, "b", failed_at_s=5.0), result(1, "b", failed_at_s=4.0)]
    text = describe_failure("b", results, launch(*results))
    assert "failed on ranks 0, 1; the launch ended with exit code 1" in text
    assert text.index("all that rank 1 says") < text.index("the last words of rank 0")
    assert "all that rank 0 says" not in text
    assert "the output" not in text


def test_a_missing_result_shows_where_the_rank_was_and_the_output() -> None:
    results = [result(0, "b")]
    text = describe_failure("b", results, launch(*results))
    assert "no result from rank 1;" in text
    assert "the stack of rank 1" in text
    assert "the output" in text


def test_a_rank_on_npus_takes_the_one_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    npu = SimpleNamespace(set_device=taken.append)
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu=npu))
    monkeypatch.setenv("LOCAL_RANK", "3")
    take_device("gloo")
    assert taken == []
    take_device("hccl")
    assert taken == [3]


def test_many_tests_are_split_among_launches_in_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(multi_rank, "MAX_TESTS_OF_LAUNCH", 3)
    two, four = World("torch", 2), World("torch", 4)
    shares = list(split({two: [*"abcdefg"], four: [*"xyz"]}))
    assert shares == [(two, [*"abc"]), (two, [*"def"]), (two, ["g"]), (four, [*"xyz"])]
