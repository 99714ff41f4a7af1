"""Tell which host runs this process, and how much memory its processes can still take.

Memory without a name counts towards the memory of its control group and of the host, whatever size
/dev/shm has. Beyond the limit of a control group the kernel ends a process, so one asks before.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
# Limit, use, and the line of memory.stat with what the kernel gives back first: of control groups
# version 2, and of version 1, whose memory controller has a folder of its own.
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def memory_left(processes: Path = Path("/proc"), groups: Path = _GROUPS) -> int | None:
    """Return the bytes that this process can still take; None if that is not known. Local."""
    found = [
        left for folder, names in _own_groups(processes, groups) for left in _left(folder, names)
    ]
    with suppress(OSError):
        for line in (processes / "meminfo").read_text("ascii").splitlines():
            name, _, size = line.partition(":")
            if name == "MemAvailable":
                found.append(1024 * int(size.split()[0]))
    return max(min(found), 0) if found else None


def _own_groups(processes: Path, groups: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield the control groups that this process is in, and all that those are in."""
    try:
        lines = (processes / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = groups / "memory" if controllers else groups
        names = _VERSION_1 if controllers else _VERSION_2
        folder = root / path.strip("/")
        # In a container the path may be that of the host, and its own group the root.
        yield from (
            (each, names) for each in (folder, *folder.parents) if each.is_relative_to(root)
        )


def _left(folder: Path, names: tuple[str, str, str]) -> Iterator[int]:
    """Yield the bytes that are left of the limit of one control group, if it has one."""
    limit_name, used_name, given_back_name = names
    # Not there: a group that has ended, the root, or a path of the host.
    with suppress(OSError):
        limit = (folder / limit_name).read_text().strip()
        if limit == "max":
            return
        left = int(limit) - int((folder / used_name).read_text())
        for line in (folder / "memory.stat").read_text().splitlines():
            name, size = line.split()
            left += int(size) * (name == given_back_name)
        yield left


def host_of_this_process() -> str:
    """Return a text that is equal for processes that can share memory.

    They have one kernel, one user, one numbering of processes, and one network, for processes in
    several are taken for several hosts. Empty where that cannot be known, or others may not look at
    the files of this process. Local.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "pid")]
        # The system gives to root what it hides of a process, see PR_SET_DUMPABLE.
        if os.stat("/proc/self").st_uid != os.geteuid():
            return ""
    except OSError:
        return ""
    return "/".join(map(str, [boot, *spaces, os.geteuid()]))
