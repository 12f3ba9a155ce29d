"""What a machine can do: figures measured here, or those its maker publishes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import hypot
from pathlib import Path
from typing import Any

import numpy as np

from qkv.errors import RequestError, SourceError
from qkv.kept import folder

Speeds = tuple[tuple[int, float], ...]  # numbers of bytes, and bytes a second


def overlapped(*seconds: float) -> float:
    """Seconds of what is done at once: the longest, and where two are alike two fifths more."""
    return hypot(*seconds)


def read_at(reading: Speeds, bytes: float) -> float:
    """Bytes a second of memory that is read over and over: by the logarithm between those measured."""
    sizes, speeds = zip(*reading, strict=True)
    return float(np.exp(np.interp(np.log(max(bytes, 1)), np.log(sizes), np.log(speeds))))


def gone_through(bytes: float, rate: float, reading: Speeds, among: float) -> float:
    """Seconds of reading bytes, among as many as a step reads, and going through them at this rate."""
    return overlapped(bytes / rate, bytes / read_at(reading, among)) if reading else bytes / rate


@dataclass(frozen=True)
class Profile:
    """How fast a machine reads and computes. Bytes and operations a second; seconds.

    `weights` is how fast a step of one row goes through weights, `few` and `compute` how fast products of
    a few and of many rows are, by their format ("" for all others). `cache` is how fast keys and values
    are gone through. `reading` is how fast memory gives so many bytes that are read over and over, for
    some numbers of them, as a processor's cache may hold them; where there is none, `weights` and `cache`
    are how fast they are read. `attention` is how fast scores and mixtures of many rows are, with `pair`
    seconds beside for each pair of a query and a key. Besides, a step costs `step`, each of its layers
    `layer`, each number of a row in a layer `number`, each answer `answer` and each of its numbers
    `logit`. `band` is how far off times may be.
    """

    name: str
    memory: int | None
    weights: Mapping[str, float]
    few: Mapping[str, float]
    compute: Mapping[str, float]
    cache: float
    attention: float
    layer: float = 0.0
    step: float = 0.0
    pair: float = 0.0
    number: float = 0.0
    answer: float = 0.0
    logit: float = 0.0
    reading: Speeds = ()
    band: float = 0.35
    accelerator: bool = False
    said_by: str = "measured here"
    details: Mapping[str, Any] = field(default_factory=dict)

    def of(self, figures: Mapping[str, float], format: str) -> float:
        return figures[format] if format in figures else figures[""]

    def seconds(self, bytes: float, rate: float, among: float) -> float:
        """To go through bytes at this rate, in a step that reads so many bytes in all."""
        return gone_through(bytes, rate, self.reading, among)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Profile:
        """Raises SourceError for a file that holds none."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            reading = tuple((int(bytes), float(speed)) for bytes, speed in found.pop("reading", ()))
            return Profile(**found, reading=reading)
        except (OSError, ValueError, TypeError, AttributeError) as problem:
            raise SourceError(
                f"{path} holds no profile of a machine: measure it again ({problem})."
            ) from None


def _device(name: str, gigabytes: float, bandwidth: float, tera: float, fp8: float | None = None) -> Profile:
    """Of public figures, what engines reach of them: 80 % of the bandwidth, half of the operations."""
    reads, computes = 0.8 * bandwidth * 1e9, 0.5 * tera * 1e12
    products = {"": computes} if fp8 is None else {"": computes, "F8_E4M3": 0.5 * fp8 * 1e12}
    return Profile(
        name, round(gigabytes * 2**30), {"": reads}, products, products, reads, 0.6 * computes,
        layer=12e-6, step=1e-4, accelerator=True, said_by="its maker's figures: "
        f"{bandwidth:,.0f} GB/s and {tera:,.0f} TFLOP/s dense in 16 bits; reached: 80 % and 50 %",
    )  # fmt: skip


def here() -> Path:
    """Where what was measured of this machine is kept."""
    return folder() / "machine.json"


# memory in GiB, GB/s, dense TFLOP/s in 16 bits and in 8, as the makers' data sheets have them
DEVICES: dict[str, Profile] = {
    name: _device(name, *figures)
    for name, figures in {
        "t4": (16, 320, 65),
        "l4": (24, 300, 121, 242),
        "a10": (24, 600, 125),
        "a100-40gb": (40, 1555, 312),
        "a100-80gb": (80, 2039, 312),
        "l40s": (48, 864, 362, 733),
        "h100": (80, 3350, 989, 1979),
        "h200": (141, 4800, 989, 1979),
        "b200": (180, 8000, 2250, 4500),
        "rtx-3090": (24, 936, 71),
        "rtx-4090": (24, 1008, 165, 330),
        "rtx-5090": (32, 1792, 209, 419),
        "mi300x": (192, 5300, 1307, 2615),
    }.items()
}


def device(name: str) -> Profile:
    """Raises RequestError for a device whose figures are not known."""
    found = DEVICES.get(name.lower().replace(" ", "-").replace("_", "-"))
    if found is None:
        raise RequestError(f"device {name!r} is not known ({', '.join(DEVICES)}).")
    return found
