"""Writing GGUF, version 3: the layout that `gguf` describes, and the reader there reads.

The header says of every tensor what it is and where it lies, before the first byte of data. So the
writer is told all shapes and formats first, and then asks for the tensors one at a time.
"""

import math
import os
import secrets
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from qkv.checkpoints.formats import FORMATS
from qkv.checkpoints.gguf import ARRAY, BOOL, LARGEST_ALIGNMENT, LONGEST_NAME, NUMBERS, STRING, TENSOR_TYPES
from qkv.checkpoints.refusals import shown
from qkv.checkpoints.tensor import StoredTensor
from qkv.errors import CheckpointError, SourceError

VERSION = 3
LONGEST_TENSOR_NAME = 63  # bytes; ggml has 64 for a name and its end
CODES = {name: code for code, name in TENSOR_TYPES.items()}
KINDS = {np.dtype(code): kind for kind, code in NUMBERS.items()}
WHOLE = tuple(np.dtype(code) for code in ("<u4", "<i4", "<u8", "<i8"))


class Outline(NamedTuple):
    """A tensor without its values; `shape` is row-major, `format` a name in `FORMATS`."""

    shape: tuple[int, ...]
    format: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // FORMATS[self.format].block * FORMATS[self.format].size


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    outlines: Mapping[str, Outline],
    fetch: Callable[[str], StoredTensor],
) -> None:
    """Write a GGUF file: the metadata, then the tensors of these outlines, fetched one after the other.

    A value is written in the type it has: `bool`, `str`, numbers and arrays of numpy, lists of texts,
    of numbers or of lists. Python's own numbers take the first of uint32, int32, uint64 and int64
    that holds them, and float32 where that is exact, else float64. Texts with the surrogates that
    `read_gguf` gives are written as the bytes they stand for. `general.alignment` is obeyed.

    The file appears whole or not at all, and replaces one of the same name; tensors mapped from the
    replaced file stay valid. Raises `CheckpointError` for what the format cannot hold, and
    `SourceError` where the folder does not exist.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise SourceError(f"{path.parent} is not a folder, so {path.name} cannot be written there.")
    alignment = _alignment(metadata)
    header = _header(metadata, outlines, alignment)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("xb") as file:
            file.write(header)
            _pad(file, alignment)
            for name, outline in outlines.items():
                file.write(_data(name, outline, fetch(name)))
                _pad(file, alignment)
            file.flush()
            os.fsync(file.fileno())  # a rename may reach the disk before the contents do
        part.replace(path)
    except OSError as error:
        raise CheckpointError(f"{path.name} could not be written: {error.strerror or error}.") from error
    finally:
        part.unlink(missing_ok=True)


def _data(name: str, outline: Outline, tensor: StoredTensor) -> bytes | memoryview:
    if (tensor.shape, tensor.format) != (outline.shape, outline.format):
        raise CheckpointError(
            f"tensor {shown(name)} was announced as {list(outline.shape)} in {outline.format} "
            f"and is {list(tensor.shape)} in {tensor.format}."
        )
    return np.ascontiguousarray(tensor.data).data


def _pad(file: BinaryIO, alignment: int) -> None:
    file.write(bytes(-file.tell() % alignment))


def _alignment(metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    whole = isinstance(alignment, int | np.integer) and not isinstance(alignment, bool)
    if not whole or not 8 <= alignment <= LARGEST_ALIGNMENT or alignment & (alignment - 1):
        raise CheckpointError(
            f"general.alignment is {shown(str(alignment))}; "
            f"it must be a power of two from 8 to {LARGEST_ALIGNMENT:,}."
        )
    return int(alignment)


def _header(metadata: Mapping[str, Any], outlines: Mapping[str, Outline], alignment: int) -> bytes:
    parts = [b"GGUF", struct.pack("<IQQ", VERSION, len(outlines), len(metadata))]
    for key, value in metadata.items():
        kind, data = _value(key, value)
        parts += [_name(key, LONGEST_NAME), struct.pack("<I", kind), data]
    offset = 0
    for name, outline in outlines.items():
        parts += [_name(name, LONGEST_TENSOR_NAME), _entry(name, outline), struct.pack("<Q", offset)]
        offset += -(-outline.nbytes // alignment) * alignment
    return b"".join(parts)


def _entry(name: str, outline: Outline) -> bytes:
    shape, format = outline
    if format not in CODES:
        raise CheckpointError(f"tensor {shown(name)} is in {shown(format)}, which GGUF has no type for.")
    if len(shape) > 4 or 0 in shape:
        raise CheckpointError(
            f"tensor {shown(name)} has the shape {list(shape)}; GGUF holds at most 4 dimensions, none empty."
        )
    block = FORMATS[format].block
    if (shape[-1] if shape else 1) % block:
        raise CheckpointError(
            f"tensor {shown(name)} has the shape {list(shape)}, whose rows are no multiple of "
            f"{block} ({format})."
        )
    return struct.pack(f"<I{len(shape)}QI", len(shape), *shape[::-1], CODES[format])


def _name(name: str, longest: int) -> bytes:
    try:
        data = name.encode("utf-8")
    except UnicodeEncodeError:
        raise CheckpointError(f"The name {shown(name)} is no Unicode.") from None
    if len(data) > longest:
        raise CheckpointError(f"The name {shown(name)} has {len(data):,} bytes; the format has {longest:,}.")
    return struct.pack("<Q", len(data)) + data


def _value(key: str, value: Any) -> tuple[int, bytes]:
    """The type of a value, and its bytes."""
    if isinstance(value, str):
        return STRING, _text(key, value)
    if isinstance(value, list | tuple | np.ndarray):
        return ARRAY, _array(key, value)
    if isinstance(value, bool | np.bool_):
        return BOOL, bytes([bool(value)])
    array = _typed(key, value)
    return KINDS[array.dtype], array.tobytes()


def _text(key: str, text: str) -> bytes:
    try:
        data = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise CheckpointError(f"{shown(key)} holds text that is no Unicode.") from None
    return struct.pack("<Q", len(data)) + data


def _array(key: str, values: Sequence[Any] | np.ndarray) -> bytes:
    if not isinstance(values, np.ndarray):
        # an empty list has no type of its own; the reader gives one for an array of texts
        if all(isinstance(value, str) for value in values):
            texts = (_text(key, value) for value in values)
            return struct.pack("<IQ", STRING, len(values)) + b"".join(texts)
        if all(isinstance(value, list | tuple | np.ndarray) for value in values):
            return struct.pack("<IQ", ARRAY, len(values)) + b"".join(_array(key, each) for each in values)
    elif values.ndim != 1:
        raise CheckpointError(f"{shown(key)} is an array of {values.ndim} dimensions; one is possible.")
    flags = isinstance(values, np.ndarray) and values.dtype == np.bool_
    if flags or all(isinstance(value, bool) for value in values):
        return struct.pack("<IQ", BOOL, len(values)) + bytes(map(bool, values))
    array = _typed(key, values)
    return struct.pack("<IQ", KINDS[array.dtype], len(array)) + array.tobytes()


def _typed(key: str, value: Any) -> np.ndarray:
    """Numbers in a type that the format has: their own, or for Python's the first that holds them."""
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        array = array.astype(array.dtype.newbyteorder("<"))
        if array.dtype in KINDS:
            return array
        raise CheckpointError(f"{shown(key)} is of type {array.dtype}, which GGUF has no type for.")
    numbers = value if isinstance(value, list | tuple) else [value]
    if all(type(number) is int for number in numbers):
        for dtype in WHOLE:
            limits = np.iinfo(dtype)
            if all(limits.min <= number <= limits.max for number in numbers):
                return np.array(value, dtype)
        raise CheckpointError(f"{shown(key)} holds a number that takes more than 64 bits.")
    if not all(type(number) in (int, float) for number in numbers):
        raise CheckpointError(f"{shown(key)} is {shown(repr(value))}, which GGUF has no type for.")
    double = np.array(value, "<f8")
    with np.errstate(over="ignore"):
        single = double.astype("<f4")
    return single if np.array_equal(single, double, equal_nan=True) else double
