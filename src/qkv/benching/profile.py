"""What this machine can do, measured with the runtime itself."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from qkv.benching.machine import described
from qkv.benching.shapes import NARROW, WIDE
from qkv.benching.solving import Solved, solve
from qkv.benching.steps import SIZES, steps
from qkv.errors import UnsupportedError
from qkv.memory import free_memory
from qkv.planning.profile import Profile, Speeds
from qkv.runtime.built import missing
from qkv.runtime.threads import default_threads

FORMATS = ("BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
SHAPES = (NARROW, WIDE)
STEP, ANSWER = 1.2e-4, 4e-5  # seconds of the engine in Python: 0.16 ms with one sequence, 1.4 with 32
BAND = 0.2  # what is left unexplained, and the machine's own drift

Progress = Callable[[int, int], None]


def measured(
    threads: int | None = None,
    kv: str = "bf16",
    formats: tuple[str, ...] = FORMATS,
    progress: Progress = lambda done, total: None,
) -> Profile:
    """A profile of the native runtime on so many threads (None: one for each core).

    Two shapes of layers give, by linear equations, how fast products are and what else a row costs; a
    small one what a layer costs whatever it holds; texts of some length, attention.
    UnsupportedError where the native runtime cannot be had.
    """
    absent = missing()
    if absent:
        raise UnsupportedError(f"Only the native runtime is measured for plans: {absent}.")
    count = threads or default_threads()
    solved, readings = dict[str, Solved](), list[Speeds]()
    for done, format in enumerate(formats):
        progress(done, len(formats))
        reading, taken, small = steps(SHAPES, format, count, kv)
        solved[format] = solve(format, kv, reading, taken, small)
        readings.append(reading)
    all_ = list(solved.values())
    machine = described()
    return Profile(
        f"{machine['processor']}, {count} thread{'s' * (count > 1)}",
        free_memory(),
        {**{f: s.weights for f, s in solved.items()}, "": median(s.weights for s in all_)},
        {**{f: s.few for f, s in solved.items()}, "": median(s.few for s in all_)},
        {**{f: s.compute for f, s in solved.items()}, "": median(s.compute for s in all_)},
        median(s.cache for s in all_),
        median(s.attention for s in all_),
        median(s.layer for s in all_),
        pair=median(s.pair for s in all_),
        number=median(s.number for s in all_),
        logit=median(s.logit for s in all_),
        reading=tuple((size, median(dict(each)[size] for each in readings)) for size in SIZES),
        band=BAND,
        step=STEP,
        answer=ANSWER,
        details={**machine, "kv": kv, "threads": count},
    )
