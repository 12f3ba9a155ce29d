"""The parameters by the description's names, stored as the files store them wherever that can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from qkv.checkpoints import FORMATS, StoredTensor
from qkv.families.weights import Piece, WeightMap
from qkv.loading.files import Files

Progress = Callable[[int, int], None]  # tensors done, tensors in all
KEPT = ("F32", "F16", "BF16")  # and every block format; others become F32


class Parameters(Mapping[str, StoredTensor]):
    """Each parameter is made when it is asked for, and not kept here; shared ones have their first name.

    Blocks, and floats of 32 and 16 bits, are handed on as they are stored: as windows on the mapped
    file where a parameter is a whole tensor there, or whole rows of one; rearranged where it is made
    of several, or turned. What cannot be is decoded, to F32: blocks that would have to be cut, and
    parameters that are stored in several formats.
    """

    def __init__(self, files: Files, places: WeightMap, progress: Progress | None = None):
        self.files, self.places, self.progress = files, places, progress
        self.shapes = {name: tensor.shape for name, tensor in files.description.model.weights().items()}
        self._asked: set[str] = set()

    def __len__(self) -> int:
        return len(self.places.ours)

    def __iter__(self) -> Iterator[str]:
        return iter(self.places.ours)

    def __getitem__(self, name: str) -> StoredTensor:
        found = self._as_stored(name) or self._decoded(name)
        if self.progress is not None and name not in self._asked:
            self._asked.add(name)
            self.progress(len(self._asked), len(self))
        return found

    def _as_stored(self, name: str) -> StoredTensor | None:
        kinds = {self.files.tensors[piece.place.name].format for piece in self.places.ours[name]}
        kind = kinds.pop()
        format = FORMATS[kind]
        kept = not kinds and (kind in KEPT or format.block > 1)
        places = self._by_blocks(name, format.block) if kept else None
        if places is None:
            return None
        block = np.dtype((np.void, format.size))

        def fetch(theirs: str) -> np.ndarray:
            stored = self.files.tensors[theirs]
            return stored.data.view(block).reshape(_in_blocks(stored.shape, format.block))

        values = np.ascontiguousarray(places.read(name, fetch)).reshape(-1)
        return StoredTensor(name, self.shapes[name], kind, values.view(np.uint8))

    def _by_blocks(self, name: str, size: int) -> WeightMap | None:
        """Where the blocks of a parameter stand; None where some would have to be cut."""
        if size == 1:
            return self.places
        beside = [piece for own in self.places.ours[name] for piece in self.places.theirs[own.place.name]]
        if any(_cut(piece, size) for piece in beside):
            return None
        shapes = {piece.ours: _in_blocks(self.shapes[piece.ours], size) for piece in beside}
        return WeightMap(shapes, self.files.description.weights)

    def _decoded(self, name: str) -> StoredTensor:
        values = self.places.read(name, lambda theirs: self.files.tensors[theirs].decode())
        return StoredTensor.from_array(name, values.astype(np.float32, copy=False))


def _in_blocks(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    return (*shape[:-1], shape[-1] // size)


def _cut(piece: Piece, size: int) -> bool:
    """Whether blocks along the last axis would not stay whole."""
    place, last = piece.place, len(piece.shape) - 1
    in_turn = place.groups > 1 and place.axis % len(piece.shape) == last
    return place.transposed or place.shape is not None or in_turn or piece.shape[-1] % size != 0
