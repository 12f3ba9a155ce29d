"""Models as GGUF files: from a folder in Hugging Face layout, or from another GGUF in other types."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qkv.checkpoints import (
    ENCODERS,
    FORMATS,
    Outline,
    StoredTensor,
    quantise,
    read_gguf,
    squared_error,
    write_gguf,
)
from qkv.errors import RequestError, UnsupportedError
from qkv.families import family_of
from qkv.families.gguf_metadata import written
from qkv.loading import Progress, checked, entries, in_folder, opened
from qkv.sources import find
from qkv.text.gguf_metadata import metadata_of

# where rows do not divide into blocks: the nearest larger type with smaller ones, and F16 at last
FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
# small, and every weight counts: they choose experts, or are added to the stream as they are
WHOLE = ("ffn_gate_inp", "position_embd")
PLAIN = ("F32", "F16", "BF16")
# numbers that general.file_type has for the type of most tensors
FILE_TYPES = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 7,
    "Q5_0": 8,
    "Q5_1": 9,
    "Q4_K": 14,
    "Q5_K": 16,
    "Q6_K": 18,
    "BF16": 32,
}


class Stored(NamedTuple):
    """Tensors of one type in a file: how many, their bytes, and the relative error that the type made.

    The error is the root of the squared differences' sum over that of the squared values.
    """

    format: str
    tensors: int
    bytes: int
    error: float


@dataclass(frozen=True)
class Conversion:
    """What was written; `types` in the order of their size. `before` is the size of what was read.

    `notes` say, a sentence each, what readers of the file will do otherwise.
    """

    path: Path
    bytes: int
    before: int
    types: tuple[Stored, ...]
    notes: tuple[str, ...] = ()

    def data(self) -> dict[str, Any]:
        types = {
            each.format: {"tensors": each.tensors, "bytes": each.bytes, "relative_error": each.error}
            for each in self.types
        }
        return {
            "path": str(self.path),
            "bytes": self.bytes,
            "source_bytes": self.before,
            "types": types,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        lines = [f"{'type':<6}{'tensors':>9}{'bytes':>18}  relative error"]
        for each in self.types:
            error = f"{each.error:.6f}" if each.error else "none"
            lines.append(f"{each.format:<6}{each.tensors:>9,}{each.bytes:>18,}  {error}")
        total = sum(each.tensors for each in self.types)
        lines.append(f"{'file':<6}{total:>9,}{self.bytes:>18,}  from {self.before:,} bytes of tensors")
        return "\n".join([*lines, *self.notes])


def convert(
    source: str | Path,
    out: str | Path,
    type: str | None = None,
    ignore: str | Iterable[str] | None = (),
    progress: Progress | None = None,
) -> Conversion:
    """Writes a model as one GGUF file, and says what that cost.

    `source` is as for `load`. `type` is what matrices are stored in (F32, F16, BF16, Q8_0, Q6_K,
    Q5_K, Q5_1, Q5_0, Q4_K, Q4_1 or Q4_0); None keeps the types they have, so that nothing is
    lost. Vectors, routers and learned positions are F32. A matrix whose rows are no multiple of
    a type's blocks is Q5_0, Q5_1 or Q8_0 instead of Q4_K, Q5_K or Q6_K, and F16 where they are no
    multiple of 32. A tensor of a GGUF that has the type already is copied byte for byte.

    One tensor is in memory at a time. The file appears whole or not at all. Raises a QkvError, with
    nothing written: UnsupportedError, ConfigError or TokenizerError for what GGUF has no way to say.
    """
    out = Path(out)
    type = type and type.upper()  # q4_k is what others write
    if type is not None and type not in ENCODERS:
        raise RequestError(f"type {type!r} is not known ({', '.join(ENCODERS)}).")
    if out.suffix.lower() != ".gguf":
        raise UnsupportedError(f"{out} does not end in .gguf, and other files are not written yet.")
    if out.exists():
        raise RequestError(f"{out} already exists: choose another name.")
    path, ignored = find(source), entries(ignore)
    if in_folder(path):
        plan = _from_folder(path, type, ignored)
    elif ignored:
        raise RequestError("ignore is for folders: a .gguf is converted tensor by tensor, whatever it is of.")
    else:
        plan = _from_gguf(path, type)
    return _write(plan, out, progress)


@dataclass(frozen=True)
class _Plan:
    """A file before it is written. `make` gives a tensor's values, or the tensor where it is copied."""

    metadata: Mapping[str, Any]
    outlines: Mapping[str, Outline]
    make: Callable[[str], np.ndarray | StoredTensor]
    before: int
    notes: tuple[str, ...] = ()


@dataclass
class _Sums:
    tensors: int = 0
    bytes: int = 0
    squares: list[tuple[float, float]] = field(default_factory=list)


