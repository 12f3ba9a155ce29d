"""How many bytes a pass holds at once, by what its operations make and how long something keeps it.

A model is read once before anything is changed, and that pass is counted here: so a sweep knows what one
row needs, whatever the layers are and whichever backend runs them, before it chooses its batches.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qkv.nn import Taps

Storage = torch.UntypedStorage


@dataclass(frozen=True)
class Need:
    """Bytes that a sweep's tensors take at most beside the weights, and in how large batches it runs.

    `kept` is held from its beginning to its end, `row` by each row of a batch while it runs; `rows` are
    the most of a batch. Not in it: blocks that a kernel takes and gives back within itself, which do not
    grow with the rows, and what the heap leaves empty between tensors.
    """

    kept: int = 0
    row: int = 0
    rows: int = 0

    @property
    def bytes(self) -> int:
        return self.kept + self.rows * self.row

    def __lt__(self, other: Need) -> bool:
        return self.bytes < other.bytes

    def facts(self) -> dict[str, float]:
        """Of a result: the bytes it took at most, and the rows of its largest batch."""
        return {"bytes": self.bytes, "rows": self.rows}


class Footprint(TorchDispatchMode):
    """Counts the bytes of tensors that operations make in its block and that something still holds.

    `now` are held, `most` were held at once. Memory is counted once, however many tensors look at it;
    what was there before is not, nor what a kernel takes and gives back within itself.
    """

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True, or torch's compiler would refuse to run beside it (flex attention)."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._counted: dict[int, int] = {}  # bytes by the storage's address, as long as it lives

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        for storage in _storages(made):
            if storage._cdata not in given and storage._cdata not in self._counted:
                self._count(storage)
        return made

    def release(self, value: Tensor) -> None:
        """Counts a value no more: it is kept for good, and no matter of this pass."""
        self._free(value.untyped_storage()._cdata)

    def _count(self, storage: Storage) -> None:
        self._counted[storage._cdata] = storage.nbytes()
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._free, storage._cdata).atexit = False

    def _free(self, address: int) -> None:
        self.now -= self._counted.pop(address, 0)


class Watched(Taps):
    """Taps of a pass that is counted, `sizes` the bytes of each point that it came by.

    Names are the states between layers, in their order. They stay, so each is released from the count
    when the next one comes and the pass has no use for it; what another stack reads is not.
    """

    def __init__(self, names: Iterable[str], known: Iterable[str], footprint: Footprint):
        super().__init__(names, known)
        self.footprint, self.sizes = footprint, dict[str, int]()
        self._latest: Tensor | None = None

    def __call__(self, name: str, value: Tensor) -> Tensor:
        self.sizes[name] = value.numel() * value.element_size()
        if name in self.history:
            if self._latest is not None:
                self.footprint.release(self._latest)
            self._latest = None if name.endswith("final") else value
        return super().__call__(name, value)


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Of the memory that tensors look at, each counted once."""
    found = {storage._cdata: storage.nbytes() for storage in _storages(list(tensors))}
    return sum(found.values())


def _storages(tree: Any) -> Iterable[Storage]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf.untyped_storage()
