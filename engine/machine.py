"""What this machine lends to the process: memory that is free and cores that it may use.

Owns the reading of /proc, /sys and cgroup limits. Knows nothing of what they are for. Invariant: a limit that
cannot be read counts as absent; nothing here raises.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_CPUS = Path("/sys/devices/system/cpu")


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def available_memory_bytes() -> int:
    """Bytes that can be allocated without swapping, within the cgroup's limit."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for line in (_read(Path("/proc/meminfo")) or "").splitlines():
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) * 1024)
    limit, used = _read(_CGROUP / "memory.max"), _read(_CGROUP / "memory.current")
    if limit and used and limit.isdigit():
        limits.append(max(int(limit) - int(used), 0))
    return min(limits)


def num_usable_cpus() -> int:
    """Cores that the process may run on: hardware threads of one core count once, quotas are kept."""
    cpus = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    cores = {_read(_CPUS / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus}
    count = len(cores)
    quota = (_read(_CGROUP / "cpu.max") or "").split()
    if len(quota) == 2 and quota[0].isdigit():
        count = min(count, max(int(quota[0]) // int(quota[1]), 1))
    return count


def peak_memory_bytes() -> int:
    """Most memory that this process has had resident.

    Linux's own mark, since ``ru_maxrss`` of a child starts from its parent's.
    """
    for line in (_read(Path("/proc/self/status")) or "").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
