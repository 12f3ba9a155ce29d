"""How many threads do good here."""

from __future__ import annotations

import os
from pathlib import Path


def default_threads() -> int:
    """One for each core this process may use: two on one core only take turns at its arithmetic."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = {_siblings(cpu) for cpu in usable}
    return max(1, min(len(cores), _quota()))


def _siblings(cpu: int) -> str:
    """The hardware threads of this one's core, as the kernel writes them; a core of its own if unknown."""
    try:
        folder = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        return (folder / "thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


def _quota() -> int:
    """The cores a container is allowed (cgroup v2), rounded up."""
    try:
        allowed, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return -(-int(allowed) // int(period))
    except (OSError, ValueError):  # no cgroup, or "max"
        return os.cpu_count() or 1
