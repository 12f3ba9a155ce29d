"""Windows on mapped files."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np


def release(data: np.ndarray) -> None:
    """Lets go of a mapped file's pages under this array, once what is in them is held elsewhere.

    They come back when they are read again. Nothing happens for an array in memory of its own, or on a
    system without such a call.
    """
    base: Any = data
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    if not isinstance(base, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = data.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (start + data.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if length > 0:
        base.madvise(mmap.MADV_DONTNEED, first, length)
