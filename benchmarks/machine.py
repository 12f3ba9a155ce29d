"""The machine while engines are measured: waiting for a quiet one, what they hold, how fast memory reads."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from qkv.benching.figures import QUIET
from qkv.benching.machine import Moment

MEGABYTES, REPEATS = 512, 7  # the bandwidth's buffer, well past any cache, and how often it is read


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
