"""Stop strings: found anywhere in decoded text, also across tokens, and cut exactly."""

from __future__ import annotations

from collections.abc import Sequence

from qkv.errors import RequestError


class StopStrings:
    """Passes text through until it holds one of `stops`; that one and all after it is never given out.

    The stop that counts is the one completed first, so the result does not depend on how the text
    was cut into pushes; of several completed by the same character the longest counts. What is
    held back is only ever a proper prefix of a stop.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise RequestError("stop must be a list of strings, none of them empty.")
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""
        self._stopped: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text; give what is now certain to lie before any stop, and the stop if one was met."""
        if self._stopped is not None:
            return "", self._stopped
        text, self._held = self._held + text, ""
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self._stopped = min(found)
            return text[:at], self._stopped
        certain = len(text) - self._pending(text)
        self._held = text[certain:]
        return text[:certain], None

    def flush(self) -> str:
        """The text ends here: give what was held back."""
        held, self._held = self._held, ""
        return held

    def _pending(self, text: str) -> int:
        """The length of the longest end of `text` that a stop may still grow from."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
