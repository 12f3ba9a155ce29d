"""A machine's programs as a runner: each row of the batch is a sequence, and nothing is padded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from qkv.engine import runner
from qkv.engine.answers import Move
from qkv.engine.runner import Progress, Watch
from qkv.errors import RequestError
from qkv.runtime import Rows
from qkv.runtime.machine import Sequences

if TYPE_CHECKING:
    from jaxtyping import Float


class ProgramRunner:
    """See `Runner`. A row that has no move is forgotten at once."""

    def __init__(self, sequences: Sequences, watch: Watch):
        self.sequences, self.watch = sequences, watch
        self.width = sequences.machine.width
        self.owned: list[int | None] = []  # the sequence of each row
        self.lengths: list[int] = []  # how many tokens it holds

    def read(
        self, prompts: Sequence[Sequence[int]], progress: Progress | None = None
    ) -> Float[np.ndarray, "rows vocab"]:
        """In chunks of rows, of all prompts together; only the last of each prompt is answered."""
        self._open(len(prompts))
        self.lengths = [len(prompt) for prompt in prompts]
        total, done, answers = sum(self.lengths), 0, []
        for rows in self._chunks(prompts):
            answers.append(self._run(rows))
            done += len(rows.tokens)
            if progress is not None:
                progress(done, total)
        return answers[-1] if len(answers[-1]) == len(prompts) else np.concatenate(answers)

    def begin(
        self, start: int, sources: Sequence[Sequence[int]], progress: Progress | None = None
    ) -> Float[np.ndarray, "rows vocab"]:
        """Each source in one pass, as each of its places sees all others."""
        self._check_taps()
        self._open(len(sources))
        total, done = sum(map(len, sources)), 0
        for sequence, source in zip(self._sequences(), sources, strict=True):
            self.sequences.read(Rows.of(list(source), sequence=sequence, wanted=[]))
            done += len(source)
            if progress is not None:
                progress(done, total)
        self.lengths = [0] * len(sources)
        return self.step([(row, start) for row in range(len(sources))])

    def select(self, rows: Sequence[int]) -> None:
        self._select(list(rows))

    def step(self, moves: Sequence[Move | None]) -> Float[np.ndarray, "rows vocab"]:
        self._select([None if move is None else move[0] for move in moves])
        moving = [row for row, move in enumerate(moves) if move is not None]
        rows = Rows(
            np.array([move[1] for move in moves if move is not None], np.int32),
            np.array([self.owned[row] for row in moving], np.int32),
            np.array([self.lengths[row] for row in moving], np.int32),
            np.arange(len(moving), dtype=np.int32),
        )
        answers = self._run(rows)
        for row in moving:
            self.lengths[row] += 1
        if len(moving) == len(moves):
            return answers
        spread = np.zeros((len(moves), self.width), np.float32)
        spread[moving] = answers
        return spread

    def close(self) -> None:
        for sequence in self._sequences():
            self.sequences.end(sequence)
        self.owned = []

    def _open(self, count: int) -> None:
        for _ in range(count):
            self.owned.append(self.sequences.begin())

    def _sequences(self) -> list[int]:
        return [sequence for sequence in self.owned if sequence is not None]

    def _select(self, parents: list[int | None]) -> None:
        """The first row that goes on from another takes its sequence; further ones go on from a copy."""
        if parents == [None if sequence is None else row for row, sequence in enumerate(self.owned)]:
            return
        before, lengths, taken = self.owned, self.lengths, set[int]()
        self.owned = list(before)  # until all is done: what is held is closed whatever happens
        after: list[int | None] = []
        for parent in parents:
            sequence = None if parent is None else before[parent]
            if parent is not None and sequence is not None and parent in taken:
                sequence = self.sequences.fork(sequence)
                self.owned.append(sequence)
            elif parent is not None:
                taken.add(parent)
            after.append(sequence)
        for row, sequence in enumerate(before):
            if sequence is not None and row not in taken:
                self.sequences.end(sequence)
        self.owned = after
        self.lengths = [0 if parent is None else lengths[parent] for parent in parents]

    def _chunks(self, prompts: Sequence[Sequence[int]]) -> Iterator[Rows]:
        """All prompts, one after the other, cut into steps of at most CHUNK rows."""
        tokens = np.concatenate([np.asarray(prompt, np.int64) for prompt in prompts])
        sequences = np.repeat(np.array(self._sequences()), self.lengths)
        positions = np.concatenate([np.arange(length) for length in self.lengths])
        last = np.cumsum(self.lengths) - 1
        for at in range(0, len(tokens), runner.CHUNK):
            piece = slice(at, at + runner.CHUNK)
            wanted = last[(last >= at) & (last < at + runner.CHUNK)] - at
            yield Rows(tokens[piece], sequences[piece], positions[piece], wanted)

    def _run(self, rows: Rows) -> Float[np.ndarray, "wanted vocab"]:
        self._check_taps()
        return self.sequences.step(rows)

    def _check_taps(self) -> None:
        """Programs have no points to tap: what was set after the text was begun would see nothing."""
        if self.watch() is not None:
            raise RequestError(
                "A tap was set after this text was begun without one: set it first, or load the model "
                'with runtime="torch", whose passes can be tapped at any time.'
            )
