from collections.abc import Mapping
from pathlib import Path

import pytest

from epcomm.platforms.host import memory_left

MIB = 2**20
MEMINFO = f"MemTotal: 900 kB\nMemAvailable: {64 * 1024} kB\n"


def version_2(limit: str, used: int, cache: int) -> dict[str, str]:
    stat = f"anon 5\ninactive_file {cache}\n"
    return {"memory.max": limit, "memory.current": str(used), "memory.stat": stat}


def version_1(limit: int, used: int, cache: int) -> dict[str, str]:
    stat = f"inactive_file 7\ntotal_inactive_file {cache}\n"
    names = "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"
    return dict(zip(names, (str(limit), str(used), stat), strict=True))


CASES: Mapping[str, tuple[str, Mapping[str, Mapping[str, str]], int]] = {
    "no group": ("", {}, 64 * MIB),
    "no limit": ("0::/job\n", {"job": version_2("max\n", 3, 0)}, 64 * MIB),
    "own": ("0::/job\n", {"job": version_2(f"{9 * MIB}\n", 4 * MIB, MIB)}, 6 * MIB),
    "parent": (
        "0::/pod/job\n",
        {"pod": version_2(f"{3 * MIB}\n", MIB, 0), "pod/job": version_2(f"{9 * MIB}\n", MIB, 0)},
        2 * MIB,
    ),
    # The path is that of the host, and the group of the container is the root.
    "container": ("0::/host/job\n", {".": version_2(f"{5 * MIB}\n", MIB, 0)}, 4 * MIB),
    "version 1": (
        "9:cpu,cpuacct:/job\n4:memory:/job\n0::/\n",
        {"memory/job": version_1(8 * MIB, MIB, MIB), "job": version_2("1\n", 0, 0)},
        8 * MIB,
    ),
    "used up": ("0::/\n", {".": version_2(f"{MIB}\n", 2 * MIB, 0)}, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_least_of_all_limits_counts(case: str, tmp_path: Path) -> None:
    membership, found, expected = CASES[case]
    processes, groups = tmp_path / "proc", tmp_path / "cgroup"
    (processes / "self").mkdir(parents=True)
    (processes / "self/cgroup").write_text(membership)
    (processes / "meminfo").write_text(MEMINFO)
    for folder, texts in found.items():
        (groups / folder).mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (groups / folder / name).write_text(text)
    assert memory_left(processes, groups) == expected


def test_a_system_that_does_not_tell_sets_no_limit(tmp_path: Path) -> None:
    assert memory_left(tmp_path, tmp_path) is None