def _write(plan: _Plan, out: Path, progress: Progress | None) -> Conversion:
    sums: dict[str, _Sums] = {}

    def fetch(name: str) -> StoredTensor:
        shape, format = plan.outlines[name]
        made = plan.make(name)
        tensor = made if isinstance(made, StoredTensor) else quantise(name, made.reshape(shape), format)
        here = sums.setdefault(format, _Sums())
        here.tensors, here.bytes = here.tensors + 1, here.bytes + tensor.nbytes
        if not isinstance(made, StoredTensor):
            here.squares.append(squared_error(made, tensor))
        if progress is not None:
            progress(sum(each.tensors for each in sums.values()), len(plan.outlines))
        return tensor

    write_gguf(out, plan.metadata, plan.outlines, fetch)
    types = [Stored(format, each.tensors, each.bytes, _error(each.squares)) for format, each in sums.items()]
    types.sort(key=lambda each: -each.bytes)
    return Conversion(out, out.stat().st_size, plan.before, tuple(types), plan.notes)


def _error(squares: list[tuple[float, float]]) -> float:
    error, size = (math.fsum(each[i] for each in squares) for i in (0, 1))
    return math.sqrt(error / size) if size else 0.0


def _from_folder(path: Path, wanted: str | None, ignore: tuple[str, ...]) -> _Plan:
    files = opened(path, ignore)
    here, folder = checked(files, ignore), path if path.is_dir() else path.parent
    kind = files.config["model_type"]
    said = {**family_of(kind, "config.json").defaults.get(str(kind), {}), **files.config}
    there = written(files.description, said, path.name)
    outlines: dict[str, Outline] = {}
    for name in there.places.theirs:
        sources = {
            files.tensors[piece.place.name].format
            for part in there.places.theirs[name]
            for piece in here.ours[part.ours]
        }
        shape = there.places.shape(name)
        outlines[name] = Outline(shape, _format(name, shape, sources, wanted))
    outlines |= {name: Outline(values.shape, "F32") for name, values in there.constants.items()}

    def ours(name: str) -> np.ndarray:
        return there.value(name, here.read(name, lambda theirs: files.tensors[theirs].decode()))

    def make(name: str) -> np.ndarray:
        found = there.constants.get(name)
        return there.places.write(name, ours) if found is None else found

    notes: tuple[str, ...] = ()
    metadata = {**there.metadata, "general.name": folder.resolve().name, **_kind(outlines)}
    if files.tokenizer is not None:
        vocab = int(metadata[f"{there.kind}.vocab_size"])
        keys, notes = metadata_of(folder, files.tokenizer, vocab, files.ends)
        metadata |= keys
    before = sum(tensor.nbytes for tensor in files.tensors.values())
    return _Plan(metadata, outlines, make, before, notes)


def _from_gguf(path: Path, wanted: str | None) -> _Plan:
    file = read_gguf(path)
    outlines = {name: Outline(tensor.shape, _again(tensor, wanted)) for name, tensor in file.tensors.items()}

    def make(name: str) -> np.ndarray | StoredTensor:
        tensor = file.tensors[name]
        return tensor if tensor.format == outlines[name].format else tensor.decode()

    before = sum(tensor.nbytes for tensor in file.tensors.values())
    return _Plan({**file.metadata, **_kind(outlines)}, outlines, make, before)


def _again(tensor: StoredTensor, wanted: str | None) -> str:
    """The type of a tensor that has one already: vectors and what is whole stay as they are."""
    if wanted is None or len(tensor.shape) < 2 or tensor.name.startswith("rope_") or _is_whole(tensor.name):
        return tensor.format
    return _format(tensor.name, tensor.shape, {tensor.format}, wanted)


def _format(name: str, shape: tuple[int, ...], sources: set[str], wanted: str | None) -> str:
    if len(shape) < 2 or _is_whole(name):
        return "F32"
    if wanted is None:
        return next(iter(sources)) if len(sources) == 1 and sources <= set(PLAIN) else "F32"
    return fitting(wanted, shape[-1])


def fitting(wanted: str, columns: int) -> str:
    """The type for a matrix of so many columns: the wanted one, or what stands in where blocks do not fit."""
    while columns % FORMATS[wanted].block:
        wanted = FALLBACK.get(wanted, "F16")
    return wanted


def _is_whole(name: str) -> bool:
    return any(part in name for part in WHOLE)


def _kind(outlines: Mapping[str, Outline]) -> dict[str, Any]:
    """What a file says of its types: that of most bytes, and the version of block formats if it has any."""
    sizes: dict[str, int] = {}
    for outline in outlines.values():
        sizes[outline.format] = sizes.get(outline.format, 0) + outline.nbytes
    most = max(sizes, key=sizes.__getitem__, default="F32")
    found = {"general.file_type": FILE_TYPES[most]} if most in FILE_TYPES else {}
    return found | ({} if sizes.keys() <= set(PLAIN) else {"general.quantization_version": 2})
