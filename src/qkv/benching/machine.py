"""The machine while figures are taken: what it is, how busy others keep it, how fast its memory reads."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from qkv.runtime.built import NAME, missing

TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
LARGE = 512 << 20  # bytes that are read for how fast memory is: processors have caches of half of it
PASSES = 8  # over what numpy reads


def described() -> dict[str, Any]:
    """The processor, its cores, the instructions that matter here, and the system."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        info = ""
    fields = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    notable = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimddp", "i8mm", "sve")
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return {
        "processor": fields.get("model name", platform.machine()),
        "cores": len(usable),
        "instructions": [flag for flag in notable if flag in flags],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def busy_seconds(stat: str) -> tuple[float, float]:
    """From the text of /proc/stat: seconds that cores were busy since the start, and were taken away.

    Taken away (steal) is what the host gave to other machines while something here wanted to run.
    """
    user, nice, system, _, _, irq, softirq, steal = map(int, stat.splitlines()[0].split()[1:9])
    return (user + nice + system + irq + softirq) / TICKS, steal / TICKS


def used_seconds(stat: str) -> float:
    """From the text of /proc/PID/stat: seconds of processor that a process has used, all its threads."""
    after_name = stat.rsplit(")", 1)[1].split()  # a name may hold spaces and brackets
    return (int(after_name[11]) + int(after_name[12])) / TICKS


@dataclass(frozen=True)
class Moment:
    """Clock and counters at one moment, to compare with a later one."""

    clock: float
    busy: float
    stolen: float
    own: float

    @staticmethod
    def now(process: int | None = None) -> Moment:
        """With what a process has used. Raises OSError where the system does not count (Linux does)."""
        busy, stolen = busy_seconds(Path("/proc/stat").read_text())
        own = 0.0 if process is None else used_seconds(Path(f"/proc/{process}/stat").read_text())
        return Moment(time.perf_counter(), busy, stolen, own)

    def others(self, later: Moment, cores: int) -> float:
        """The share of all cores, 0 to 1, that went to others between the two, other machines included."""
        elapsed = max(later.clock - self.clock, 1 / TICKS)
        foreign = later.busy - self.busy - (later.own - self.own) + later.stolen - self.stolen
        return min(max(foreign / (elapsed * cores), 0.0), 1.0)


def read_bandwidth(threads: int, bytes: int | None = None) -> float:
    """Bytes a second that so many threads read together, of so many bytes (None: LARGE) over and over.

    By the native runtime; by numpy, which may not reach what the memory can give, where there is none.
    """
    bytes = LARGE if bytes is None else bytes
    if missing() is None:
        found: float = import_module(NAME).read_bandwidth(threads, bytes)
        return found
    from concurrent.futures import ThreadPoolExecutor

    parts = np.array_split(np.ones(bytes // 8, np.uint64), threads)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(PASSES):
            start = time.perf_counter()
            list(pool.map(np.sum, parts))  # numpy lets go of the interpreter meanwhile
            best = max(best, bytes / (time.perf_counter() - start))
    return best
