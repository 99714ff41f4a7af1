"""The identity of the host of this process, and the memory that its processes can still allocate.

Unnamed memory counts towards the memory of its control group and of the host, regardless of the
size of /dev/shm. The kernel kills a process that exceeds the limit of its control group, so the
free memory is checked before an allocation.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
# The files of limit and usage, and the line of memory.stat with memory that the kernel can reclaim:
# for control groups version 2, and for version 1, whose memory controller has its own folder.
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def memory_left(processes: Path = Path("/proc"), groups: Path = _GROUPS) -> int | None:
    """Return the bytes that this process can still allocate; None if unknown. Local."""
    found = [left for group in _own_groups(processes, groups) for left in _left(*group)]
    with suppress(OSError):
        for line in (processes / "meminfo").read_text("ascii").splitlines():
            name, _, size = line.partition(":")
            if name == "MemAvailable":
                found.append(1024 * int(size.split()[0]))
    return max(min(found), 0) if found else None


def _own_groups(processes: Path, groups: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield the control groups of this process and their parents."""
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
        # In a container the path may be that of the host, and the root may be its own group.
        inside = (each for each in (folder, *folder.parents) if each.is_relative_to(root))
        yield from ((each, names) for each in inside)


def _left(folder: Path, names: tuple[str, str, str]) -> Iterator[int]:
    """Yield the bytes left below the limit of one control group, if it has a limit."""
    limit_name, used_name, reclaimable_name = names
    # The files do not exist for a group that has ended, the root, or a path of the host.
    with suppress(OSError):
        limit = (folder / limit_name).read_text().strip()
        if limit == "max":
            return
        left = int(limit) - int((folder / used_name).read_text())
        for line in (folder / "memory.stat").read_text().splitlines():
            name, size = line.split()
            left += int(size) * (name == reclaimable_name)
        yield left


def host_of_this_process() -> str:
    """Return a text that is equal for processes that can share memory. Local.

    They have the same kernel, user, and namespaces of processes and network; different network
    namespaces count as different hosts. Empty if this is unknown, or if other processes cannot read
    the files of this process.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "pid")]
        # Root owns /proc/self if the process is not dumpable, see PR_SET_DUMPABLE.
        if os.stat("/proc/self").st_uid != os.geteuid():
            return ""
    except OSError:
        return ""
    return "/".join(map(str, [boot, *spaces, os.geteuid()]))
