"""The machine while figures are taken: what it is, how busy others keep it, how fast its memory reads."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEGABYTES, REPEATS = 512, 7  # the bandwidth's buffer, well past any cache, and how often it is read
QUIET = 0.05  # share of all cores that others may have without a figure counting as disturbed
TICKS = os.sysconf("SC_CLK_TCK")


def described() -> dict[str, Any]:
    """The processor, its cores, the instructions that matter here, and the system."""
    info = Path("/proc/cpuinfo").read_text()
    fields = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    notable = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimddp", "i8mm", "sve")
    return {
        "processor": fields.get("model name", platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
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
        busy, stolen = busy_seconds(Path("/proc/stat").read_text())
        own = 0.0 if process is None else used_seconds(Path(f"/proc/{process}/stat").read_text())
        return Moment(time.perf_counter(), busy, stolen, own)

    def others(self, later: Moment, cores: int) -> float:
        """The share of all cores, 0 to 1, that went to others between the two, other machines included."""
        elapsed = max(later.clock - self.clock, 1 / TICKS)
        foreign = later.busy - self.busy - (later.own - self.own) + later.stolen - self.stolen
        return min(max(foreign / (elapsed * cores), 0.0), 1.0)


def wait_for_quiet(patience: float, pause: float = 0.5) -> float:
    """Waits until others leave the cores alone, for so many seconds at most; returns their last share."""
    cores, end = os.cpu_count() or 1, time.monotonic() + patience
    while True:
        before = Moment.now()
        time.sleep(pause)
        share = before.others(Moment.now(), cores)
        if share <= QUIET or time.monotonic() >= end:
            return share


def resident(process: int) -> dict[str, int]:
    """Bytes of memory that a process holds now, held at most, and holds now that are no file's."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    wanted = {"resident": "VmRSS", "peak": "VmHWM", "anonymous": "RssAnon"}
    return {name: int(fields[key].split()[0]) * 1024 for name, key in wanted.items()}


class Bandwidth:
    """The program that measures it, compiled for this machine at the first use."""

    def __init__(self, source: Path, folder: Path, compiler: str | None = None):
        self.program = folder / source.stem
        if not self.program.exists() or self.program.stat().st_mtime < source.stat().st_mtime:
            folder.mkdir(parents=True, exist_ok=True)
            compiler = compiler or os.environ.get("CXX", "g++")
            options = ["-O3", "-march=native", "-pthread", "-std=c++17"]
            subprocess.run([compiler, *options, str(source), "-o", str(self.program)], check=True)

    def measure(self, threads: Sequence[int]) -> Mapping[int, float]:
        """Bytes a second with each of these numbers of threads: the median of some reads."""
        command = [str(self.program), str(MEGABYTES), str(REPEATS), *map(str, threads)]
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return {int(count): speed for count, speed in json.loads(found).items()}
