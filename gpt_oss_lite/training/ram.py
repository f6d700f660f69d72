"""Memory of the machine, as its kernel counts it."""

import os
from pathlib import Path


def ram_bytes() -> int:
    """Memory of the machine, or what a container may take of it."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _lines("/sys/fs/cgroup/memory.max")
    return min(installed, int(limit[0])) if limit and limit[0].isdecimal() else installed


def available_ram_bytes() -> int:
    """Memory that may still be taken, also within a container's limit."""
    available = ram_bytes()
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            available = min(available, int(line.split()[1]) * 1024)
    limit, used = _lines("/sys/fs/cgroup/memory.max"), _lines("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0].isdecimal():
        available = min(available, int(limit[0]) - int(used[0]))
    return available


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
