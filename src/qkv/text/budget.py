"""What one rendering of a chat template may cost: time, memory, and the size of any value.

Work is charged before it is done wherever its size can be known before, and right after where not.
Every value a template makes is charged in bytes and every element in `ITEM`, so that no operation,
alone or repeated, takes more than a moment or more memory than `MAX_BYTES`.
"""

from __future__ import annotations

import sys
import time
from contextvars import ContextVar
from typing import Any

from qkv.errors import TokenizerError

MAX_CHARACTERS = 1 << 24  # of a whole conversation, or of any value made on the way
MAX_SECONDS = 2.0  # of this thread's own computing, so that a busy machine refuses nothing
MAX_BYTES = 1 << 28  # of all that one rendering makes, kept or not
MAX_BITS = 64
MAX_WIDTH = 1000

VIEWS: tuple[Any, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_SIZED: tuple[Any, ...] = (str, list, tuple, dict, range, *VIEWS)
_WALKED: tuple[Any, ...] = (list, tuple, *VIEWS)
_UNSEEN = 1 << 16  # bytes after which the clock is read
ITEM = 64  # bytes charged for each element and for each step of a loop


class Budget:
    """What is left of one rendering."""

    def __init__(self, seconds: float) -> None:
        self._deadline = time.thread_time() + seconds
        self._bytes = MAX_BYTES
        self._unseen = 0

    def spend(self, size: int, seen: int = 0) -> None:
        """Charge `size` bytes that are made, and `seen` bytes that are only looked at."""
        self._bytes -= size
        if self._bytes < 0:
            raise TokenizerError(
                f"The chat template makes more than {MAX_BYTES:,} bytes of values: it was stopped."
            )
        self._unseen += ITEM + size + seen
        if self._unseen > _UNSEEN:  # the clock costs more than most operations
            self._unseen = 0
            if time.thread_time() > self._deadline:
                raise TokenizerError("The chat template takes too long: it was stopped.")


BUDGET: ContextVar[Budget] = ContextVar("budget")


def spend(size: int = ITEM, seen: int = 0) -> None:
    """Charge some bytes, and see whether there is time left."""
    BUDGET.get().spend(size, seen)


def spend_shallow(value: Any) -> None:
    """Charge a value whose elements were charged when they were made."""
    if isinstance(value, int):
        check_number(value)
    spend(sys.getsizeof(value) + (0 if isinstance(value, str) else ITEM * length(value)))


def spend_deep(*values: Any) -> None:
    """Charge for walking through all that the values hold, as printing or comparing them does."""
    stack: list[Any] = list(values)
    budget = BUDGET.get()
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            budget.spend(len(value))
            continue
        budget.spend(ITEM * (1 + length(value)))
        if isinstance(value, dict):
            stack.extend(value)
            stack.extend(value.values())
        elif isinstance(value, _WALKED):
            stack.extend(value)


def length(value: Any) -> int:
    """How many elements a value has; none where it is no collection."""
    return len(value) if isinstance(value, _SIZED) else 0


def check_size(size: int) -> None:
    if size > MAX_CHARACTERS:
        raise TokenizerError(
            f"The chat template makes more than {MAX_CHARACTERS:,} characters: it was stopped."
        )


def check_number(value: Any) -> None:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise TokenizerError(f"The chat template calculates with a number of more than {MAX_BITS} bits.")


def check_width(width: Any) -> None:
    if (isinstance(width, int) and abs(width) > MAX_WIDTH) or (
        isinstance(width, str) and len(width) > MAX_WIDTH
    ):
        raise TokenizerError(f"The chat template asks for a width of more than {MAX_WIDTH:,} characters.")
