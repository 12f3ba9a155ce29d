"""Whether a model fits into memory, before anything is allocated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qkv.errors import CapacityError
from qkv.memory import free_memory

if TYPE_CHECKING:
    import torch


def check_memory(name: str, need: int, how: str, device: torch.device | str, way_on: str = "choose") -> None:
    """A process that takes too much is killed without a word: raises CapacityError with the numbers."""
    free = free_memory(device)
    if free is not None and need > free:
        raise too_large(name, need, how, free, way_on)


def too_large(name: str, need: int, how: str, free: int | None, way_on: str = "choose") -> CapacityError:
    """`how` says in what form the model needs so many bytes, `way_on` what to do but choose another."""
    there = "less" if free is None else _gigabytes(free)
    return CapacityError(
        f"{name} needs {_gigabytes(need)} of memory {how}, and {there} is free: {way_on} a smaller model."
    )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"
