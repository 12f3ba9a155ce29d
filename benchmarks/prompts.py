"""Prompts of real text, the same for every engine and new for every round."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable, Sequence

STRIDE = 509  # a prime, so that starts spread over the text before they come back


class Prompts:
    """Pieces of one long text's token ids."""

    def __init__(self, ids: Sequence[int]):
        self.ids = list(ids)

    @staticmethod
    def of_python(encode: Callable[[str], list[int]]) -> Prompts:
        """The reference of the Python language: long, English, and wherever Python is."""
        topics = pydoc_data.topics.topics
        return Prompts(encode("\n\n".join(topics[name] for name in sorted(topics))[:400_000]))

    def take(self, round: int, streams: int, length: int) -> list[list[int]]:
        """A prompt for each stream of a round. Each starts elsewhere: a cache of prefixes finds nothing."""
        starts = [(round * streams + stream) * STRIDE % len(self.ids) for stream in range(streams)]
        text = self.ids * (1 + length // len(self.ids)) + self.ids
        return [text[start : start + length] for start in starts]
