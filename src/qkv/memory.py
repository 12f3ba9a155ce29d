"""How much memory there is to take, before anything is allocated; and how much was taken."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def free_memory(device: torch.device | str = "cpu") -> int | None:
    """Bytes that can be allocated on a device without swapping; None where there is no telling.

    Of the processor's memory, the least of what the machine has available, what the container is
    allowed (cgroup v2), and what the process is allowed (RLIMIT_AS).
    """
    kind = str(device).split(":")[0]
    if kind == "cuda":
        import torch

        return torch.cuda.mem_get_info(torch.device(device))[0]
    if kind != "cpu":
        return None
    known = [count for count in (_free_here(), _free_in_container(), _free_to_process()) if count is not None]
    return max(min(known), 0) if known else None


def peak_memory() -> int | None:
    """Bytes resident at most so far; None where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    # of this program alone: what getrusage says begins with the memory of the one that started it
    peak = _counts(Path("/proc/self/status")).get("VmHWM")
    if peak is None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def forget_peak() -> bool:
    """Lets `peak_memory` count from now on; whether the system can (Linux does)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _free_here() -> int | None:
    available = _counts(Path("/proc/meminfo")).get("MemAvailable")
    return None if available is None else available * 1024


def _free_in_container() -> int | None:
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no cgroup, or "max"
        return None
    return limit - used + _counts(folder / "memory.stat").get("file", 0)  # cached files make way


def _free_to_process() -> int | None:
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError, ValueError):
        return None
    return None if limit == resource.RLIM_INFINITY else limit - pages * os.sysconf("SC_PAGE_SIZE")


def _counts(path: Path) -> dict[str, int]:
    """Lines of a name and a number, as the kernel writes them."""
    try:
        lines = [line.replace(":", " ").split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}
